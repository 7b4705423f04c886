"""Gradients and metrics of an epoch are exact with SameStep; two tests measure the faults of plain Lightning."""

import pytest
import torch
from torch import nn

from tests.lightning.trained import closing, fit, make_trainer, max_difference, numbers, regression, weights

pytestmark = pytest.mark.slow

VALUES = [0.0, 3.0, 6.0, 9.0, 12.0]  # their mean is 6


def plain_value(padded):
    return closing(_plain_value, padded)


class FiveValues:
    """Five values with mean 6: DistributedSampler repeats the first, an exact split gives one rank a row less."""

    def __len__(self):
        return len(VALUES)

    def __getitem__(self, index):
        return torch.tensor(VALUES[index])


def logging_module():
    module = regression()

    def validation_step(batch):
        module.log("val/value", batch.mean(), sync_dist=True, batch_size=len(batch))

    module.validation_step = validation_step
    return module


def _plain_value(padded):
    """Return the mean of `FiveValues` in plain Lightning, with its own sampler or with an exact one."""
    from torch.utils.data import DataLoader

    loader = DataLoader(FiveValues(), batch_size=2)
    if not padded:
        loader = DataLoader(FiveValues(), batch_size=2, sampler=ExactSampler())
    trainer = make_trainer(use_distributed_sampler=padded)
    (values,) = trainer.validate(logging_module(), loader, verbose=False)
    return values["val/value"]


class ExactSampler:
    """Splits the samples over ranks without repeating one."""

    def __iter__(self):
        import torch.distributed as dist

        return iter(range(len(VALUES))[dist.get_rank() :: dist.get_world_size()])

    def __len__(self):
        return len(list(iter(self)))


def same_step_value():
    return closing(_same_step_value)


def _same_step_value():
    from torch.utils.data import DataLoader

    from samestep.lightning import SameStep

    same = SameStep(global_batch=8)
    trainer = make_trainer(callbacks=[same])
    (values,) = trainer.validate(
        logging_module(), datamodule=same.dataloaders(val=DataLoader(FiveValues(), batch_size=2)), verbose=False
    )
    return values["val/value"]


def test_plain_lightning_logs_a_wrong_mean_on_two_ranks_and_same_step_the_true_one(ranks):
    assert ranks(2, plain_value, True) == pytest.approx([5.0, 5.0])  # the sampler repeats the first sample: 30 / 6
    assert ranks(2, plain_value, False) == pytest.approx([7.5, 7.5])  # counts of 3 and 2 are averaged to 2: 15 / 2
    assert ranks(2, same_step_value) == pytest.approx([6.0, 6.0])


def test_metrics_of_an_epoch_equal_those_of_one_rank_for_every_reduction(ranks):
    (one,) = ranks(1, fit, 29, {}, {})
    for two in ranks(2, fit, 29, {}, {}):
        for name in ("val/label", "val/synced", "val/largest", "val/count", "train/loss_epoch"):
            assert two[2][name] == pytest.approx(one[2][name], rel=1e-6), name
    assert (one[2]["val/label"], one[2]["val/largest"], one[2]["val/count"]) == (14.0, 28.0, 29.0)


def plain_window():
    return closing(_plain_window)


def _plain_window():
    """Return the ratio of a batch's gradient to that of a last window of one batch when four are accumulated."""
    from torch.utils.data import DataLoader

    module, gradients = regression(lr=0.0), []
    module.on_before_optimizer_step = lambda optimizer: gradients.append(module.net[0].weight.grad.clone())
    trainer = make_trainer(accumulate_grad_batches=4)
    trainer.fit(module, DataLoader(numbers(5), batch_size=1))
    inputs, labels = numbers(5)[4]
    module.zero_grad()
    ((module.net(inputs)[0] - labels / 10) ** 2).backward()
    return float((module.net[0].weight.grad / gradients[-1]).mean())


def test_plain_lightning_makes_the_gradient_of_the_last_window_four_times_too_small(ranks):
    assert ranks(1, plain_window) == pytest.approx([4.0], rel=1e-4)


def plain_loop(n, epochs):
    """Train the same without Lightning and without ranks."""
    from samestep.data.permutation import SampleOrder

    module, data = regression(), numbers(n)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for epoch in range(epochs):
        order = SampleOrder(n, 0, shuffle=True).indices(epoch, 0, n)
        for start in range(0, n, 8):
            inputs, labels = data[order[start : start + 8].tolist()]
            optimizer.zero_grad()
            ((module.net(inputs)[:, 0] - labels / 10) ** 2).mean().backward()
            optimizer.step()
    return weights(module)


@pytest.fixture(scope="module")
def reference(ranks):
    return ranks(1, plain_loop, 29, 2)[0]


def test_an_unchanged_module_gets_the_weights_of_a_plain_training_loop(ranks, reference):
    for size, given in ((1, {"micro_batch": 3}), (2, {"micro_batch": 3}), (3, {})):
        assert max_difference(reference, ranks(size, fit, 29, given, {"max_epochs": 2})[0][0]) < 1e-6


def fit_manually(micro_batch=None):
    return closing(_fit_manually, micro_batch)


def _fit_manually(micro_batch):
    from samestep.lightning import SameStep
    from tests.lightning.trained import loader

    same, module = SameStep(global_batch=8, micro_batch=micro_batch), regression()
    module.automatic_optimization = False
    loss = type(module).training_step

    def training_step(batch):
        optimizer = module.optimizers()
        optimizer.zero_grad()
        value = loss(module, batch)
        module.manual_backward(value)
        optimizer.step()
        return value

    module.training_step = training_step
    make_trainer(callbacks=[same], max_epochs=2).fit(module, datamodule=same.dataloaders(train=loader(29)))
    return weights(module)


def test_manual_optimization_gets_the_same_weights(ranks, reference):
    assert max_difference(reference, ranks(2, fit_manually)[0]) < 1e-6
    assert max_difference(reference, ranks(2, fit_manually, 4)[0]) < 1e-6  # the four samples of a rank are one batch


def test_manual_optimization_with_several_batches_per_step_is_an_error(ranks):
    for size, own in ((1, 8), (2, 4)):
        for error in ranks.errors(size, fit_manually, 3):
            assert "Regression uses manual optimization and steps once per batch" in error
            assert (
                f"splits the {own} sample(s) of a rank in a step into {-(-own // 3)} batches: leave micro_batch"
                in error
            )


def fit_masked():
    return closing(_fit_masked)


def _fit_masked():
    """Train on rows with different numbers of selected elements."""
    from samestep.lightning import SameStep, mean
    from tests.lightning.trained import loader

    same, module = SameStep(global_batch=8), regression()

    def training_step(batch):
        inputs, labels = batch
        losses = (module.net(inputs) - labels[:, None] / 10) ** 2 + 0 * inputs
        losses = torch.where(masked(labels), losses, torch.inf)
        return mean(module, losses, mask=masked(labels))

    module.training_step = training_step
    make_trainer(callbacks=[same], max_epochs=2).fit(module, datamodule=same.dataloaders(train=loader(29)))
    return weights(module), same.pop_losses(module.trainer)


def masked(labels):
    return torch.arange(4) <= labels[:, None] % 4


def test_a_masked_mean_is_over_the_selected_elements_of_all_ranks(ranks):
    ((one, one_losses),) = ranks(1, fit_masked)
    two = ranks(2, fit_masked)
    assert max_difference(one, two[0][0]) < 1e-6
    assert two[0][1] == pytest.approx(one_losses, rel=1e-5)
    assert len(one_losses) == 8


def misuse(case):
    return closing(_misuse, case)


def _misuse(case):
    from samestep.lightning import SameStep, mean
    from tests.lightning.trained import loader

    same, module = SameStep(global_batch=8, micro_batch=4 if case == "windows" else None), regression()

    def training_step(batch):
        losses = module.net(batch[0])
        if case == "scalar":
            return mean(module, losses.mean())
        if case == "shape":
            return mean(module, losses, mask=torch.ones(3, 3))
        if case == "nothing":
            return mean(module, losses, mask=torch.zeros_like(losses))
        return mean(module, losses, mask=torch.ones_like(losses))

    module.training_step = training_step
    if case == "outside":
        return same.batch_info
    if case == "early":
        return same.steps_per_epoch
    if case == "without":
        make_trainer().fit(module, loader(16))
        return None
    make_trainer(callbacks=[same]).fit(module, datamodule=same.dataloaders(train=loader(16)))
    return None


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("scalar", "samestep.lightning.mean got a single number and needs one loss per row"),
        ("shape", "the mask has shape (3, 3), and the losses have shape (8, 1)"),
        ("nothing", "the masks of step 0 select nothing on any rank"),
        ("windows", "a masked mean needs one batch per step, and this step has 2"),
        ("without", "samestep.lightning.mean was called in a Trainer without SameStep"),
        ("outside", "batch_info is not set outside a training batch"),
        ("early", "steps_per_epoch is not known before the training data is read"),
    ],
)
def test_a_wrong_use_of_mean_is_an_error(ranks, case, text):
    (error,) = ranks.errors(1, misuse, case)
    assert text in error


class Guided(nn.Module):
    """A text encoder that some batches do not use, as classifier-free guidance is often written.

    The gate is zero, so the gradient of the encoder is always zero: only the optimizer changes it.
    """

    def __init__(self, never: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.never = never
        self.encoder, self.net = nn.Linear(4, 8), nn.Linear(4, 8)
        self.register_buffer("gate", torch.zeros(()))

    def forward(self, inputs, labels):
        hidden = self.net(inputs)
        if int(labels[0]) % 2 and not self.never:
            hidden = hidden + self.gate * self.encoder(inputs)
        return hidden.sum(-1)


def fit_guided(unused, strategy):
    return closing(_fit_guided, unused, strategy)


def _fit_guided(unused, strategy):
    from samestep.lightning import SameStep
    from tests.lightning.trained import loader

    same, module = (
        SameStep(global_batch=8, unused_parameters=unused),
        regression(0.1, torch.optim.AdamW, weight_decay=0.1, eps=1e-4),
    )
    module.net = Guided(never=unused == "error")  # never used, so that all ranks raise and none waits

    def training_step(batch):
        inputs, labels = batch
        return ((module.net(inputs, labels) - labels / 10) ** 2).mean()

    module.training_step = training_step
    options = {} if strategy is None else {"strategy": strategy}
    make_trainer(callbacks=[same], max_epochs=3, **options).fit(module, datamodule=same.dataloaders(train=loader(29)))
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
    return weights(module)


def test_the_result_of_a_search_for_unused_parameters_depends_on_the_number_of_ranks(ranks):
    (one,) = ranks(1, fit_guided, "ignore", None)
    two = ranks(2, fit_guided, "ignore", "ddp_find_unused_parameters_true")
    assert max_difference(one, two[0]) > 1e-3


def test_zero_gradients_give_the_same_weights_on_any_number_of_ranks(ranks):
    (one,) = ranks(1, fit_guided, "zero", None)
    two = ranks(2, fit_guided, "zero", None)
    assert max_difference(one, two[0]) < 1e-6
    assert max_difference(two[0], two[1]) == 0


def test_an_unused_parameter_is_an_error_on_one_rank_as_on_two(ranks):
    for size in (1, 2):
        for rank, error in enumerate(ranks.errors(size, fit_guided, "error", None)):
            assert f"step 0 did not use 2 parameter(s) on rank {rank}: net.encoder.weight, net.encoder.bias" in error


def test_zero_gradients_together_with_a_search_are_an_error(ranks):
    errors = ranks.errors(2, fit_guided, "zero", "ddp_find_unused_parameters_true")
    assert all("the strategy searches for unused parameters" in error for error in errors)
    (error,) = ranks.errors(1, fit_guided, "never", None)
    assert "unused_parameters='never' is not an option of SameStep: use one of 'error', 'zero', 'ignore'" in error


def fit_dropping():
    return closing(_fit_dropping)


def _fit_dropping():
    """Train with ConditioningDropout, which draws per sample, in a LightningModule."""
    from samestep.lightning import SameStep
    from samestep.nn import ConditioningDropout
    from tests.lightning.trained import loader

    same, module = SameStep(global_batch=8, micro_batch=3), regression()
    module.drop = ConditioningDropout(0.5, null="learned", shape=(4,))
    with torch.no_grad():
        module.drop.null.fill_(0.5)

    def training_step(batch):
        inputs, labels = batch
        return ((module.net(module.drop(inputs))[:, 0] - labels / 10) ** 2).mean()

    module.training_step = training_step
    make_trainer(callbacks=[same], max_epochs=2).fit(module, datamodule=same.dataloaders(train=loader(29)))
    return weights(module)


def test_conditioning_is_dropped_for_the_same_samples_on_any_number_of_ranks(ranks):
    (one,) = ranks(1, fit_dropping)
    assert max_difference(one, ranks(2, fit_dropping)[0]) < 1e-6

"""What an unchanged LightningModule draws is keyed by sample: the same on any number of ranks and any micro-batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.lightning.trained import closing, loader, make_trainer, max_difference, regression, weights

pytestmark = pytest.mark.slow


def vae():
    """Return a variational autoencoder as it is usually written, with dropout, augmentation and stochastic depth."""
    from lightning.pytorch import LightningModule

    from samestep.lightning import normal, random

    class VAE(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.encoder = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8)).double()
            self.decoder = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 6)).double()
            self.validated: list[torch.Tensor] = []

        def forward(self, x):
            mean, log_variance = checkpoint(self.encoder, x, use_reentrant=False).chunk(2, dim=1)
            z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
            return self.decoder(z), (mean.square() + log_variance.exp() - log_variance).sum(1)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            (x,) = batch
            return (x + 0.1 * torch.randn_like(x) if self.training else x,)

        def loss(self, x):
            output, kl = self(functional.dropout(x, 0.1))
            depth = torch.bernoulli(torch.full((len(x), 1), 0.8, dtype=x.dtype))
            output = output * depth + 0.1 * normal(self, 6) + 0.1 * random(self, 6)
            return ((output - x).square().sum(1) + 0.1 * kl).mean()

        def training_step(self, batch):
            return self.loss(batch[0])

        def validation_step(self, batch):
            self.log("val/loss", self.loss(batch[0]))

        def predict_step(self, batch):
            return self(batch[0])[0] + normal(self, 6)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return VAE()


def data(shuffle):
    rows = torch.randn(29, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(rows), batch_size=4, shuffle=shuffle)


def fit_vae(micro_batch):
    return closing(_fit_vae, micro_batch)


def _fit_vae(micro_batch):
    """Return weights, the validation loss of the last epoch, and predictions."""
    from samestep.lightning import SameStep

    same, module = SameStep(global_batch=8, seed=3, micro_batch=micro_batch), vae()
    trainer = make_trainer(callbacks=[same], max_epochs=2)
    loaders = same.dataloaders(train=data(True), val=data(False), predict=data(False))
    trainer.fit(module, datamodule=loaders)
    loss = float(trainer.callback_metrics["val/loss"])
    return weights(module), loss, torch.cat(trainer.predict(module, datamodule=loaders))


def test_an_unchanged_vae_is_the_same_on_any_number_of_ranks_and_micro_batches(ranks):
    ((one, loss, predicted),) = ranks(1, fit_vae, None)
    for size, micro_batch in ((1, 3), (2, None), (2, 3), (3, None)):
        for mine, my_loss, my_predicted in ranks(size, fit_vae, micro_batch):
            assert max_difference(mine, one) < 1e-12
            assert my_loss == pytest.approx(loss, rel=1e-12)
            torch.testing.assert_close(my_predicted, predicted, rtol=1e-12, atol=1e-12)


def fit_time_first(batch_dim):
    return closing(_fit_time_first, batch_dim)


def _fit_time_first(batch_dim):
    """Return the weights of a module with the batch in dimension 1; one rank has 8 rows and 8 time steps."""
    from samestep.lightning import SameStep

    same, module = SameStep(global_batch=8, seed=3, batch_dim=batch_dim), regression().double()

    def step(batch, *_):
        inputs, _ = batch
        hidden = functional.dropout(inputs.double().unsqueeze(0).repeat(8, 1, 1), 0.5)
        return module.net(hidden)[-1].square().sum(-1).mean()

    module.training_step = step
    make_trainer(callbacks=[same], max_epochs=2).fit(module, datamodule=same.dataloaders(train=loader(16)))
    return weights(module)


def test_a_declared_batch_dimension_is_used_where_the_shape_is_ambiguous(ranks):
    (one,) = ranks(1, fit_time_first, 1)
    for size in (2, 3):
        for mine in ranks(size, fit_time_first, 1):
            assert max_difference(mine, one) < 1e-12
    (error,) = ranks.errors(1, fit_time_first, None)
    assert "may have the 8 rows of the micro-batch in its first dimension or" in error


def draw(case):
    return closing(_draw, case)


def _draw(case):
    """Return what a step draws for each sample in two epochs: (epoch, sample, numbers)."""
    from samestep.lightning import SameStep, normal, random

    same, module, drawn = SameStep(global_batch=8), regression(), []

    def step(batch, *_):
        inputs, labels = batch
        calls = normal(module, 3), normal(module, 3), random(module, 3), torch.rand(len(labels), 3)
        for label, numbers in zip(labels.int().tolist(), torch.stack(calls, dim=1).tolist(), strict=True):
            drawn.append((module.current_epoch, label, numbers))
        return module.net(inputs).mean()

    module.training_step = module.validation_step = step
    if case == "outside":
        module.on_train_epoch_start = lambda: normal(module, 3)
    if case == "without":
        make_trainer().validate(module, loader(16, shuffle=False))
    trainer = make_trainer(callbacks=[same], max_epochs=2)
    if case == "validation":
        trainer.validate(module, datamodule=same.dataloaders(val=loader(16)))
    else:
        trainer.fit(module, datamodule=same.dataloaders(train=loader(16)))
    return sorted(drawn)


def test_numbers_of_a_sample_are_its_own_in_every_epoch_call_and_kind(ranks):
    (trained,), (validated,) = (ranks(1, draw, case) for case in ("training", "validation"))
    assert [(epoch, sample) for epoch, sample, _ in trained] == [(e, s) for e in range(2) for s in range(16)]
    numbers = [number for _, _, rows in (*trained, *validated) for row in rows for number in row]
    assert len(set(numbers)) == len(numbers) == 48 * 12
    two = sorted(each for rank in ranks(2, draw, "training") for each in rank)
    assert two == trained
    values = torch.tensor([rows for _, _, rows in (*trained, *validated)])
    assert abs(float(values[:, :2].mean())) < 0.2  # 288 standard normal numbers: more than 3 standard errors
    assert 0.8 < float(values[:, :2].std()) < 1.2
    assert 0.4 < float(values[:, 2:].mean()) < 0.6


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("outside", "samestep.lightning.normal was called outside a batch of SameStep: call it in training_step"),
        ("without", "samestep.lightning.normal was called in a Trainer without SameStep"),
    ],
)
def test_numbers_of_samples_need_a_batch_of_same_step(ranks, case, text):
    (error,) = ranks.errors(1, draw, case)
    assert text in error

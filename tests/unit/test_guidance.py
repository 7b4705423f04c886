"""Conditioning dropout and guidance without ranks: which rows are dropped, what has a gradient, what raises."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from samestep import Run, SamestepError
from samestep.data.sample_rng import sample_key_tensor, set_micro_batch
from samestep.errors import StepError
from samestep.nn import ConditioningDropout, guided


@pytest.fixture
def samples():
    """Set the samples of the current micro-batch, as a step does, and remove them after the test."""

    def set_samples(indices, epoch=0):
        keys = sample_key_tensor(0, epoch, torch.as_tensor(indices))
        set_micro_batch(keys)
        return keys

    yield set_samples
    set_micro_batch(None)


def dropped(module, rows):
    """The mask of the rows that the module replaces."""
    return (module(torch.ones(rows, 3)) == 0).all(dim=1)


def test_whether_a_sample_is_dropped_does_not_depend_on_its_batch(samples):
    module = ConditioningDropout(0.3, null="zeros")
    samples(range(64))
    together = dropped(module, 64)
    assert 0 < together.sum() < 64
    samples([7, 63, 20])
    assert torch.equal(dropped(module, 3), together[[7, 63, 20]])
    for index in range(8):
        samples([index])
        assert bool(dropped(module, 1)) == bool(together[index])


def test_another_epoch_drops_other_samples_and_the_fraction_is_p(samples):
    module = ConditioningDropout(0.1, null="zeros")
    masks = []
    for epoch in range(2):
        samples(range(20_000), epoch)
        masks.append(dropped(module, 20_000))
        assert abs(masks[-1].float().mean() - 0.1) < 0.01
    assert not torch.equal(*masks)


def test_streams_drop_independently_and_the_same_stream_drops_the_same_samples(samples):
    samples(range(10_000))
    first, again, other = (dropped(ConditioningDropout(0.5, null="zeros", stream=s), 10_000) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert abs((first & other).float().mean() - 0.25) < 0.02


@pytest.mark.parametrize(("p", "all_or_none"), [(0.0, False), (1.0, True)])
def test_p_of_zero_drops_none_and_p_of_one_drops_all(samples, p, all_or_none):
    samples(range(1000))
    assert dropped(ConditioningDropout(p, null="zeros"), 1000).eq(all_or_none).all()


def test_a_learned_null_replaces_dropped_rows(samples):
    module = ConditioningDropout(0.5, null="learned", shape=(8,))
    tokens = torch.randn(40, 5, 8)
    samples(range(40))
    out = module(tokens)
    replaced = (out != tokens).any(dim=2).all(dim=1)
    assert 0 < replaced.sum() < 40
    assert torch.equal(out[replaced], module.null.detach().expand(int(replaced.sum()), 5, 8))
    assert torch.equal(out[~replaced], tokens[~replaced])


@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
def test_every_parameter_has_a_gradient_however_many_rows_are_dropped(samples, p):
    encoder, module = torch.nn.Linear(4, 8), ConditioningDropout(p, null="learned", shape=(8,))
    samples(range(6))
    module(encoder(torch.randn(6, 4))).square().sum().backward()
    for parameter in (*encoder.parameters(), *module.parameters()):
        assert parameter.grad is not None
    assert bool(encoder.weight.grad.any()) == (p < 1)
    assert bool(module.null.grad.any()) == (p > 0)


def test_activation_checkpointing_drops_the_same_rows_when_it_recomputes(samples, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # otherwise torch sets it permanently
    encoder, module = torch.nn.Linear(4, 8), ConditioningDropout(0.5, null="learned", shape=(8,))
    x = torch.randn(32, 4)
    samples(range(32))
    gradients = []
    for compute in (lambda: module(encoder(x)), lambda: checkpoint(lambda: module(encoder(x)), use_reentrant=False)):
        encoder.zero_grad()
        compute().square().sum().backward()
        gradients.append(encoder.weight.grad.clone())
    assert torch.equal(*gradients)


def test_evaluation_mode_changes_nothing_and_drop_selects_rows(samples):
    module = ConditioningDropout(1.0, null="learned", shape=(2, 3)).eval()
    x = torch.randn(3, 2, 3)
    assert module(x) is x
    out = module(x, drop=torch.tensor([True, False, True]))
    assert torch.equal(out[1], x[1])
    assert torch.equal(out[0], module.null.detach())
    assert torch.equal(out[2], module.null.detach())
    samples(range(3))
    assert torch.equal(module.train()(x, drop=torch.zeros(3, dtype=torch.bool)), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_of_the_conditioning_is_kept(samples, dtype):
    samples(range(4))
    for module in (ConditioningDropout(0.5, null="zeros"), ConditioningDropout(0.5, null="learned", shape=(1,))):
        assert module(torch.ones(4, 3, dtype=dtype)).dtype == dtype


def test_a_step_sets_the_keys_of_its_samples(tmp_path):
    module = ConditioningDropout(0.5, null="zeros")
    with Run(global_batch=4, seed=3, folder=tmp_path) as run:
        for epoch in run.shard([torch.tensor([float(i + 1)]) for i in range(8)], shuffle=True).epochs(1):
            masks = {
                int(row): bool(out == 0) for step in epoch for b in step for row, out in zip(b, module(b), strict=True)
            }
    keys = sample_key_tensor(3, 0, torch.arange(8))
    set_micro_batch(keys)
    expected = (module(torch.ones(8, 1)) == 0).flatten().tolist()
    set_micro_batch(None)
    assert [masks[i + 1] for i in range(8)] == expected


def test_training_mode_outside_of_a_step_raises():
    with pytest.raises(StepError, match=r"called in training mode outside of a step, without samples to draw for"):
        ConditioningDropout(0.1, null="zeros")(torch.ones(2, 3))


def test_rows_that_do_not_match_the_samples_raise(samples):
    samples(range(4))
    with pytest.raises(
        StepError, match=r"got 8 rows of conditioning in a micro-batch of 4 samples: pass one row per sample"
    ):
        ConditioningDropout(0.1, null="zeros")(torch.ones(8, 3))


def test_invalid_conditioning_raises(samples):
    samples(range(4))
    with pytest.raises(StepError, match=r"got torch.int64 of shape \(4,\): pass floating point .* embed class labels"):
        ConditioningDropout(0.1, null="zeros")(torch.arange(4))
    with pytest.raises(StepError, match=r"got torch.float32 of shape \(\)"):
        ConditioningDropout(0.1, null="zeros")(torch.tensor(1.0))
    with pytest.raises(
        StepError, match=r"a null of shape \(8,\) and got conditioning of shape \(5, 3\) .* shape=\(5, 3\)"
    ):
        ConditioningDropout(0.1, null="learned", shape=(8,))(torch.ones(4, 5, 3))
    with pytest.raises(StepError, match=r"a null of shape \(2, 3\) and got conditioning of shape \(3,\)"):
        ConditioningDropout(0.1, null="learned", shape=(2, 3))(torch.ones(4, 3))


@pytest.mark.parametrize("drop", [torch.ones(3), torch.ones(2, dtype=torch.bool), torch.ones(3, 1, dtype=torch.bool)])
def test_a_drop_mask_of_another_shape_or_dtype_raises(drop):
    with pytest.raises(StepError, match=r"drop is torch\.\w+ of shape \(.*\) and must be torch.bool of shape \(3,\)"):
        ConditioningDropout(0.1, null="zeros")(torch.ones(3, 2), drop=drop)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"p": 1.5, "null": "zeros"}, r"got p=1.5: pass a probability from 0 to 1"),
        ({"p": 0.1, "null": "mean"}, r"does not know null='mean': use one of 'learned', 'zeros'"),
        ({"p": 0.1, "null": "learned"}, r"null='learned' needs the shape of one sample's conditioning"),
        ({"p": 0.1, "null": "zeros", "shape": (3,)}, r"takes no shape, got shape=\(3,\): omit it"),
    ],
)
def test_invalid_options_raise(arguments, message):
    with pytest.raises(SamestepError, match=message):
        ConditioningDropout(**arguments)


def test_repr_shows_the_options():
    assert "p=0.1, null=learned (8,), stream=0" in repr(ConditioningDropout(0.1, null="learned", shape=(8,)))
    assert "p=0.1, null=zeros, stream=2" in repr(ConditioningDropout(0.1, null="zeros", stream=2))


def test_guided_follows_its_formula():
    conditional, unconditional = torch.tensor([2.0, 4.0]), torch.tensor([1.0, 1.0])
    assert torch.equal(guided(conditional, unconditional, 0.0), unconditional)
    assert torch.equal(guided(conditional, unconditional, 1.0), conditional)
    assert torch.equal(guided(conditional, unconditional, 3.0), torch.tensor([4.0, 10.0]))


def test_guided_raises_for_different_shapes():
    with pytest.raises(
        SamestepError, match=r"shape \(2, 3\) and an unconditional one of shape \(3,\): pass two predictions"
    ):
        guided(torch.ones(2, 3), torch.ones(3), 2.0)

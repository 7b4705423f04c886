"""trainer.predict returns the predictions of all samples in the order of the dataset, on every rank."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from tests.lightning.trained import closing, loader, make_trainer, numbers, regression

pytestmark = pytest.mark.slow


def predict(n, rows, options, kwargs=None):
    return closing(_predict, n, rows, options, kwargs or {})


def _predict(n, rows, options, kwargs):
    """Return what trainer.predict returns, and the labels that this rank predicted in each batch."""
    from samestep.lightning import SameStep

    same, module = SameStep(global_batch=8), predictor()
    data = same.dataloaders(predict=loader(n, rows=rows, shuffle=kwargs.pop("shuffle", False)))
    predictions = make_trainer(callbacks=[same, *options.pop("callbacks", [])], **options).predict(
        module, datamodule=data, **kwargs
    )
    return predictions, module.seen


def predictor():
    module = regression()

    def predict_step(batch):
        inputs, labels = batch
        module.seen.append(labels.int().tolist())
        return {"label": labels, "value": module.net(inputs)[:, 0], "rows": len(labels)}

    module.predict_step = predict_step
    return module


def test_predictions_are_complete_and_in_the_order_of_the_dataset_on_every_rank(ranks):
    ((one, _),) = ranks(1, predict, 29, 4, {})
    assert [batch["rows"] for batch in one] == [4, 4, 4, 4, 4, 4, 4, 1]
    assert torch.cat([batch["label"] for batch in one]).tolist() == list(range(29))
    for size in (2, 3):
        outcomes = ranks(size, predict, 29, 4, {})
        assert sorted(label for _, seen in outcomes for batch in seen for label in batch) == list(range(29))
        for predictions, _ in outcomes:
            for mine, alone in zip(predictions, one, strict=True):  # the batches of the DataLoader, as on one rank
                assert mine["label"].tolist() == alone["label"].tolist()
                assert torch.equal(mine["value"], alone["value"])
                assert mine["rows"] == alone["rows"]


def test_fewer_batches_than_ranks_are_split_and_shuffle_does_not_change_the_order(ranks):
    for predictions, _ in ranks(3, predict, 5, 32, {}, {"shuffle": True}):
        assert [batch["label"].tolist() for batch in predictions] == [[0, 1], [2, 3], [4]]


def test_a_limit_selects_the_first_batches_of_the_dataset(ranks):
    for size in (1, 2):
        for predictions, _ in ranks(size, predict, 29, 4, {"limit_predict_batches": 3}):
            assert torch.cat([batch["label"] for batch in predictions]).tolist() == list(range(12))


def test_without_return_predictions_no_rank_gets_any(ranks):
    two = ranks(2, predict, 29, 4, {}, {"return_predictions": False})
    assert [predictions for predictions, _ in two] == [None, None]
    assert [sum(map(len, seen)) for _, seen in two] == [16, 13]


def predict_several():
    return closing(_predict_several)


def _predict_several():
    from samestep.lightning import SameStep

    same, module = SameStep(global_batch=8), regression()
    module.predict_step = lambda batch, batch_idx, dataloader_idx: batch[1] + 100 * dataloader_idx
    data = same.dataloaders(predict=[loader(5, rows=2, shuffle=False), loader(7, shuffle=False)])
    return make_trainer(callbacks=[same]).predict(module, datamodule=data)


def test_several_dataloaders_give_a_list_each(ranks):
    for first, second in ranks(2, predict_several):
        assert torch.cat(first).tolist() == [0, 1, 2, 3, 4]
        assert torch.cat(second).tolist() == [100, 101, 102, 103, 104, 105, 106]


def predict_of_datamodule():
    return closing(_predict_of_datamodule)


def _predict_of_datamodule():
    """Predict with the predict_dataloader of a datamodule after a training in the same Trainer."""
    from lightning.pytorch import LightningDataModule

    from samestep.lightning import SameStep

    class Data(LightningDataModule):
        def train_dataloader(self):
            return loader(16)

        def predict_dataloader(self):
            return loader(29, shuffle=False)

    same, module = SameStep(global_batch=8), predictor()
    trainer, data = make_trainer(callbacks=[same]), same.datamodule(Data())
    trainer.fit(module, datamodule=data)
    return torch.cat([batch["value"] for batch in trainer.predict(module, datamodule=data)])


def test_predictions_after_a_training_equal_those_of_one_rank(ranks):
    (one,) = ranks(1, predict_of_datamodule)
    assert len(one) == 29
    for values in ranks(2, predict_of_datamodule):
        torch.testing.assert_close(values, one, rtol=1e-6, atol=1e-6)


def write_predictions():
    return closing(_write_predictions)


def _write_predictions():
    """Return what a prediction writer of Lightning gets on this rank: batches with the indices of their samples."""
    from lightning.pytorch.callbacks import BasePredictionWriter

    written = []

    class Writer(BasePredictionWriter):
        def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, *_):
            written.append((prediction["label"].int().tolist(), list(batch_indices)))

        def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
            labels = [batch["label"].int().tolist() for batch in predictions]
            assert labels == [list(indices) for indices in batch_indices[0]]

    _predict(29, 4, {"callbacks": [Writer("batch_and_epoch")]}, {})
    return written


def test_a_prediction_writer_gets_the_batches_of_its_rank_with_their_indices(ranks):
    written = [batch for rank in ranks(2, write_predictions) for batch in rank]
    assert all(labels == indices for labels, indices in written)
    assert [label for labels, _ in written for label in labels] == list(range(29))


def predict_plain_loader():
    return closing(_predict_plain_loader)


def _predict_plain_loader():
    from samestep.lightning import SameStep
    from samestep.messages import SamestepWarning

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(callbacks=[SameStep(global_batch=8)]).predict(predictor(), DataLoader(numbers(6), batch_size=2))
    return [str(warning.message) for warning in caught if issubclass(warning.category, SamestepWarning)]


def test_predictions_of_a_plain_dataloader_on_several_ranks_are_warned_of(ranks):
    assert ranks(1, predict_plain_loader) == [[]]
    zero, one = ranks(2, predict_plain_loader)
    assert zero == [
        "trainer.predict got data that does not come from SameStep, so each of the 2 ranks returns the predictions of "
        "its own samples only: pass trainer.predict(module, datamodule=same.dataloaders(predict=...)), or "
        "same.datamodule(...) of a datamodule with a predict_dataloader"
    ]
    assert one == []

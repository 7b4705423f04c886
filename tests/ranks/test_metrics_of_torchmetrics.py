"""run.metric: metrics of torchmetrics over all ranks, without padding, and across restarts on other world sizes."""

import json
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanSquaredError, Metric, MetricCollection, MinMetric, PearsonCorrCoef, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
from torchmetrics.text import CharErrorRate

from samestep import Run
from samestep.errors import DataError
from samestep.training.evaluation import _set_state
from tests.ranks.models import Mlp

pytestmark = pytest.mark.slow  # each rank imports torchmetrics, which takes seconds

N = 11


def dataset(n=N):
    inputs = torch.randn(n, 6, generator=torch.Generator().manual_seed(4))
    return TensorDataset(inputs, torch.arange(n) % 3)  # torchmetrics warns if a class has no samples


def collection():
    options = {"num_classes": 3, "average": "macro"}
    return MetricCollection(
        [MulticlassAccuracy(**options), MulticlassF1Score(**options), MulticlassAUROC(num_classes=3)], prefix="val/"
    )


def regression(n):
    # torchmetrics itself cannot combine correlations of ranks with one sample each
    return MetricCollection([MeanSquaredError(), *[PearsonCorrCoef()] * (n == N)])


def evaluated(strategy, n, micro_batch):
    """Metrics of an evaluation by samestep, and those of torchmetrics on all samples at once."""
    with Run(global_batch=4, seed=1) as run:
        model = run.wrap(Mlp(), None if run.size == 1 else strategy)
        data = run.shard(dataset(n), micro_batch=micro_batch)
        classes, values = run.metric(collection()), run.metric(regression(n))
        smallest = run.metric(MinMetric())
        expected, expected_values = collection(), regression(n)
        with run.evaluate(model) as net:
            for inputs, labels in data:
                scores = net(inputs).softmax(dim=1)
                classes.update(scores, labels)
                values.update(preds=scores[:, 0], target=inputs[:, 0])
                smallest.update(scores.amin(dim=1))
            inputs, labels = dataset(n).tensors
            scores = torch.cat([net(inputs[at : at + 1]) for at in range(n)]).softmax(dim=1)
        expected.update(scores, labels)
        expected_values.update(scores[:, 0], inputs[:, 0])
        found = {**classes.compute(), **values.compute(), "min": smallest.compute()}
        truth = {**expected.compute(), **expected_values.compute(), "min": scores.min()}
        return to_numbers(found), to_numbers(truth)


def to_numbers(values):
    return {name: float(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("size", "strategy", "n", "micro_batch"),
    [
        (1, None, N, None),
        (3, "ddp", N, None),
        (4, "ddp", 3, None),
        (3, "fsdp", N, 1),
        (4, "fsdp", 3, 1),
    ],
)
def test_metrics_are_those_of_all_samples_on_every_rank(ranks, size, strategy, n, micro_batch):
    results = ranks(size, evaluated, strategy, n, micro_batch)
    found, truth = results[0]
    assert found == pytest.approx(truth, rel=1e-6, abs=1e-6)
    assert len(found) == 5 + (n == N)
    assert all(other == results[0] for other in results)


def trained(folder, stop_after, epochs=2):
    """Train, with a metric over each epoch; stop inside of an epoch, or return the values of the epochs."""
    with Run(global_batch=5, seed=1, folder=folder / "logs") as run:
        model = run.wrap(Mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = run.shard(dataset(), shuffle=True, micro_batch=2)
        metric, count = run.metric(collection()), run.metric(SumMetric())
        errors = run.metric(CharErrorRate())
        parts = {"optimizer": optimizer, "train": data, "metric": metric, "count": count, "errors": errors}
        checkpoint = run.checkpoint(folder / "out", model=model, **parts)
        values = []
        for epoch in data.epochs(epochs):
            for step in epoch:
                for inputs, labels in step:
                    scores = model(inputs)
                    metric.update(scores.detach(), labels)
                    count.update(torch.ones(len(labels)))
                    errors.update([f"{label}a" for label in labels], ["1b"] * len(labels))
                    step.mean(nn.functional.cross_entropy(scores, labels, reduction="none")).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step.number == stop_after:
                    checkpoint.save()
                    return None
            values.append(to_numbers({**metric.compute(), "count": count.compute(), "errors": errors.compute()}))
            for each in (metric, count, errors):
                each.reset()
        return values


def test_a_metric_continues_in_the_middle_of_an_epoch_on_another_world_size(ranks, tmp_path):
    (expected,) = ranks(1, trained, tmp_path / "alone", None)
    assert [values["count"] for values in expected] == [N, N]
    folder = tmp_path / "restarted"
    assert ranks(2, trained, folder, 0) == [None, None]
    assert ranks(3, trained, folder, 1) == [None] * 3  # saves the states of earlier starts again
    (found,) = ranks(1, trained, folder, None)
    for values, truth in zip(found, expected, strict=True):
        assert values == pytest.approx(truth, rel=1e-6)


def test_a_metric_of_training_does_not_count_padding(ranks, tmp_path):
    (expected,) = ranks(1, trained, tmp_path / "1", None)
    for size in (2, 3):
        for values in ranks(size, trained, tmp_path / str(size), None):
            for found, truth in zip(values, expected, strict=True):
                assert found == pytest.approx(truth, rel=1e-6)


def test_the_checkpoint_has_one_state_per_rank_with_samples(ranks, tmp_path):
    ranks(2, trained, tmp_path, 0)
    (state,) = (tmp_path / "out").glob("step-*/state.json")
    assert len(json.loads(state.read_bytes())["count"]["ranks"]) == 2


class Trainer:
    """An object of a script that saves the state of a metric within its own."""

    def __init__(self, metric):
        self.metric = metric

    def state_dict(self):
        return {"metric": self.metric.state_dict()}

    def load_state_dict(self, state):
        self.metric.load_state_dict(state["metric"])


def count_in_trainer(folder):
    with Run(global_batch=4, folder=folder / "logs") as run:
        trainer = Trainer(run.metric(SumMetric()))
        checkpoint = run.checkpoint(folder / "out", model=nn.Linear(1, 1), trainer=trainer)
        trainer.metric.update(torch.ones(2))
        checkpoint.save()
        return trainer.metric.compute().item()


def test_a_metric_within_another_object_is_saved_on_one_rank_and_refused_on_several(ranks, tmp_path):
    assert ranks(1, count_in_trainer, tmp_path) == [2.0]
    assert ranks(1, count_in_trainer, tmp_path) == [4.0]
    for text in ranks.errors(2, count_in_trainer, tmp_path / "two"):
        assert "the state of a metric of run.metric is that of all ranks, and it was not gathered: pass the met" in text
    assert not list((tmp_path / "two" / "out").glob("step-*"))


def test_a_run_does_not_keep_metrics_that_the_script_has_dropped():
    with Run(global_batch=4) as run:
        dropped = [weakref.ref(run.metric(SumMetric())) for _ in range(3)]
        assert [each() for each in dropped] == [None] * 3


class Everything(Metric):
    """A state of each kind that torchmetrics knows."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        for kind in ("sum", "mean", "max", "min", None):
            self.add_state(f"tensor_{kind}", torch.tensor(0.0), kind)
        for kind in ("cat", None):
            self.add_state(f"list_{kind}", [], kind)
        self.add_state("own", torch.tensor(0.0), lambda states: states.prod(dim=0))

    def update(self, value):
        for name in self.metric_state:
            state = getattr(self, name)
            setattr(self, name, [*state, value] if isinstance(state, list) else value)

    def compute(self):
        return {name: torch.as_tensor(value).tolist() for name, value in self.metric_state.items()}


def test_states_of_ranks_are_combined_by_the_private_attributes_that_this_torchmetrics_has():
    ranks = [Everything() for _ in range(3)]
    for metric, value in zip(ranks, (3.0, 5.0), strict=False):  # the third rank has no samples
        metric.update(torch.tensor(value))
    merged = ranks[0].clone()
    assert merged.compute()["tensor_sum"] == 3.0  # which torchmetrics keeps for the next call
    _set_state(merged, [(each.update_count, each.metric_state) for each in ranks])
    assert merged.compute() == {
        "tensor_sum": 8.0, "tensor_mean": 4.0, "tensor_max": 5.0, "tensor_min": 3.0, "tensor_None": [3.0, 5.0],
        "list_cat": [3.0, 5.0], "list_None": [3.0, 5.0], "own": 15.0,
    }  # fmt: skip
    assert merged.update_count == 2


def test_a_missing_torchmetrics_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with (
        Run(global_batch=4) as run,
        pytest.raises(DataError, match=r"run\.metric needs torchmetrics and cannot import it: in the clone of samest"),
    ):
        run.metric(nn.Linear(1, 1))


def not_a_metric():
    with Run(global_batch=4) as run:
        run.metric(nn.Linear(1, 1))


def update_after_the_end():
    with Run(global_batch=4) as run:
        metric = run.metric(SumMetric())
    metric.update(1.0)


def test_wrong_uses_are_named(ranks):
    (text,) = ranks.errors(1, not_a_metric)
    assert "DataError: run.metric got a Linear: pass a metric of torchmetrics, such as run.metric(Accuracy(" in text
    (text,) = ranks.errors(1, update_after_the_end)
    assert "CommunicationError: metric.update at test_metrics_of_torchmetrics.py:" in text
    assert "was called on a run that is closed" in text

"""The parts that run.checkpoint receives: errors before training, and rejection of parts that do not fit."""

import json
import math
import warnings
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Run
from samestep.errors import CheckpointError
from samestep.messages import SamestepWarning

torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process imports dynamo, which sets an environment variable

NO_POSITION = "this checkpoint does not contain the position in the training data"


def train(run, model, data, optimizer=None, saved=()):
    for epoch in data.epochs(1):
        for step in epoch:
            for (x,) in step:
                step.mean(model(x).square().sum(1)).backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    for checkpoint in saved:
        checkpoint.save()


def shard(run):
    return run.shard(TensorDataset(torch.ones(4, 1)), num_workers=0)


class Unsupported:
    def state_dict(self):
        return {"counts": defaultdict(int)}

    def load_state_dict(self, state):
        pass


def test_a_part_that_cannot_be_saved_is_rejected_before_training(tmp_path):
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        with pytest.raises(CheckpointError, match=r"part/counts is a value of collections.defaultdict, which a"):
            run.checkpoint(tmp_path, part=Unsupported())
        model, other = nn.Linear(1, 1), torch.optim.SGD(nn.Linear(2, 1).parameters())
        with pytest.raises(
            CheckpointError, match=r"optimizer has 2 parameter\(s\) of no model that run.checkpoint received"
        ):
            run.checkpoint(tmp_path, model=model, optimizer=other)
        assert run.checkpoint(tmp_path, model=model).restored is None  # the failed ones do not block the folder


def test_a_second_run_checkpoint_in_the_same_folder_is_rejected(tmp_path):
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        run.checkpoint(tmp_path / "out", model=nn.Linear(1, 1))
        with pytest.raises(
            CheckpointError, match=r"already has checkpoints in .*out: pass all parts to one run\.checkpoint"
        ):
            run.checkpoint(str(tmp_path / "out"), other=nn.Linear(1, 1))
        run.checkpoint(tmp_path / "other", other=nn.Linear(1, 1))


def test_the_name_of_the_loss_scale_of_the_run_is_rejected(tmp_path):
    with Run(global_batch=2, folder=tmp_path / "logs", precision="fp16") as run:
        parts = {"model": nn.Linear(1, 1), "loss_scale": nn.Linear(1, 1)}
        with pytest.raises(CheckpointError, match=r"run\.checkpoint uses the name 'loss_scale' itself: pass this part"):
            run.checkpoint(tmp_path / "out", **parts)


@pytest.mark.parametrize("position", ["missing", "passed", "in another checkpoint", "in a user object"])
def test_a_checkpoint_without_the_position_in_its_data_warns_once(tmp_path, position):
    with Run(global_batch=2, folder=tmp_path / "logs") as run, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = run.wrap(nn.Linear(1, 1))
        data = shard(run)
        parts = {"passed": {"train": data}, "in a user object": {"state": Holder(data)}}.get(position, {})
        saved = [run.checkpoint(tmp_path / "out", model=model, **parts)]
        if position == "in another checkpoint":
            saved.append(run.checkpoint(tmp_path / "second", train=data))
        train(run, model, data, saved=[*saved, *saved])
    warned = [str(each.message) for each in caught if issubclass(each.category, SamestepWarning)]
    assert [NO_POSITION in text for text in warned] == ([True] if position == "missing" else [])


class Holder:
    def __init__(self, data):
        self._data = data

    def state_dict(self):
        return {"data": self._data.state_dict()}

    def load_state_dict(self, state):
        self._data.load_state_dict(state["data"])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_metric_that_is_not_finite_warns_and_is_never_the_best(tmp_path, value):
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        checkpoint = run.checkpoint(tmp_path, keep=1, keep_best="val/loss", model=nn.Linear(1, 1))
        run.log({"val/loss": 0.5})
        checkpoint.save(step=1)
        run.log({"val/loss": value})
        with pytest.warns(
            SamestepWarning, match=f"keep_best='val/loss' cannot rate this checkpoint: val/loss is {value}, which"
        ):
            checkpoint.save(step=2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000002"]
    assert json.loads((tmp_path / "step-00000002" / "manifest.json").read_bytes())["metric"] is None


@pytest.mark.parametrize("logged", ["nothing", "val/other"])
def test_automatic_saves_before_the_first_evaluation_warn_only_if_another_metric_was_logged(tmp_path, logged):
    with Run(global_batch=2, folder=tmp_path / "logs") as run, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, data = run.wrap(nn.Linear(1, 1)), shard(run)
        checkpoint = run.checkpoint(tmp_path, keep_best="val/loss", model=model, train=data)
        checkpoint.every(steps=1)
        if logged != "nothing":
            run.log({logged: 1.0})
        train(run, model, data)
    warned = [str(each.message) for each in caught if issubclass(each.category, SamestepWarning)]
    assert len(warned) == (0 if logged == "nothing" else 1)
    assert all("cannot rate this checkpoint: no such metric was logged yet (logged: " in text for text in warned)


def trained(folder: Path, kind, model=None, optimizer_first=False):
    with Run(global_batch=2, folder=folder / "logs") as run:
        torch.manual_seed(1)
        net = run.wrap(model or nn.Linear(1, 1))
        optimizer = kind(net.parameters())
        data = shard(run)
        parts = {"model": net, "optimizer": optimizer, "train": data}
        names = ["optimizer", "model", "train"] if optimizer_first else list(parts)
        checkpoint = run.checkpoint(folder, **{name: parts[name] for name in names})
        if checkpoint.restored is None:
            train(run, net, data, optimizer, [checkpoint])
        return optimizer


def test_an_optimizer_of_another_class_is_rejected(tmp_path):
    trained(tmp_path, torch.optim.AdamW)
    with pytest.raises(
        CheckpointError,
        match="optimizer is SGD and the checkpoint has the state of AdamW, which SGD cannot use: create",
    ):
        trained(tmp_path, torch.optim.SGD)


def test_a_different_model_is_reported_first_even_if_the_optimizer_is_passed_first(tmp_path):
    trained(tmp_path, torch.optim.AdamW)
    with pytest.raises(CheckpointError, match=r"saved with a different model: 0\.bias is only in the model"):
        trained(tmp_path, torch.optim.AdamW, nn.Sequential(nn.Linear(1, 1)), optimizer_first=True)


def test_parameter_names_do_not_depend_on_torch_compile(tmp_path):
    compiled = nn.Sequential(torch.compile(nn.Linear(1, 1), backend="eager"), nn.Linear(1, 1))
    plain = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    for model in (compiled, plain, compiled):
        with Run(global_batch=2, folder=tmp_path / "logs") as run:
            run.checkpoint(tmp_path, net=model, optimizer=torch.optim.SGD(model.parameters())).save()
    assert torch.equal(compiled[0].weight, plain[0].weight)
    assert len(list(tmp_path.glob("step-*"))) == 1  # the last of the same step


class NestedState(torch.optim.SGD):
    """Has tensors in a list and in a dict, as LBFGS and Shampoo do."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("past", []).append(parameter.detach().clone())
                state["nested"] = {"rows": torch.arange(3.0), "full": parameter.detach() + 1}


def test_nested_optimizer_state_is_restored(tmp_path):
    before = trained(tmp_path, NestedState)
    after = trained(tmp_path, NestedState)
    for one, other in zip(before.param_groups[0]["params"], after.param_groups[0]["params"], strict=True):
        assert torch.equal(torch.stack(before.state[one]["past"]), torch.stack(after.state[other]["past"]))
        assert torch.equal(before.state[one]["nested"]["rows"], after.state[other]["nested"]["rows"])
        assert torch.equal(before.state[one]["nested"]["full"], after.state[other]["nested"]["full"])

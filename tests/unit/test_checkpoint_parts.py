"""What run.checkpoint is given: told at once where it cannot be saved, refused where it is not what was saved."""

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

torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process loads dynamo, which sets a variable for good

BEGINS_ANEW = "this checkpoint does not hold how far training is in its data"


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


class Odd:
    def state_dict(self):
        return {"counts": defaultdict(int)}

    def load_state_dict(self, state):
        pass


def test_what_cannot_be_saved_is_told_before_training_and_not_at_the_first_save(tmp_path):
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        with pytest.raises(CheckpointError, match=r"odd/counts is a value of collections.defaultdict, which a"):
            run.checkpoint(tmp_path, odd=Odd())
        model, other = nn.Linear(1, 1), torch.optim.SGD(nn.Linear(2, 1).parameters())
        with pytest.raises(
            CheckpointError, match=r"optimizer holds 2 parameter\(s\) of no model that run.checkpoint was given"
        ):
            run.checkpoint(tmp_path, model=model, optimizer=other)
        assert run.checkpoint(tmp_path, model=model).restored is None  # one that failed keeps nobody from the folder


def test_a_second_set_of_checkpoints_in_the_folder_of_the_first_is_refused(tmp_path):
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        run.checkpoint(tmp_path / "out", model=nn.Linear(1, 1))
        with pytest.raises(CheckpointError, match="out before in this run: two sets of checkpoints in one folder"):
            run.checkpoint(str(tmp_path / "out"), other=nn.Linear(1, 1))
        run.checkpoint(tmp_path / "other", other=nn.Linear(1, 1))


@pytest.mark.parametrize("way", ["nothing", "given", "elsewhere", "of the user"])
def test_a_checkpoint_without_the_position_in_its_data_is_warned_of_once(tmp_path, way):
    with Run(global_batch=2, folder=tmp_path / "logs") as run, warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        model = run.wrap(nn.Linear(1, 1))
        data = shard(run)
        parts = {"given": {"train": data}, "of the user": {"state": Holder(data)}}.get(way, {})
        saved = [run.checkpoint(tmp_path / "out", model=model, **parts)]
        if way == "elsewhere":
            saved.append(run.checkpoint(tmp_path / "second", train=data))
        train(run, model, data, saved=[*saved, *saved])
    told = [str(each.message) for each in given if issubclass(each.category, SamestepWarning)]
    assert [BEGINS_ANEW in text for text in told] == ([True] if way == "nothing" else [])


class Holder:
    def __init__(self, data):
        self._data = data

    def state_dict(self):
        return {"data": self._data.state_dict()}

    def load_state_dict(self, state):
        self._data.load_state_dict(state["data"])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_no_finite_number_ends_no_training_and_is_never_the_best(tmp_path, value):
    with Run(global_batch=2, folder=tmp_path / "logs") as run:
        checkpoint = run.checkpoint(tmp_path, keep=1, keep_best="val/loss", model=nn.Linear(1, 1))
        run.log({"val/loss": 0.5})
        checkpoint.save(step=1)
        run.log({"val/loss": value})
        with pytest.warns(
            SamestepWarning, match=f"keep_best='val/loss' cannot judge this checkpoint: val/loss is {value}, and"
        ):
            checkpoint.save(step=2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000002"]
    assert json.loads((tmp_path / "step-00000002" / "manifest.json").read_bytes())["metric"] is None


@pytest.mark.parametrize("logged", ["nothing", "val/other"])
def test_saves_before_the_first_evaluation_are_warned_of_only_where_a_name_may_be_wrong(tmp_path, logged):
    with Run(global_batch=2, folder=tmp_path / "logs") as run, warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        model, data = run.wrap(nn.Linear(1, 1)), shard(run)
        checkpoint = run.checkpoint(tmp_path, keep_best="val/loss", model=model, train=data)
        checkpoint.every(steps=1)
        if logged != "nothing":
            run.log({logged: 1.0})
        train(run, model, data)
    told = [str(each.message) for each in given if issubclass(each.category, SamestepWarning)]
    assert len(told) == (0 if logged == "nothing" else 1)
    assert all("cannot judge this checkpoint: no such number was logged yet (logged were: " in text for text in told)


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


def test_an_optimizer_of_another_kind_is_refused_by_name(tmp_path):
    trained(tmp_path, torch.optim.AdamW)
    with pytest.raises(
        CheckpointError, match="optimizer is SGD here and was AdamW when it was saved: what one of them keeps means"
    ):
        trained(tmp_path, torch.optim.SGD)


def test_another_model_is_told_as_such_also_where_the_optimizer_is_given_first(tmp_path):
    trained(tmp_path, torch.optim.AdamW)
    with pytest.raises(CheckpointError, match=r"belongs to another run, for model is another model: 0.bias is here"):
        trained(tmp_path, torch.optim.AdamW, nn.Sequential(nn.Linear(1, 1)), optimizer_first=True)


def test_a_module_has_the_same_names_whether_a_part_of_it_is_compiled_or_not(tmp_path):
    compiled = nn.Sequential(torch.compile(nn.Linear(1, 1), backend="eager"), nn.Linear(1, 1))
    plain = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    for model in (compiled, plain, compiled):
        with Run(global_batch=2, folder=tmp_path / "logs") as run:
            run.checkpoint(tmp_path, net=model, optimizer=torch.optim.SGD(model.parameters())).save()
    assert torch.equal(compiled[0].weight, plain[0].weight)
    assert len(list(tmp_path.glob("step-*"))) == 1  # the last of the same step


class Deep(torch.optim.SGD):
    """Keeps tensors in a list and in a dict, as LBFGS and Shampoo do."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("past", []).append(parameter.detach().clone())
                state["of"] = {"rows": torch.arange(3.0), "whole": parameter.detach() + 1}


def test_state_of_an_optimizer_is_restored_however_deep_its_tensors_stand(tmp_path):
    before = trained(tmp_path, Deep)
    after = trained(tmp_path, Deep)
    for one, other in zip(before.param_groups[0]["params"], after.param_groups[0]["params"], strict=True):
        assert torch.equal(torch.stack(before.state[one]["past"]), torch.stack(after.state[other]["past"]))
        assert torch.equal(before.state[one]["of"]["rows"], after.state[other]["of"]["rows"])
        assert torch.equal(before.state[one]["of"]["whole"], after.state[other]["of"]["whole"])

"""Build functions of `samestep plan`: they never train, and their parameters are options of the command line."""

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import pytest
import torch.distributed as dist

from samestep import Run
from samestep.cli.build_function import bind_options, find_build
from samestep.cli.main import main
from samestep.errors import PlanError

BUILD = """
import torch
from samestep import Run

def build():
    return torch.nn.Linear(8, 8), torch.zeros(4, 8)
"""
RUN = """
with Run(global_batch=8) as run:
    open("trained", "w")
"""
LOOP = """
model, batch = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(batch).sum().backward()
optimizer.step()
open("trained", "w")
"""
GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{folder}/meeting", rank=0, world_size=1)
"""
REMEDY = (
    " while `samestep plan` imported the script: move the training into a function, main(), and call it under `if "
    '__name__ == "__main__":`'
)


@pytest.fixture
def lab(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when it traces
    yield tmp_path
    sys.modules.pop("lab", None)


@pytest.mark.parametrize("target", ["lab:build", "lab.py:build"])
@pytest.mark.parametrize(
    ("training", "what"), [(RUN, "a Run was created"), (LOOP, "an optimizer was stepped")], ids=["run", "loop"]
)
def test_a_script_that_trains_on_import_raises(lab, target, training, what):
    (lab / "lab.py").write_text(BUILD + training)
    with pytest.raises(PlanError) as error:
        find_build(target)
    assert str(error.value) == what + REMEDY
    assert not (lab / "trained").exists()


@pytest.mark.parametrize(("training", "what"), [(RUN, "a Run was created"), (LOOP, "an optimizer was stepped")])
def test_a_build_function_that_trains_is_reported_in_one_line(lab, capsys, training, what):
    inside = training.replace("\n", "\n    ").replace("model, batch = build()", "model, batch = plain()")
    plain = BUILD.replace("def build", "def plain")
    (lab / "lab.py").write_text(f"{plain}\ndef build():{inside}\n    return plain()")
    assert main(["plan", "lab:build", "--global-batch", "8", "--gpus", "t4"]) == 2
    assert capsys.readouterr() == ("", f"samestep: {what}{REMEDY}\n")
    assert not (lab / "trained").exists()


def test_a_script_that_opens_a_process_group_on_import_raises(lab):
    (lab / "lab.py").write_text(BUILD + GROUP.format(folder=lab))
    try:
        with pytest.raises(PlanError) as error:
            find_build("lab:build")
    finally:
        dist.destroy_process_group()
    assert str(error.value) == "a process group was opened" + REMEDY


def test_a_process_group_without_a_launcher_is_explained(lab):
    (lab / "lab.py").write_text(BUILD + 'import torch.distributed as dist\ndist.init_process_group("gloo")')
    with pytest.raises(PlanError, match=r"^lab cannot be imported \(ValueError: .*RANK expected.* under `if __name__"):
        find_build("lab:build")


def test_a_script_that_exits_on_import_is_explained(lab):
    (lab / "lab.py").write_text(BUILD + "raise SystemExit(2)")
    with pytest.raises(PlanError, match=r"^lab cannot be imported \(SystemExit: 2\). A plan imports it to call its"):
        find_build("lab:build")


def test_a_script_that_trains_under_main_can_be_planned(lab, capsys):
    guarded = RUN.replace("\n", "\n    ")
    (lab / "lab.py").write_text(f'{BUILD}\nif __name__ == "__main__":{guarded}')
    assert main(["plan", "lab.py:build", "--global-batch", "8", "--gpus", "t4"]) == 0
    assert "chosen   single" in capsys.readouterr().out


def test_training_is_allowed_again_after_a_build(lab, tmp_path):
    (lab / "lab.py").write_text(BUILD)
    find_build("lab:build")()
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        assert run.size == 1


def build(
    layers: int,
    width=64,
    rate: float | None = None,
    net: Literal["small", "large"] = "small",
    data: Annotated[Path | None, "a folder"] = None,
    deep_supervision: bool = False,
    *,
    name=None,
    **more,
):
    """Return the arguments."""
    return layers, width, rate, net, data, deep_supervision, name, more


def called(*arguments, function=build):
    return bind_options(function, "lab:build", arguments)()


def test_parameters_are_converted_to_their_types():
    assert called("--layers", "2") == (2, 64, None, "small", None, False, None, {})
    arguments = [
        "--layers=2",
        "--width=8",
        "--rate=0.5",
        "--net=large",
        "--data=x/y",
        "--deep-supervision",
        "--name=it",
    ]
    assert called(*arguments, "--name=it") == (2, 8, 0.5, "large", Path("x/y"), True, "it", {})


@dataclass(frozen=True)
class Preset:
    """Options for a machine."""

    net: Literal["small", "large"] = "small"
    width: int = 16


def test_dataclass_fields_are_options_and_list_options_can_be_repeated():
    def made(chosen: Preset = Preset(width=8), folders: list[Path] | None = None):  # noqa: B008  # it is frozen
        return chosen, folders

    assert called(function=made) == (Preset("small", 8), None)
    arguments = ["--net", "large", "--folders", "a", "--folders", "b"]
    assert called(*arguments, function=made) == (Preset("large", 8), [Path("a"), Path("b")])


@dataclass(frozen=True)
class Shape:
    """A dataclass with a list."""

    widths: list[int] = field(default_factory=lambda: [64, 64])
    depth: Literal[1, 2] = 1


def test_a_list_keeps_its_default_and_a_literal_its_type():
    def made(shape: Shape = Shape(), depth_of_all: Literal[3, 4] = 3):  # noqa: B008  # it is frozen
        return shape, depth_of_all

    assert called(function=made) == (Shape(), 3)
    assert called("--widths", "8", "--depth", "2", "--depth-of-all", "4", function=made) == (Shape([8], 2), 4)


def test_a_list_without_a_default_is_a_required_option():
    def made(widths: list[int]):
        return widths

    assert called("--widths", "8", "--widths", "9", function=made) == [8, 9]
    with pytest.raises(PlanError, match=r"with these options \(Missing option '--widths'.*It has: --widths"):
        called(function=made)


def test_any_callable_can_be_bound_and_keeps_its_name():
    assert called("--width", "8", function=partial(build, 3, name="it"))[:2] == (3, 8)
    assert bind_options(build, "lab:build", ["--layers", "2"]).__qualname__ == "build"
    assert bind_options(lambda: 5, "lab:build", [])() == 5


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "Missing option '--layers'."),
        (["--layers", "two"], "Invalid value for '--layers': 'two' is not a valid integer."),
        (["--layers", "2", "--net", "huge"], "Invalid value for '--net': 'huge' is not one of 'small', 'large'."),
        (["--layers", "2", "more"], "Got unexpected extra argument (more)"),
    ],
)
def test_invalid_options_list_the_parameters(arguments, why):
    with pytest.raises(PlanError) as error:
        called(*arguments)
    assert str(error.value) == (
        f"lab:build cannot be called with these options ({why}). Pass the parameters of the build function after `--`. "
        "It has: --layers, --width, --rate, --net, --data, --deep-supervision, --name"
    )

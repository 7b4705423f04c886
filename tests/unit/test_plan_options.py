"""Parameters of a build function as options of the command line."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import pytest

from samestep.cli.build_function import bind_options
from samestep.errors import PlanError


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
    """Give back what came in."""
    return layers, width, rate, net, data, deep_supervision, name, more


def called(*typed, function=build):
    return bind_options(function, "lab:build", typed)()


def test_each_parameter_comes_in_its_kind():
    assert called("--layers", "2") == (2, 64, None, "small", None, False, None, {})
    typed = ["--layers=2", "--width=8", "--rate=0.5", "--net=large", "--data=x/y", "--deep-supervision", "--name=it"]
    assert called(*typed) == (2, 8, 0.5, "large", Path("x/y"), True, "it", {})


@dataclass(frozen=True)
class Preset:
    """What suits a machine."""

    net: Literal["small", "large"] = "small"
    width: int = 16


def test_a_dataclass_is_typed_by_its_fields_and_a_list_as_often_as_needed():
    def made(chosen: Preset = Preset(width=8), folders: list[Path] | None = None):  # noqa: B008  # it is frozen
        return chosen, folders

    assert called(function=made) == (Preset("small", 8), None)
    typed = ["--net", "large", "--folders", "a", "--folders", "b"]
    assert called(*typed, function=made) == (Preset("large", 8), [Path("a"), Path("b")])


@dataclass(frozen=True)
class Shape:
    """With a list of its own."""

    widths: list[int] = field(default_factory=lambda: [64, 64])
    depth: Literal[1, 2] = 1


def test_a_list_that_was_not_typed_keeps_its_default_and_a_literal_its_kind():
    def made(shape: Shape = Shape(), depth_of_all: Literal[3, 4] = 3):  # noqa: B008  # it is frozen
        return shape, depth_of_all

    assert called(function=made) == (Shape(), 3)
    assert called("--widths", "8", "--depth", "2", "--depth-of-all", "4", function=made) == (Shape([8], 2), 4)


def test_a_list_without_a_default_must_be_typed():
    def made(widths: list[int]):
        return widths

    assert called("--widths", "8", "--widths", "9", function=made) == [8, 9]
    with pytest.raises(PlanError, match=r"with these options \(Missing option '--widths'.*It has: --widths"):
        called(function=made)


def test_what_is_called_need_not_be_a_function_and_keeps_its_name():
    assert called("--width", "8", function=partial(build, 3, name="it"))[:2] == (3, 8)
    assert bind_options(build, "lab:build", ["--layers", "2"]).__qualname__ == "build"
    assert bind_options(lambda: 5, "lab:build", [])() == 5


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ([], "Missing option '--layers'."),
        (["--layers", "two"], "Invalid value for '--layers': 'two' is not a valid integer."),
        (["--layers", "2", "--net", "huge"], "Invalid value for '--net': 'huge' is not one of 'small', 'large'."),
        (["--layers", "2", "more"], "Got unexpected extra argument (more)"),
    ],
)
def test_what_does_not_fit_lists_the_parameters(typed, why):
    with pytest.raises(PlanError) as error:
        called(*typed)
    assert str(error.value) == (
        f"lab:build cannot be called with these options ({why}). Pass the parameters of the build function after `--`. "
        "It has: --layers, --width, --rate, --net, --data, --deep-supervision, --name"
    )

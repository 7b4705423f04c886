"""`samestep plan`: what it prints, the function it looks at, and what it says of mistakes."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from samestep.cli.build_function import find_function
from samestep.cli.main import main
from samestep.cli.plan_command import show, show_what_if
from samestep.errors import PlanError
from samestep.planner.calibration import Calibration
from samestep.planner.cluster_spec import parse_cluster_spec
from samestep.planner.layouts import PlanOptions
from samestep.planner.plan import plan
from tests.unit.plan_facts import GIB, MIB, machines, model, with_teacher

GOLDEN = Path(__file__).parent / "golden"
LAB = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 2048)), torch.zeros(4, 2048)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        return x + self.layer(x).relu()

def convolutions(depth: int = 2, wide: bool = False):
    return nn.Sequential(*(Block() for _ in range(depth))), torch.zeros(4, 16, 32 if wide else 8, 8)

def broken():
    raise ValueError("no such file")

number = 5
"""


def printed(draw):
    out = io.StringIO()
    draw(Console(file=out, width=120, highlight=False))
    return "".join(f"{row.rstrip()}\n" for row in out.getvalue().splitlines())


def taken(on, gib):
    """Others hold all but so much of each device."""
    return replace(on, device=replace(on.device, memory_free=gib * GIB))


CASES = {
    "fits": lambda console: show(plan(machines(4), model(), 256), console),
    "sharded": lambda console: show(
        plan(parse_cluster_spec("a100-40gb:8", 2), model(gib=26, per_sample=900 * MIB), 512), console
    ),
    "teacher": lambda console: show(
        plan(parse_cluster_spec("a10g:4"), with_teacher(model(gib=0.2, per_sample=50 * MIB), 30, False), 64), console
    ),
    "nothing": lambda console: show(plan(parse_cluster_spec("t4:1"), model(gib=20, per_sample=100 * MIB), 8), console),
    "channels_last": lambda console: show(
        plan(taken(machines(2), 70), model(), 64, asked=PlanOptions(channels_last=True)), console
    ),
    "what_if": lambda console: show_what_if(
        [plan(parse_cluster_spec(words), model(gib=8), 64) for words in ("h100:1", "h100:8", "a10g:1", "a10g:8")],
        10_000,
        console,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_printed_is_what_was_looked_at(name):
    """`python -m tests.unit.test_plan_cli` writes the files anew, to be looked at."""
    assert printed(CASES[name]) == (GOLDEN / f"plan_{name}.txt").read_text()


@pytest.fixture
def lab(tmp_path, monkeypatch):
    (tmp_path / "planlab.py").write_text(LAB)
    (tmp_path / "bad.py").write_text("import nowhere_at_all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when it traces
    yield tmp_path
    for name in ("planlab", "bad"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("words", ["planlab:build", "planlab.py:build"])
def test_a_function_is_found_in_a_module_and_in_a_file(lab, words):
    assert len(find_function(words)()) == 2


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            "planlab",
            "planlab names no function: type the module or file, a colon and the function, as in mylab:build, or",
        ),
        (":build", ":build names no function: type the module or file"),
        ("planlab:buld", "planlab has no function buld: it has build, Block, convolutions, broken"),
        ("planlab:number", "planlab:number is a int, not a function: name one that returns a model and a batch"),
        (
            "./planlab:build",
            "./planlab is no name of a module: type it as in import, or the file as in ./planlab.py:build",
        ),
        ("none.py:build", "there is no file none.py in HERE: name a file and a function in it, as in mylab:build, or"),
        (
            "nolab:build",
            "there is no module nolab in HERE, nor is it installed: type its dotted name as in mylab:build,",
        ),
        (
            "no.lab:build",
            "there is no module no.lab in HERE, nor is it installed: type its dotted name as in mylab:build,",
        ),
        (
            "bad:build",
            "bad cannot be imported (ModuleNotFoundError: No module named 'nowhere_at_all'): a plan imports it",
        ),
        ("bad.py:build", "bad.py cannot be imported (ModuleNotFoundError: No module named 'nowhere_at_all'): a plan"),
    ],
)
def test_a_function_that_is_not_there_is_explained(lab, words, complaint):
    with pytest.raises(PlanError) as error:
        find_function(words)
    assert str(error.value).startswith(complaint.replace("HERE", str(lab)))


def test_the_command_plans_for_machines_that_are_not_here(lab, capsys):
    assert main(["plan", "planlab:build", "--global-batch", "65536", "--gpus", "h100:4"]) == 0
    out = capsys.readouterr().out
    assert "machines 4 x h100 (words: h100:4;" in out
    assert '\nwrite    model = run.wrap(model, "ddp")\n' in out
    assert "\ntype     samestep run train.py\n" in out


def test_the_command_tells_a_program_the_same(lab, capsys):
    typed = [
        "plan",
        "planlab:build",
        "--global-batch",
        "64",
        "--gpus",
        "cpu:2",
        "--nodes",
        "2",
        "--optimizer",
        "SGD",
        "--json",
    ]
    assert main(typed) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["chosen"]["ranks"] * told["chosen"]["micro_batch"] * told["chosen"]["accumulation"] >= 64
    assert (told["precision"], told["model"]["optimizer"]) == ("fp32", "SGD")


def test_what_if_lists_several_machines(lab, capsys):
    assert main(["plan", "planlab:build", "--global-batch", "64", "--what-if", "--gpus", "l4:1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    seen = [(row["machines"]["device"]["name"], row["machines"]["per_node"] * row["machines"]["nodes"]) for row in told]
    assert seen == [(kind, count) for kind in ("l4", "h100", "a100", "a10g") for count in (1, 2, 4, 8, 16)]
    assert all(row["gpu_hours"] > 0 for row in told)
    assert told[0]["speed_up"] == 1
    assert all(row["speed_up"] > 0 for row in told)


def test_what_if_prints_speed_up_and_hours(lab, capsys):
    assert main(["plan", "planlab:build", "--global-batch", "64", "--what-if", "--samples", "5000"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "model    Sequential, 128.0 MiB of weights; traced without memory\nstep     global batch 64, "
    )
    assert [row.split()[:3] for row in out.splitlines()[5:20:5]] == [["1", "x", k] for k in ("h100", "a100", "a10g")]
    assert "GPU-hours for 5,000 samples" in out


def test_one_of_apples_gpus_is_all_there_is_to_try(lab, capsys):
    assert main(["plan", "planlab:build", "--global-batch", "8", "--what-if", "--gpus", "mps", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["machines"]["device"]["name"] for row in told].count("mps") == 1


def test_channels_last_and_blocks_are_traced_and_written(lab, capsys):
    typed = ["plan", "planlab:convolutions", "--global-batch", "64", "--gpus", "h100:2", "--channels-last", "--json"]
    assert main([*typed, "--blocks", "Block"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["asked"] == {"script": "train.py", "channels_last": True, "blocks": True}
    assert "channels_last=True" in told["script"][0]
    assert {each["blocked"] for each in told["candidates"] if each["shards"] > 1} == {
        "channels_last=True needs whole weights"
    }


def test_parameters_of_the_function_are_typed_after_two_dashes(lab, capsys):
    sizes = []
    for own in ([], ["--", "--depth", "4"], ["--", "--depth", "4", "--wide"]):
        assert main(["plan", "planlab:convolutions", "--global-batch", "8", "--gpus", "t4", "--json", *own]) == 0
        told = json.loads(capsys.readouterr().out)["model"]
        sizes.append((told["weights"], told["working"]["per_sample"]))
    assert sizes[1][0] == 2 * sizes[0][0] == sizes[2][0]
    assert sizes[0][1] < sizes[1][1] < sizes[2][1]


def test_a_calibration_alone_is_told_to_a_program_too(lab, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(lab))
    measured = Calibration("cpu", 1, {"float32": ((1e6, 1e9), (1e9, 1e11))}, 1e10, 2e10, None, 2e-6, "2025-01-31")
    monkeypatch.setattr("samestep.planner.calibration.calibrate", lambda device, say: say("copies") or measured)
    assert main(["plan", "--calibrate", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["device"], told["copy"]) == ("cpu", 1e10)
    assert Path(told["path"]).is_file()
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes what it prints to for a terminal
    assert main(["plan", "--calibrate"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("cpu: TFLOP/s in products float32 0.1; copies 10 GB/s, from the host 20")
    assert "measuring this machine, for less than a minute: copies" in err


def test_what_if_takes_figures_of_a_device_and_presets(lab, capsys):
    figures = '{"name": "mine", "memory_gib": 20, "bandwidth_gbs": 500, "tflops": {"float32": 20}}'
    for words, first in ((figures, "mine"), ("g5", "a10g")):
        typed = ["plan", "planlab:build", "--global-batch", "64", "--precision", "fp32", "--what-if", "--json"]
        assert main([*typed, "--gpus", words]) == 0
        rows = json.loads(capsys.readouterr().out)
        seen = [
            (row["machines"]["device"]["name"], row["machines"]["per_node"] * row["machines"]["nodes"]) for row in rows
        ]
        assert seen[:5] == [(first, count) for count in (1, 2, 4, 8, 16)]


@pytest.mark.parametrize(
    ("typed", "complaint"),
    [
        (
            "plan planlab:build --global-batch 8 --what-if --gpus x1",
            "--gpus x1: there is no device x1 in the table: use one of b200",
        ),
        (
            "plan planlab:build --global-batch 8 --what-if --nodes 2",
            "--what-if tries several numbers of nodes by itself: leave --nodes out",
        ),
        ("plan", "a plan needs a function that builds the model, and a global batch: type `samestep plan mylab:build"),
        ("plan planlab:build", "a plan needs a global batch: type `samestep plan planlab:build --global-batch 256 --g"),
        ("plan planlab:build --calibrate", "a plan needs a global batch: type `samestep plan planlab:build --global-"),
        ("plan planlab:build --global-batch 0", "a global batch of 0 holds nothing: give --global-batch 1 or more"),
        ("plan planlab:build --global-batch 8 --margin 1", "margin 1.0 is no part of a memory: give 0 up to, not inc"),
        ("plan planlab:build --global-batch 8 --margin nan", "margin nan is no part of a memory: give 0 up to, not in"),
        (
            "plan planlab:build --global-batch 8 --what-if --samples 0",
            "--samples 0 is nothing to count GPU-hours for: give 1 or more",
        ),
        ("plan planlab:build --global-batch 8 --nodes 0", "0 nodes are no machines: give --nodes 1 or more"),
        ("plan planlab:build --global-batch 8 --gpus t4 --nodes -1", "-1 nodes are no machines: give --nodes 1 or"),
        (
            "plan planlab:build --global-batch 8 --gpus t4 --blocks Blok",
            "Sequential has no submodule of a class Blok: blocks are classes that repeat in it, and it has Linear, ",
        ),
        (
            "plan planlab:build --global-batch 8 --gpus t4 --optimizer LBFGS",
            "optimizer='LBFGS' cannot step after a backward pass (TypeError: LBFGS.step() missing 1 required",
        ),
        (
            "plan planlab:convolutions --global-batch 8 --gpus t4 -- --dept 3",
            "planlab:convolutions cannot be called so (No such option '--dept'",
        ),
        (
            "plan planlab:convolutions --global-batch 8 --gpus t4 --depth 3",
            "unknown option --depth: use one of --blocks, --calibrate, --channels-last, ",
        ),
        (
            "plan planlab:build --global-batch 8 --gpus t4 -- --width 3",
            "planlab:build cannot be called so (No such option '--width'.): the options of a build function follow "
            "`--`, and are its parameters; here none",
        ),
        (
            "plan planlap --global-batch 8",
            "planlap names no function and no recipe: type the module or file, a colon and the function, as in "
            "mylab:build, or train.py:build, or one of cfg_diffusion, digits, ",
        ),
        (
            "plan planlab:build --global-batch 8 --gpus x1",
            "--gpus x1: there is no device x1 in the table: use one of b200",
        ),
        (
            "plan planlab:build --global-batch 8 --gpus v100 --precision bf16",
            "precision bf16 needs a GPU that has it, and",
        ),
        (
            "plan planlab:broken --global-batch 8 --gpus t4",
            "broken() failed, so there is no model to look at (ValueError:",
        ),
    ],
)
def test_a_mistake_is_one_line(lab, capsys, typed, complaint):
    assert main(typed.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"samestep: {complaint}")
    assert err.count("\n") == 1


def test_where_nothing_fits_the_command_ends_with_1(lab, capsys):
    tiny = '{"name": "tiny", "memory_gib": 0.1, "bandwidth_gbs": 10, "tflops": {"float32": 1}}'
    assert main(["plan", "planlab:build", "--global-batch", "8", "--gpus", tiny]) == 1
    assert "nothing fits" in capsys.readouterr().out


if __name__ == "__main__":
    for case, drawn in CASES.items():
        (GOLDEN / f"plan_{case}.txt").write_text(printed(drawn))


def test_options_of_the_function_among_ours_are_told_where_they_belong(capsys):
    assert main(["plan", "mylab:build", "--global-batch", "8", "--layers", "12"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("samestep: unknown option --layers: use one of --blocks, ")
    assert err.endswith("; put options of the function after `--`\n")


def test_what_the_users_module_prints_is_no_part_of_the_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when it traces
    monkeypatch.chdir(tmp_path)
    loud = LAB.replace("def build():", "print('imported')\n\ndef build():\n    print('built')")
    Path("loud.py").write_text(loud)
    assert main(["plan", "loud.py:build", "--global-batch", "8", "--gpus", "h100:1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["model"]["name"] == "Sequential"
    assert "imported\nbuilt\n" in err

"""`samestep plan`: its tables and JSON, the build function, and its error messages."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from samestep.cli.build_function import find_function
from samestep.cli.main import main
from samestep.cli.plan_command import print_plan, print_what_if
from samestep.errors import PlanError
from samestep.planner.calibration import Calibration
from samestep.planner.cluster_spec import parse_cluster_spec
from samestep.planner.layouts import PlanOptions
from samestep.planner.plan import make_plan
from tests.unit.plan_examples import GIB, MIB, cluster, model, with_teacher

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

class Detector(nn.Linear):
    def forward(self, x):
        scores = super().forward(x)
        return scores[scores > 0]

def detector():
    return Detector(64, 64), torch.zeros(4, 64)

number = 5
"""


def printed(draw):
    out = io.StringIO()
    draw(Console(file=out, width=120, highlight=False))
    return "".join(f"{row.rstrip()}\n" for row in out.getvalue().splitlines())


def with_free_memory(on, gib):
    """The cluster with `gib` GiB free on each device; other processes use the rest."""
    return replace(on, device=replace(on.device, memory_free=gib * GIB))


CASES = {
    "fits": lambda console: print_plan(make_plan(cluster(4), model(), 256), console),
    "sharded": lambda console: print_plan(
        make_plan(parse_cluster_spec("a100-40gb:8", 2), model(gib=26, per_sample=900 * MIB), 512), console
    ),
    "teacher": lambda console: print_plan(
        make_plan(parse_cluster_spec("a10g:4"), with_teacher(model(gib=0.2, per_sample=50 * MIB), 30, False), 64),
        console,
    ),
    "nothing": lambda console: print_plan(
        make_plan(parse_cluster_spec("t4:1"), model(gib=20, per_sample=100 * MIB), 8), console
    ),
    "channels_last": lambda console: print_plan(
        make_plan(with_free_memory(cluster(2), 70), model(), 64, options=PlanOptions(channels_last=True)), console
    ),
    "what_if": lambda console: print_what_if(
        [make_plan(parse_cluster_spec(words), model(gib=8), 64) for words in ("h100:1", "h100:8", "a10g:1", "a10g:8")],
        10_000,
        console,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_printed_plans_match_the_golden_files(name):
    """`python -m tests.unit.test_plan_cli` writes the golden files again; review the diff."""
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
    ("words", "message"),
    [
        (
            "planlab",
            "planlab does not name a function. Pass the module or file, a colon and the function, for example train.py",
        ),
        (":build", ":build does not name a function. Pass the module or file"),
        (
            "planlab:buld",
            "planlab has no function buld. It has build, Block, convolutions, broken, Detector, detector.",
        ),
        (
            "planlab:number",
            "planlab:number is of type int, not a function. Name a function that returns a model and a batch.",
        ),
        (
            "./planlab:build",
            "./planlab is not a module name. Pass a dotted name, or the file: ./planlab.py:build",
        ),
        (
            "none.py:build",
            "none.py does not exist in HERE. Pass a file and its function, for example train.py:build or",
        ),
        (
            "nolab:build",
            "Module nolab is neither in HERE nor installed. Pass its dotted name from the folder",
        ),
        (
            "no.lab:build",
            "Module no.lab is neither in HERE nor installed. Pass its dotted name from the folder",
        ),
        (
            "bad:build",
            "bad cannot be imported (ModuleNotFoundError: No module named 'nowhere_at_all'). A plan imports it",
        ),
        ("bad.py:build", "bad.py cannot be imported (ModuleNotFoundError: No module named 'nowhere_at_all'). A plan"),
    ],
)
def test_a_target_that_cannot_be_imported_is_explained(lab, words, message):
    with pytest.raises(PlanError) as error:
        find_function(words)
    assert str(error.value).startswith(message.replace("HERE", str(lab)))


def test_the_command_plans_for_gpus_that_are_not_available(lab, capsys):
    assert main(["plan", "planlab:build", "--global-batch", "65536", "--gpus", "h100:4"]) == 0
    out = capsys.readouterr().out
    assert "cluster  4 x h100 (--gpus h100:4;" in out
    assert '\ncode     model = run.wrap(model, "ddp")\n' in out
    assert "\ncommand  samestep run train.py\n" in out


def test_the_command_says_that_memory_and_time_are_upper_bounds(lab, capsys):
    assert main(["plan", "planlab:detector", "--global-batch", "64", "--gpus", "h100:4"]) == 0
    assert (
        "\nmodel    Detector, 16.2 KiB of weights; traced without memory; a mask selects elements by values, which a "
        "trace does not have (nonzero(), or a mask as an index): all elements count, so memory and time are upper "
        "bounds\n"
    ) in f"\n{capsys.readouterr().out}"


def test_the_command_prints_json(lab, capsys):
    arguments = [
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
    assert main(arguments) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["chosen"]["ranks"] * data["chosen"]["micro_batch"] * data["chosen"]["accumulation"] >= 64
    assert (data["precision"], data["model"]["optimizer"]) == ("fp32", "SGD")


def test_what_if_lists_several_clusters(lab, capsys):
    assert main(["plan", "planlab:build", "--global-batch", "64", "--what-if", "--gpus", "l4:1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    seen = [
        (row["cluster"]["device"]["name"], row["cluster"]["devices_per_node"] * row["cluster"]["nodes"]) for row in data
    ]
    assert seen == [(kind, count) for kind in ("l4", "h100", "a100", "a10g") for count in (1, 2, 4, 8, 16)]
    assert all(row["gpu_hours"] > 0 for row in data)
    assert data[0]["speed_up"] == 1
    assert all(row["speed_up"] > 0 for row in data)


def test_what_if_prints_speed_up_and_hours(lab, capsys):
    assert main(["plan", "planlab:build", "--global-batch", "64", "--what-if", "--samples", "5000"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "model    Sequential, 128.0 MiB of weights; traced without memory\nstep     global batch 64, "
    )
    assert [row.split()[:3] for row in out.splitlines()[5:20:5]] == [["1", "x", k] for k in ("h100", "a100", "a10g")]
    assert "GPU-hours for 5,000 samples" in out


def test_what_if_tries_one_apple_gpu_only(lab, capsys):
    assert main(["plan", "planlab:build", "--global-batch", "8", "--what-if", "--gpus", "mps", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["cluster"]["device"]["name"] for row in data].count("mps") == 1


def test_channels_last_and_blocks_are_traced_and_appear_in_the_code(lab, capsys):
    arguments = [
        "plan",
        "planlab:convolutions",
        "--global-batch",
        "64",
        "--gpus",
        "h100:2",
        "--channels-last",
        "--json",
    ]
    assert main([*arguments, "--blocks", "Block"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["options"] == {"script": "train.py", "channels_last": True, "blocks": True}
    assert "channels_last=True" in data["code"][0]
    assert {each["unsupported"] for each in data["candidates"] if each["shards"] > 1} == {
        "channels_last=True needs unsharded weights"
    }


def test_parameters_of_the_function_follow_two_dashes(lab, capsys):
    sizes = []
    for own in ([], ["--", "--depth", "4"], ["--", "--depth", "4", "--wide"]):
        assert main(["plan", "planlab:convolutions", "--global-batch", "8", "--gpus", "t4", "--json", *own]) == 0
        data = json.loads(capsys.readouterr().out)["model"]
        sizes.append((data["weights"], data["activations"]["per_sample"]))
    assert sizes[1][0] == 2 * sizes[0][0] == sizes[2][0]
    assert sizes[0][1] < sizes[1][1] < sizes[2][1]


def test_a_calibration_without_a_model_is_printed_as_text_and_as_json(lab, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(lab))
    measured = Calibration("cpu", 1, {"float32": ((1e6, 1e9), (1e9, 1e11))}, 1e10, 2e10, None, 2e-6, "2025-01-31")
    monkeypatch.setattr("samestep.planner.calibration.calibrate", lambda device, report: report("copies") or measured)
    assert main(["plan", "--calibrate", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["device"], data["copy_bandwidth"]) == ("cpu", 1e10)
    assert Path(data["path"]).is_file()
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich assume a terminal
    assert main(["plan", "--calibrate"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("cpu: matrix products in TFLOP/s: float32 0.1; copies 10 GB/s, host to device 20")
    assert "measuring this machine, takes less than a minute: copies" in err


def test_what_if_accepts_device_descriptions_and_presets(lab, capsys):
    figures = '{"name": "mine", "memory_gib": 20, "bandwidth_gbs": 500, "tflops": {"float32": 20}}'
    for words, first in ((figures, "mine"), ("g5", "a10g")):
        arguments = ["plan", "planlab:build", "--global-batch", "64", "--precision", "fp32", "--what-if", "--json"]
        assert main([*arguments, "--gpus", words]) == 0
        rows = json.loads(capsys.readouterr().out)
        seen = [
            (row["cluster"]["device"]["name"], row["cluster"]["devices_per_node"] * row["cluster"]["nodes"])
            for row in rows
        ]
        assert seen[:5] == [(first, count) for count in (1, 2, 4, 8, 16)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "plan planlab:build --global-batch 8 --what-if --gpus x1",
            "--gpus x1: unknown device 'x1'. Use one of b200",
        ),
        (
            "plan planlab:build --global-batch 8 --what-if --nodes 2",
            "--what-if compares several numbers of nodes itself and cannot be combined with --nodes.",
        ),
        ("plan", "A plan needs a function that builds the model, and a global batch: `samestep plan train.py:build"),
        ("plan planlab:build", "A plan needs a global batch: `samestep plan planlab:build --global-batch 256 --gpus"),
        ("plan planlab:build --calibrate", "A plan needs a global batch: `samestep plan planlab:build --global-batch"),
        ("plan planlab:build --global-batch 0", "--global-batch must be an integer from 1 to 1000000000, got 0"),
        (
            "plan planlab:build --global-batch 8 --margin 1",
            "--margin must be a number from 0.0 to 0.99, got 1\n",
        ),
        (
            "plan planlab:build --global-batch 8 --margin nan",
            "--margin must be a number from 0.0 to 0.99, got nan",
        ),
        (
            "plan planlab:build --global-batch 8 --what-if --samples 0",
            "--samples must be an integer from 1 to 1000000000000000000, got 0",
        ),
        ("plan planlab:build --global-batch 8 --nodes 0", "--nodes must be an integer from 1 to 1000000, got 0"),
        (
            "plan planlab:build --global-batch 8 --gpus t4 --nodes -1",
            "--nodes must be an integer from 1 to 1000000, got -1",
        ),
        (
            "plan planlab:build --global-batch 8 --gpus t4 --blocks Blok",
            "Sequential has no submodule of class Blok. Name a class that repeats in the model; it has Linear, ",
        ),
        (
            "plan planlab:build --global-batch 8 --gpus t4 --optimizer LBFGS",
            "optimizer='LBFGS' cannot step after a backward pass (TypeError: LBFGS.step() missing 1 required",
        ),
        (
            "plan planlab:convolutions --global-batch 8 --gpus t4 -- --dept 3",
            "planlab:convolutions cannot be called with these options (No such option '--dept'",
        ),
        (
            "plan planlab:convolutions --global-batch 8 --gpus t4 --depth 3",
            "unknown option --depth: use one of --blocks, --calibrate, --channels-last, ",
        ),
        (
            "plan planlab:build --global-batch 8 --gpus t4 -- --width 3",
            "planlab:build cannot be called with these options (No such option '--width'.). Pass the parameters of the "
            "build function after `--`. It has: none",
        ),
        (
            "plan planlap --global-batch 8",
            "planlap is neither a function nor a recipe. Pass the module or file, a colon and the function, for "
            "example train.py:build or mypackage.models:build, or one of the recipes cfg_diffusion, contrastive, ",
        ),
        (
            "plan planlab:build --global-batch 8 --gpus x1",
            "--gpus x1: unknown device 'x1'. Use one of b200",
        ),
        (
            "plan planlab:build --global-batch 8 --gpus v100 --precision bf16",
            "precision bf16 is not supported by v100. Use",
        ),
        (
            "plan planlab:broken --global-batch 8 --gpus t4",
            "broken() failed (ValueError: no such file). Call it on its own",
        ),
    ],
)
def test_an_error_is_printed_in_one_line(lab, capsys, arguments, message):
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"samestep: {message}")
    assert err.count("\n") == 1


def test_the_exit_code_is_1_if_nothing_fits(lab, capsys):
    tiny = '{"name": "tiny", "memory_gib": 0.1, "bandwidth_gbs": 10, "tflops": {"float32": 1}}'
    assert main(["plan", "planlab:build", "--global-batch", "8", "--gpus", tiny]) == 1
    assert "nothing fits" in capsys.readouterr().out


def test_options_of_the_function_before_the_dashes_are_explained(capsys):
    assert main(["plan", "mylab:build", "--global-batch", "8", "--layers", "12"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("samestep: unknown option --layers: use one of --blocks, ")
    assert err.endswith("; put options of the function after `--`\n")


def test_output_of_the_users_module_goes_to_stderr(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when it traces
    monkeypatch.chdir(tmp_path)
    loud = LAB.replace("def build():", "print('imported')\n\ndef build():\n    print('built')")
    Path("loud.py").write_text(loud)
    assert main(["plan", "loud.py:build", "--global-batch", "8", "--gpus", "h100:1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["model"]["name"] == "Sequential"
    assert "imported\nbuilt\n" in err


if __name__ == "__main__":
    for case, draw in CASES.items():
        (GOLDEN / f"plan_{case}.txt").write_text(printed(draw))

"""`samestep verify`: what it prints, its exit status, and what it leaves behind, with real ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from samestep.cli import verify_command
from samestep.cli.main import main
from samestep.verify import verification
from samestep.verify.checks import CHECKS
from tests.launch.launched import IMPORT_PATH, LAUNCHERS, MARK, variable
from tools import check_pages

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = """\
import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--mode", default="correct")
mode = parser.parse_args().mode
if mode == "fails":
    raise FileNotFoundError("data.csv is missing")
dist.init_process_group("gloo")
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 1, generator=generator))
torch.manual_seed(0)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
if mode == "fault":
    loader = DataLoader(
        data,
        batch_size=4,
        shuffle=True,
    )
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
if mode == "waits":
    time.sleep(600)
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "weights.pt")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the script."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def verify(interpreters, folder, monkeypatch, capsys):
    """Run the command in this process: `verify("--strict", "train.py")` returns exit status, output and errors."""
    monkeypatch.setattr(verification, "Interpreters", lambda device: nullcontext(interpreters))

    def run(*arguments):
        code = main(["verify", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.slow
def test_a_correct_script_ends_with_0_and_the_output_says_what_was_compared(verify, folder):
    code, out, err = verify("train.py")
    lines = out.splitlines()
    assert (code, lines[0]) == (0, "no faults found in train.py")
    assert lines[1:3] == [
        "  ran           2 ranks; 1 rank with the global batch of 2 ranks",
        "  steps         8 optimizer steps",
    ]
    assert lines[3].startswith("  compared      which samples each rank reads")
    assert "                samples, gradients and metrics of the ranks with those of 1 rank" in lines
    left_out = sum(check.is_strict for check in CHECKS)
    assert f"\n  not compared  {left_out} checks for choices that are legitimate but depend on the number" in out
    assert err.splitlines() == [
        "samestep: starting Python and torch",
        "samestep: train.py on 2 ranks",
        "samestep: train.py on 1 rank with the global batch of 2 ranks",
    ]
    assert [path.name for path in folder.iterdir()] == ["train.py"]  # not its weights


@pytest.mark.slow
def test_a_finding_is_printed_with_its_source_what_was_seen_and_the_repair(verify):
    code, out, _ = verify("--", "train.py", "--mode", "fault")
    assert code == 1
    assert out.startswith(
        "train.py:26: error SS101 duplicated-training-data\n"
        '    25 | if mode == "fault":\n'
        "  > 26 |     loader = DataLoader(\n"
        "  > 27 |         data,\n"
        "  > 28 |         batch_size=4,\n"
        "  > 29 |         shuffle=True,\n"
        "  > 30 |     )\n"
        "    31 | for epoch in range(2):\n"
        "  seen      ranks 0 and 1 trained on the same 32 of 32 samples of epoch 0"
    )
    assert "\n  ranks     0, 1\n  why       " in out
    assert "\n  repair    give the loader a DistributedSampler" in out
    assert "\n\n1 error found in train.py --mode fault\n  ran           2 ranks; 1 rank" in out
    assert "\n  compared      data, weights and gradients, collectives," in out


@pytest.mark.slow
def test_a_terminal_shows_a_status_line_and_errors_in_red(verify, monkeypatch):
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "60"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, out, err = verify("train.py", "--mode", "fault")
    assert "\x1b[1;31merror\x1b[0m" in out
    assert max(len(line) for line in out.splitlines() if "  seen" in line) < 60 + len("\x1b[1m\x1b[0m")
    assert "train.py on 2 ranks: step " in err
    assert "samestep: train.py" not in err


@pytest.mark.slow
def test_no_color_is_respected(verify, monkeypatch):
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "\x1b[1;31m" not in verify("train.py", "--mode", "fault")[1]


@pytest.mark.slow
def test_a_module_is_verified_with_strict_checks_as_one_json_object(verify):
    code, out, _ = verify("--json", "--strict", "--steps", "4", "-m", "train", "--mode", "correct")
    result = json.loads(out)
    assert (code, result["exit_code"]) == (1, 1)
    assert (result["script"], result["module"], result["arguments"]) == ("train", True, ["--mode", "correct"])
    assert result["options"] == {"nproc": 2, "steps": 4, "device": "cpu", "strict": True, "timeout": 300}
    assert [(each["code"], each["severity"]) for each in result["findings"]] == [("SS111", "note")]
    assert result["findings"][0]["location"]["file"] == "train.py"
    assert result["worlds"] == {"many": 2, "one": 1}
    assert result["failure"] == result["output"] == ""


@pytest.mark.slow
def test_a_script_that_fails_by_itself_ends_with_2_and_its_own_traceback(verify, folder):
    code, out, err = verify("train.py", "--mode", "fails")
    assert (code, out) == (2, "")
    text = err[err.index("samestep: could not verify") :]
    assert text.splitlines()[:5] == [
        "samestep: could not verify train.py --mode fails: the script fails on one rank as well: "
        "FileNotFoundError: data.csv is missing",
        "Traceback (most recent call last):",
        f'  File "{folder}/train.py", line 16, in <module>',
        '    raise FileNotFoundError("data.csv is missing")',
        "FileNotFoundError: data.csv is missing",
    ]


@pytest.mark.slow
def test_keep_leaves_the_files_that_the_script_has_written(verify, tmp_path_factory):
    kept = tmp_path_factory.mktemp("kept")
    code, _, _ = verify("--keep", str(kept), "train.py")
    assert code == 0
    assert (kept / "many" / "files" / "weights.pt").stat().st_size > 0
    assert {path.name for path in kept.iterdir()} >= {"many", "one"}
    code, out, err = verify("--keep", str(kept), "train.py")
    assert (code, out) == (2, "")
    assert err.endswith("is not empty: pass a new folder, or remove what is there\n")


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_processes(folder, stop):
    mark = uuid4().hex
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    command = [sys.executable, "-m", "samestep", "verify", "train.py", "--mode", "waits"]
    environment = {**clean, **IMPORT_PATH, MARK: mark}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "samestep: starting Python and torch\n"
        assert process.stderr.readline() == "samestep: train.py on 2 ranks\n"
        assert len(marked(mark)) >= 5  # the command, two interpreters, two ranks
        process.send_signal(stop)
        assert process.wait(60) == 128 + stop
    deadline = time.monotonic() + 10
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def marked(mark: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if variable(process, MARK) == mark]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script given: run `samestep verify train.py`, or `samestep verify -m package.module`"),
        (["--nproc", "1", "train.py"], "--nproc must be an integer from 2 to "),
        (["--steps", "0", "train.py"], "--steps must be an integer from 1 to 1000000000, got 0"),
        (["--timeout", "soon", "train.py"], "--timeout must be an integer from 1 to 86400, got soon"),
        (["--strickt", "train.py"], "unknown option --strickt: use one of "),
        (["other.py"], "script other.py not found in "),
        (["-m", "other"], "other"),
        (["."], ". is a folder, not a script: pass a file in it, or `samestep verify -m PACKAGE` for a package"),
        (["--keep", "train.py", "train.py"], "--keep=train.py is not a folder: pass a new folder"),
        (["--list", "train.py"], "--list runs no script: leave out train.py"),
        (["--explain", "SS101", "train.py"], "--explain runs no script: leave out train.py"),
        (["--explain", "SS999"], "unknown check SS999: `samestep verify --list` shows all checks"),
        (["--explain", "same-nois"], "shows all checks; did you mean SS109 same-noise?"),
    ],
)
def test_a_wrong_option_ends_with_2_before_anything_starts(folder, capsys, arguments, message):
    assert main(["verify", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_the_defaults_are_those_of_the_library():
    assert verify_command.DEFAULT_STEPS == verification.DEFAULT_STEPS
    assert verify_command.DEFAULT_SECONDS == verification.DEFAULT_SECONDS


def test_the_list_has_every_check(capsys):
    assert main(["verify", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(check.code for check in CHECKS)
    assert lines[0].split() == ["SS101", "duplicated-training-data", "error"]
    assert any(line.endswith("note, only with --strict") for line in lines)


@pytest.mark.parametrize("name", ["SS101", "ss101", "duplicated-training-data"])
def test_a_check_is_explained_by_its_code_or_name(capsys, name):
    assert main(["verify", "--explain", name]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "SS101 duplicated-training-data (error)\n\nRanks train on the same samples.\n\nWhat it compares"
    )
    assert "\n\nFault: " in text
    assert "\n\nRepair: " in text


def test_checks_are_listed_and_explained_as_json(capsys):
    assert main(["verify", "--list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["checks"]) == len(CHECKS)
    assert main(["verify", "--explain", "SS101", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "duplicated-training-data"


def test_every_check_module_is_registered_with_a_code_of_its_own():
    modules = {path.stem for path in (REPOSITORY / "src/samestep/verify/checks").glob("*.py")} - {"__init__"}
    assert {check.find.__module__.rpartition(".")[2] for check in CHECKS} == modules
    assert len({check.code for check in CHECKS}) == len({check.name for check in CHECKS}) == len(CHECKS)
    assert {check.code[2] for check in CHECKS} <= verify_command.FAMILIES.keys()


def test_the_page_of_checks_is_up_to_date():
    page = REPOSITORY / "docs" / "checks.md"
    assert page.read_text() == check_pages.page(), "run `python tools/check_pages.py --write docs/checks.md`"


def test_a_docstring_without_an_example_is_an_error(monkeypatch):
    monkeypatch.setattr(
        check_pages, "page_of", lambda check: "Ranks differ.\n\nWhat it compares: ranks.\n\nRepair: none."
    )
    with pytest.raises(check_pages.PageError, match="no paragraph that begins with 'Fault'"):
        check_pages.page()

"""tools/gpu_figures.py runs tests and benchmarks on a GPU: what it keeps of commands that pass, fail, hang or skip."""

import json
import re
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from samestep.environment.processes import process_is_gone
from tools import gpu_figures
from tools.gpu_figures import FAULTS, PARTS, SLOW, Command, Part, Runner, read_rows, report

REPOSITORY = Path(__file__).parent.parent.parent
ONE_GPU = {"gpus": ["NVIDIA H200"], "nccl": [2, 29, 7]}

HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
open("pid", "w").write(str(child.pid))
print("before the hang", flush=True)
time.sleep(300)
"""
OVERHEAD = """
import sys
from pathlib import Path
print("samestep  12.0 ms/step")
row = '{"ms": 12.0, "turns_ms": [11.0, 13.0], "ops": [{"flops": 1}]}'
Path(sys.argv[sys.argv.index("--json") + 1]).write_text(row)
"""
SKIPPED = "import pytest\n\n\ndef test_of_a_gpu():\n    pytest.skip('this machine has none')\n"
HALVES = {"test_nccl": FAULTS, "test_nccl_hangs": SLOW}  # these tests, and the others of the file
MIXED = "def test_right():\n    pass\n\n\ndef test_wrong():\n    assert 1 + 1 == 3\n"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a benchmark and two files of tests."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/overhead.py").write_text(OVERHEAD)
    (tmp_path / "test_skipped.py").write_text(SKIPPED)
    (tmp_path / "test_mixed.py").write_text(MIXED)
    monkeypatch.setattr(gpu_figures, "REPOSITORY", tmp_path)
    return tmp_path


def run(folder, commands, seconds=300.0, machine=ONE_GPU):
    """The results of a part, as its file has them, and the runner."""
    part = Part("a part", 1, tuple(commands))
    environ = gpu_figures.variables(None, folder)
    runner = Runner(folder / "out", environ, machine, time.monotonic() + seconds)
    runner.prepare({"part": part})
    runner.run("part", part, 2)
    value = json.loads((folder / "out/part.json").read_text())
    return {each["name"]: each for each in value["commands"]}, runner


def is_gone(pid):
    try:
        return process_is_gone(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


def code(name, text, minutes=5.0, **options):
    return Command(name, ("-c", text), minutes, **options)


def of_pytest(name, file):
    return Command(name, ("-m", "pytest", file, "-q", "-p", "no:cacheprovider"), 5.0, alone=False)


@pytest.mark.slow
def test_a_command_that_fails_or_hangs_stops_no_other_and_all_results_are_kept(repository, capsys):
    commands = [
        code("fails", "print('before the failure'); raise SystemExit(3)"),
        code("hangs", HANGS, minutes=0.1, alone=False),
        Command("overhead", ("benchmarks/overhead.py", "--rounds", "1"), 5.0),
        code("several ranks", "raise SystemExit(1)", ranks=2),
        of_pytest("skipped", "test_skipped.py"),
        of_pytest("mixed", "test_mixed.py"),
    ]
    found, runner = run(repository, commands)
    outcomes = {name: (each["outcome"], each["exit_code"]) for name, each in found.items()}
    assert outcomes.pop("hangs")[0] == "timed out"
    assert outcomes == {
        "fails": ("failed", 3),
        "overhead": ("passed", 0),
        "several ranks": ("skipped", None),
        "skipped": ("skipped", 0),
        "mixed": ("failed", 1),
    }
    assert is_gone(int((repository / "pid").read_text()))
    assert found["overhead"]["rows"] == [{"ms": 12.0, "turns_ms": [11.0, 13.0]}]
    assert found["several ranks"]["reason"] == (
        "2 ranks over NCCL 2.29.7 need 2 GPUs, or NCCL 2.30 on one: pass --nccl"
    )
    assert "this machine has none" in found["skipped"]["reason"]
    assert [(each["name"], each["outcome"]) for each in found["mixed"]["tests"]] == [
        ("test_right", "passed"),
        ("test_wrong", "failed"),
    ]
    text = (repository / "out/part.txt").read_text()
    assert all(shown in text for shown in ("before the failure", "before the hang", "samestep  12.0 ms/step"))
    assert report(runner.results) == 1
    printed = capsys.readouterr().out
    assert "assert (1 + 1) == 3" in printed
    assert printed.endswith("6 commands: 1 passed, 2 skipped, 3 others\n")


def test_when_the_time_is_over_no_command_is_started_and_none_counts_as_passed(repository):
    found, runner = run(repository, [code("late", "print(1)")], seconds=1.0)
    assert (found["late"]["outcome"], found["late"]["reason"]) == ("not run", "no time was left")
    assert report(runner.results) == 1


def test_the_files_exist_before_the_first_command_so_that_no_test_sees_a_new_one(repository):
    look = "import os; assert sorted(os.listdir('out')) == ['part.json', 'part.txt'], os.listdir('out')"
    found, runner = run(repository, [code("look", look)])
    assert found["look"]["outcome"] == "passed", runner.results
    assert report(runner.results) == 0


def test_a_compressed_nccl_is_unpacked_and_loaded_first(tmp_path):
    import lzma

    (tmp_path / "libnccl.so.2.xz").write_bytes(lzma.compress(b"library"))
    found = gpu_figures.variables(tmp_path / "libnccl.so.2.xz", tmp_path)
    assert Path(found["LD_PRELOAD"]).read_bytes() == b"library"
    assert gpu_figures.why_not(code("two", "", ranks=2), {"gpus": ["NVIDIA H200"], "nccl": [2, 32, 3]}, found) == ""
    assert gpu_figures.why_not(code("two", "", ranks=2), ONE_GPU, found) != ""
    assert gpu_figures.why_not(code("two", "", ranks=2), {**ONE_GPU, "gpus": ["A", "B"]}, {}) == ""


def test_without_a_gpu_nothing_is_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_figures, "describe_machine", lambda _: {"gpus": [], "nccl": []})
    assert gpu_figures.main(["--part", "tests", "--out", str(tmp_path / "out")]) == 2
    assert "torch finds no CUDA device: run this on a machine with an NVIDIA GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_machine_is_described_with_its_versions_and_missing_modules(monkeypatch):
    monkeypatch.setattr(gpu_figures, "MACHINE", gpu_figures.MACHINE.replace("'pytest'", "'no_such_module'"))
    found = gpu_figures.describe_machine(gpu_figures.variables(None, REPOSITORY))
    assert found["missing"][:1] == ["no_such_module"]
    assert "no_such_module" not in sys.modules


def test_rows_are_read_from_a_list_and_from_lines(tmp_path):
    for text in ('[{"a": 1, "b": {"c": 2}}, {"a": 2}]', '{"a": 1, "b": [[{}]]}\n{"a": 2}\n'):
        (tmp_path / "rows.json").write_text(text)
        assert read_rows(tmp_path / "rows.json") == [{"a": 1}, {"a": 2}]
    assert read_rows(tmp_path / "none.json") == []


def test_every_test_of_a_gpu_is_in_one_part_and_every_benchmark_exists():
    commands = [each for part in PARTS.values() for each in part.commands]
    files = Counter(each.arguments[2] for each in commands if each.is_test)
    expected = {f"tests/gpu/{path.name}": 1 for path in (REPOSITORY / "tests/gpu").glob("test_*.py")}
    assert files == {**expected, **{f"tests/gpu/{file}.py": 2 for file in HALVES}}
    for file, words in HALVES.items():
        halves = [each.arguments[-1] for each in commands if each.arguments[2:3] == (f"tests/gpu/{file}.py",)]
        assert set(halves) == {words, f"not ({words})"}
        names = re.findall(r"^def (test_\w+)", (REPOSITORY / f"tests/gpu/{file}.py").read_text(), re.M)
        assert all(any(word in name for name in names) for word in words.split(" or "))
    assert all((REPOSITORY / each.arguments[0]).exists() for each in commands if not each.is_test)
    assert all(len({each.name for each in part.commands}) == len(part.commands) for part in PARTS.values())
    assert all(part.minutes < 9 for part in PARTS.values())

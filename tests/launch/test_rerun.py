"""`samestep run --config` and `samestep rerun`: the same losses again, in a new folder, from the beginning."""

import json
import os
import subprocess
import sys
from textwrap import dedent

import pytest

from samestep import read_metrics
from samestep.cli.main import main
from samestep.environment.processes import LAUNCHER
from tests.launch.launched import IMPORT_PATH, LAUNCHERS, start

SCRIPT = """
    import argparse, os
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.data import TensorDataset
    from samestep import Run

    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="+", default=[])
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--api-key")
    parser.add_argument("out")
    options = parser.parse_args()
    inputs = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    with Run(global_batch=8, seed=1) as run:
        layers = [torch.nn.Linear(8, options.sizes[0]), torch.nn.Dropout(0.1), torch.nn.Linear(options.sizes[0], 2)]
        model = run.wrap(torch.nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
        train = run.shard(TensorDataset(inputs, (inputs.sum(1) > 0).long()), shuffle=True, num_workers=0)
        checkpoint = run.checkpoint(options.out, model=model, optimizer=optimizer, train=train)
        for epoch in train.epochs(options.epochs):
            for step in epoch:
                for x, labels in step:
                    step.mean(cross_entropy(model(x), labels, reduction="none")).backward()
                optimizer.step()
                optimizer.zero_grad()
            checkpoint.save()
"""
YAML = "lr: 1e-2\nepochs: 5\nsizes: [6]\nfast: true\n"


def environment(**more):
    """The variables of this process without those of a launcher."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**inherited, **IMPORT_PATH, "OMP_NUM_THREADS": "1", **more}


def python(folder, *arguments, **variables):
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment(**variables), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def losses(folder):
    return [record["train/loss"] for record in read_metrics(folder / "metrics.jsonl", by_step=True)]


def commit(folder, text):
    git = ["git", "-C", str(folder), "-c", "user.name=test", "-c", "user.email=test@example.org"]
    for words in (["init", "-q"], ["add", "train.py"], ["commit", "-qm", text]):
        subprocess.run([*git, *words], check=True, timeout=60)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The folder of a run on two ranks with options from a file, two of which were given explicitly."""
    folder = tmp_path_factory.mktemp("first")
    (folder / "run.yaml").write_text(YAML)
    (folder / "train.py").write_text(dedent(SCRIPT))
    commit(folder, "first")
    options = "--config", "run.yaml", "--nproc-per-node", "2", "train.py", "out", "--epochs", "2"
    ended = start(folder, SCRIPT, *options, env={"OMP_NUM_THREADS": "1"}).finish()
    assert ended.code == 0, ended.err
    assert "samestep: run.yaml adds --lr=1e-2 --fast --sizes 6\n" in ended.err
    return folder


@pytest.mark.slow
def test_the_folder_of_a_run_has_its_resolved_configuration(first):
    known = json.loads((first / "out" / "config.json").read_text())
    assert known["config"] == {"lr": 0.01, "epochs": 5, "sizes": [6], "fast": True}
    assert known["arguments"] == ["--lr=1e-2", "--fast", "out", "--sizes", "6", "--epochs", "2"]
    assert (known["script"], known["module"], known["ranks"], known["nodes"]) == ("train.py", False, 2, 1)
    assert (known["folder"], known["config_file"], known["rerun_of"]) == (str(first), "run.yaml", None)
    assert known["environment"]["OMP_NUM_THREADS"] == "1"
    assert (known["run"]["global_batch"], known["run"]["seed"], known["run"]["precision"]) == (8, 1, "auto")
    (launched,) = (first / "runs").glob("train-*/config.json")
    assert json.loads(launched.read_text())["arguments"] == known["arguments"]


@pytest.mark.slow
def test_a_rerun_has_the_same_losses_and_leaves_the_first_run_alone(first, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in (first / "out").rglob("*")}
    (first / "train.py").write_text(dedent(SCRIPT) + "# changed\n")
    done = python(tmp_path, "-m", "samestep", "rerun", str(first / "out"), "--folder", "again", OMP_NUM_THREADS="2")
    assert "samestep: sets OMP_NUM_THREADS=1\n" in done.stderr
    assert "samestep: the code differs: other uncommitted changes than then, at commit " in done.stderr
    again = tmp_path / "again"
    line = "train.py --lr=1e-2 --fast out --sizes 6 --epochs 2"
    assert f"samestep: repeats {first / 'out'}: {line}; folder {again}\n" in done.stderr
    assert losses(again) == losses(first / "out")
    assert len(losses(again)) == 10
    assert {path: path.stat().st_mtime_ns for path in (first / "out").rglob("*")} == before
    assert (again / "checkpoints" / "out" / "latest").exists()
    known = json.loads((again / "config.json").read_text())
    assert (known["rerun_of"], known["ranks"]) == (str(first / "out"), 2)
    assert known["config"] == {"lr": 0.01, "epochs": 5, "sizes": [6], "fast": True}


@pytest.mark.slow
def test_a_run_without_a_launcher_is_continued_with_resume(tmp_path):
    (tmp_path / "train.py").write_text(dedent(SCRIPT))
    python(tmp_path, "train.py", "out", "--sizes", "6", "--epochs", "1")
    folder = tmp_path / "out"
    arguments = "-m", "samestep", "rerun", "out", "--resume", "--nproc-per-node", "1", "--", "--epochs", "2"
    done = python(tmp_path, *arguments)
    assert (
        f"samestep: continues {folder}: train.py out --sizes 6 --epochs 1 --epochs 2; folder {folder}\n" in done.stderr
    )
    assert "samestep: the code is not compared, since it is, or was, in no git repository\n" in done.stderr
    steps = [record["step"] for record in read_metrics(folder / "metrics.jsonl")]
    assert steps == list(range(10))  # none comes again
    assert json.loads((folder / "config.json").read_text())["rerun_of"] is None


# Mistakes

KNOWN = {
    "script": "train.py",
    "module": False,
    "arguments": ["--lr", "0.1"],
    "ranks": 2,
    "nodes": 1,
    "folder": "/",
}


def write(path, changes):
    """Write a config.json; the folder that it is in."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**KNOWN, "folder": str(path.parent), **changes}))
    return str(path)


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(LAUNCHER, "")
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"nodes": 2},
            [],
            "{folder} was a run on 2 nodes: pass --nproc-per-node 2 to repeat it on this machine, or start `samestep "
            "run --nnodes 2 --rdzv-endpoint HOST:PORT train.py --lr 0.1` on each node",
        ),
        (
            {"arguments": ["--api-key", "***", "--lr", "1"]},
            [],
            "the value of --api-key is secret and was not recorded: add it, as in `-- --api-key VALUE`",
        ),
        (
            {"arguments": ["--token=***"]},
            [],
            "the value of --token is secret and was not recorded: add it, as in `-- --token VALUE`",
        ),
        (
            {},
            ["--resume", "--folder", "new"],
            "--resume continues in the run's own folder: leave --folder out, or leave --resume out",
        ),
        (
            {"folder": "/no/such"},
            [],
            "the run was started in /no/such, which cannot be entered (No such file or directory): relative paths "
            "would differ",
        ),
        (
            {},
            ["--folder", "."],
            "--folder {parent} is not empty: pass a new folder, so that no checkpoint is continued",
        ),
        (
            {"script": 1, "ranks": "2"},
            [],
            "{folder}/config.json lacks script, ranks: it was changed, or is of another version",
        ),
        (
            {"script": "samestep.launch.python_launch", "module": True, "arguments": ["/tmp/samestep-launch-1"]},
            [],
            "{folder} was a run of samestep.launch, whose function is not recorded: call samestep.launch again, with "
            "folder='{folder}' to continue the run",
        ),
        (
            {},
            ["--lr", "1"],
            "unknown option --lr: use one of --folder, --help, --nproc-per-node, --resume; put options of the script "
            "after `--`",
        ),
    ],
)  # fmt: skip
def test_a_rerun_that_is_not_possible_says_why(in_folder, capsys, changes, options, message):
    folder = write(in_folder / "run", changes)
    assert main(["rerun", folder, *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == "samestep: " + message.format(folder=folder, parent=in_folder)
    assert not (in_folder / "runs").exists()


def test_a_folder_without_a_record_cannot_be_repeated(in_folder, capsys):
    assert main(["rerun", "."]) == 2
    message = f"{in_folder} has no readable config.json: pass the folder of a run, or of its launcher"
    assert capsys.readouterr().err == f"samestep: {message}\n"


def test_a_script_gets_an_error_for_a_missing_file_before_ranks_are_started(in_folder, capsys):
    (in_folder / "train.py").touch()
    assert main(["run", "--config", "gone.yaml", "train.py"]) == 2
    message = f"--config gone.yaml does not exist: check its path, which starts in {in_folder}"
    assert capsys.readouterr().err == f"samestep: {message}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "seed: 1\nepoch: 3\n",
            "run.yaml, line 2: the recipe digits has no option epoch: use one of epochs, global-batch, out, seed; "
            "did you mean epochs?",
        ),
        ("epochs: ten\n", "run.yaml, line 1: epochs is ten, which is not valid: "),
        ("\nepochs: 0\n", "run.yaml, line 2: epochs is 0, which is not valid: "),
        ("epochs: [1, 2]\n", "run.yaml, line 1: epochs is a list, and it must be one value"),
        ("epochs: true\n", "run.yaml, line 1: epochs is true, and it is not a flag: write its value"),
        (
            "epochs: {a: 1}\n",
            "run.yaml, line 1: epochs has nested values, and an option has one value or a list: write one line per "
            "option",
        ),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_of_a_recipe_names_its_line(in_folder, capsys, text, message):
    (in_folder / "run.yaml").write_text(text)
    assert main(["recipe", "run", "digits", "--config", "run.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"samestep: {message}"), error
    assert error.count("\n") == 1
    assert not (in_folder / "runs").exists()


def test_a_recipe_needs_a_file_after_config(in_folder, capsys):
    assert main(["recipe", "run", "digits", "--config"]) == 2
    assert capsys.readouterr().err == "samestep: --config needs a file: pass a .yaml, .toml or .json file\n"

"""`samestep recipe`: what is listed, run and copied, in a checkout and from a wheel."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from samestep.cli.main import main
from tests.conftest import REPOSITORY

KNOWN = ", ".join(sorted(path.stem for path in (REPOSITORY / "recipes").glob("*.py")))

MISTAKES = [
    ("run", f"no recipe was named: there are {KNOWN}"),
    ("run salency", f"there is no recipe salency: there are {KNOWN}; did you mean saliency?"),
    ("run zzz", f"there is no recipe zzz: there are {KNOWN}"),
    ("run --nproc-per-node 0 saliency", "--nproc-per-node 0 is impossible: type auto, gpu, cpu or a number from 1 up"),
    ("copy zzz", f"there is no recipe zzz: there are {KNOWN}"),
    ("copy digits --to here.py", "here.py exists and is not overwritten: move it away, or name another file with --to"),
]


@pytest.mark.parametrize(("typed", "complaint"), MISTAKES, ids=[typed for typed, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(typed, complaint, tmp_path, capsys):
    (tmp_path / "here.py").touch()
    assert main(["recipe", *typed.split()]) == 2
    assert capsys.readouterr() == ("", f"samestep: {complaint}\n")
    assert not (tmp_path / "runs").exists()


def test_every_recipe_is_listed_with_what_it_shows(capsys):
    assert main(["recipe", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == KNOWN.split(", ")
    assert all(len(line.split()) > 4 for line in lines)


def test_a_copy_is_the_recipe_itself(tmp_path, capsys):
    assert main(["recipe", "copy", "saliency"]) == 0
    assert (tmp_path / "saliency.py").read_bytes() == (REPOSITORY / "recipes" / "saliency.py").read_bytes()
    assert capsys.readouterr().out.startswith("saliency.py: run it with `samestep run saliency.py`")
    assert main(["recipe", "copy", "saliency", "--to", "mine.py"]) == 0
    assert (tmp_path / "mine.py").exists()


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("samestep.cli.recipe.find_spec", lambda name: None)
    assert main(["recipe", "run", "digits"]) == 2
    told = "samestep: the recipe digits needs more than samestep itself: pip install 'samestep[recipes]'\n"
    assert capsys.readouterr().err == told


def test_a_package_without_recipes_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("samestep.cli.recipe.__file__", str(tmp_path / "src" / "samestep" / "cli" / "recipe.py"))
    assert main(["recipe", "list"]) == 2
    inside = tmp_path / "src" / "samestep" / "recipes"
    assert capsys.readouterr().err == f"samestep: there are no recipes in {inside}: install samestep anew\n"


@pytest.mark.parametrize(
    "name", ["cfg_diffusion", "digits", "distill", "latent_adapter", "progressive_images", "saliency"]
)
def test_a_recipe_says_what_its_options_mean(name):
    script = REPOSITORY / "recipes" / f"{name}.py"
    told = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, check=True)
    for option in ("--out", "--epochs", "--global-batch", "--seed"):
        assert option in told.stdout, f"{name} has no {option}"
    assert "over all ranks" in " ".join(told.stdout.replace("│", " ").split())


@pytest.mark.slow
def test_a_recipe_runs_on_two_ranks_by_its_name(tmp_path):
    command = [sys.executable, "-m", "samestep", "recipe", "run", "--nproc-per-node", "2", "--folder", "kept"]
    ended = subprocess.run([*command, "saliency", "--epochs", "1"], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "the images and fixations of this run are SYNTHETIC" in ended.stdout
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert {"logs", "metrics.jsonl", "summary.json", "weights.pt", "maps.png", "synthetic"} <= kept


@pytest.mark.slow
def test_a_wheel_holds_the_recipes_and_finds_them(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    for name in ("src", "recipes"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    show = "from samestep.cli import recipe; print(*recipe.recipes().values(), sep='\\n')"
    told = subprocess.run([sys.executable, "-c", show], env=environment, capture_output=True, text=True, check=True)
    found = [Path(line) for line in told.stdout.splitlines()]
    assert {path.parent for path in found} == {tmp_path / "site" / "samestep" / "recipes"}
    assert [path.stem for path in found] == KNOWN.split(", ")

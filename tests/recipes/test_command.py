"""`samestep recipe`: list, run and copy, in a checkout and from a wheel."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

from samestep.cli.main import main
from tests.conftest import REPOSITORY
from tests.lightning.trained import quiet

KNOWN = ", ".join(sorted(path.stem for path in (REPOSITORY / "recipes").glob("*.py")))
LONG = 60 * "mine-" + ".py"

MISTAKES = [
    ("run", f"no recipe given: choose one of {KNOWN}"),
    ("run salency", f"unknown recipe salency: choose one of {KNOWN}; did you mean saliency?"),
    ("run zzz", f"unknown recipe zzz: choose one of {KNOWN}"),
    ("run --nproc-per-node 0 saliency", "--nproc-per-node must be auto, gpu, cpu or a number of at least 1, got 0"),
    ("copy zzz", f"unknown recipe zzz: choose one of {KNOWN}"),
    ("copy digits --to /dev/null", "/dev/null is not a folder: pass a file name that ends in .py"),
    ("copy digits --to here.py", "here.py exists and is not overwritten: move it, or pass another file with --to"),
    (
        "copy digits --to no/such/mine.py",
        "the folder no/such does not exist: create it with `mkdir -p no/such`, or pass another file with --to",
    ),
    (
        "copy digits --to nosub/",
        "the folder nosub does not exist: create it with `mkdir -p nosub`, or pass a file name that ends in .py",
    ),
    (f"copy digits --to {LONG}", f"cannot write {LONG[:30]}... (File name too long): pass another file with --to"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[arguments[:40] for arguments, _ in MISTAKES])
def test_a_mistake_prints_one_line_and_exits_with_2(arguments, message, tmp_path, capsys):
    (tmp_path / "here.py").touch()
    assert main(["recipe", *arguments.split()]) == 2
    assert capsys.readouterr() == ("", f"samestep: {message}\n")
    assert not (tmp_path / "runs").exists()


def test_every_recipe_is_listed_with_what_it_shows(capsys):
    assert main(["recipe", "list"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == "`samestep recipe run NAME` runs one, `samestep recipe copy NAME` copies its script\n"
    assert [line.split()[0] for line in lines] == KNOWN.split(", ")
    assert all(len(line.split()) > 4 for line in lines)
    assert main(["recipe", "list", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [f"{each['name']} {each['shows']}".split() for each in entries] == [line.split() for line in lines]
    assert all(Path(each["path"]).name == f"{each['name']}.py" for each in entries)


def test_on_a_terminal_long_lines_of_the_list_are_wrapped(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["recipe", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == KNOWN.split(", ")
    assert {len(line) - len(line.lstrip()) for line in lines} == {0, len("progressive_images  ")}


@pytest.mark.parametrize("name", KNOWN.split(", "))
def test_a_recipe_has_a_page_with_a_plot_figures_and_what_it_replaces(name):
    docs = REPOSITORY / "docs" / "recipes"
    page = (docs / f"{name}.md").read_text()
    plot = re.search(r"!\[.+\]\((\S+)\)", page)
    assert plot, f"{name}.md shows no plot"
    assert (docs / plot[1]).is_file()
    assert f"samestep recipe run {name}" in page
    assert re.search(r"^\|.*\d", page, re.MULTILINE), f"{name}.md has no table of figures"
    assert re.search(r"^## What samestep replaces$", page, re.MULTILINE)
    assert f"[{name}]({name}.md)" in (docs / "index.md").read_text()
    assert f"recipes/{name}.md" in (REPOSITORY / "mkdocs.yml").read_text()


@pytest.mark.parametrize("name", KNOWN.split(", "))
def test_a_recipe_is_short_and_uses_public_names_only(name):
    text = (REPOSITORY / "recipes" / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 190, "too long to read in one sitting: move general code to the library"
    assert re.search(r'weights.* and logs: \{(run\.folder|out)\}"\)\n\n\nif __name__', text), (
        "it must end by printing the folder"
    )
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("samestep"):
            public = import_module(node.module).__all__
            assert {alias.name for alias in node.names} <= set(public), f"{node.module} has {public}"


def test_a_copy_is_the_recipe_itself(tmp_path, capsys):
    assert main(["recipe", "copy", "saliency"]) == 0
    assert (tmp_path / "saliency.py").read_bytes() == (REPOSITORY / "recipes" / "saliency.py").read_bytes()
    assert capsys.readouterr().out.startswith("saliency.py: run it with `samestep run saliency.py`")
    assert main(["recipe", "copy", "saliency", "--to", "mine.py"]) == 0
    assert (tmp_path / "mine.py").exists()
    (tmp_path / "folder").mkdir()
    assert main(["recipe", "copy", "saliency", "--to", "folder"]) == 0
    assert (tmp_path / "folder" / "saliency.py").exists()
    capsys.readouterr()
    assert main(["recipe", "copy", "saliency", "--to", "my own.py"]) == 0
    assert capsys.readouterr().out.startswith("my own.py: run it with `samestep run 'my own.py'`, show its options")


@pytest.mark.parametrize(
    ("name", "missing", "extra"),
    [("digits", {"typer", "sklearn"}, "recipes"), ("lightning_images", {"lightning"}, "recipes,lightning")],
)
def test_a_missing_package_raises_with_the_install_command(name, missing, extra, monkeypatch, capsys):
    monkeypatch.setattr("samestep.cli.recipe_command.find_spec", lambda module: None if module in missing else object())
    assert main(["recipe", "run", name]) == 2
    packages = ", ".join(sorted(missing, reverse=True))
    expected = f"the recipe {name} needs {packages}, which is not installed: pip install 'samestep[{extra}]'"
    assert capsys.readouterr().err == f"samestep: {expected}\n"


def test_a_package_without_recipes_raises(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        "samestep.cli.recipe_command.__file__", str(tmp_path / "src" / "samestep" / "cli" / "recipe.py")
    )
    assert main(["recipe", "list"]) == 2
    inside = tmp_path / "src" / "samestep" / "recipes"
    assert capsys.readouterr().err == f"samestep: no recipes found in {inside}: reinstall samestep\n"


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_the_help_of_a_recipe_starts_no_ranks_and_creates_no_folder(option, tmp_path, capfd):
    assert main(["recipe", "run", "--nproc-per-node", "2", "digits", option]) == 0
    output = capfd.readouterr()
    assert output.out.startswith("Usage: samestep recipe run digits [OPTIONS]")
    assert output.out.count("--global-batch") == 1
    assert output.err == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("saliency --epochs 0", "Invalid value for '--epochs': Input should be greater than or equal to 1"),
        ("distill --mode x", "'x' is not one of 'features', 'logits'"),
        ("digits --epoch 3", "No such option: --epoch"),
    ],
)
def test_a_mistake_in_the_options_of_a_recipe_is_reported_once_and_starts_no_ranks(arguments, message, tmp_path, capfd):
    assert main(["recipe", "run", "--nproc-per-node", "2", *arguments.split()]) == 2
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.count(message) == 1
    assert f"Try 'samestep recipe run {arguments.split()[0]} --help'" in output.err
    assert list(tmp_path.iterdir()) == []


BAD = [
    (name, option, value, low)
    for name in KNOWN.split(", ")
    for option, value, low in (("--epochs", "-1", 1), ("--epochs", "0", 1), ("--global-batch", "0", 1))
] + [
    ("cfg_diffusion", "--passes", "-3", 1),
    ("cfg_diffusion", "--width", "8", 16),
    ("distill", "--held-out", "2", 3),
    ("finetune", "--rank", "0", 1),
    ("latent_adapter", "--latents", "0", 1),
    ("lightning_images", "--num-workers", "-1", 0),
    ("progressive_images", "--size", "4", 8),
    ("saliency", "--levels", "-1", 0),
]


def invoke(cases: list[tuple[str, ...]]) -> list[tuple[int, str]]:
    """Exit code and output of recipes called with these arguments on a warm rank, without the frames of rich."""
    from typer.testing import CliRunner

    with quiet():
        ended = [CliRunner().invoke(import_module(f"recipes.{name}").app, arguments) for name, *arguments in cases]
    return [(each.exit_code, one_line(re.sub("[│╭╮╰╯─]", " ", each.output))) for each in ended]


def one_line(text: str) -> str:
    """The text without its line breaks, which may also follow a hyphen."""
    return re.sub(r"(?<=\w)- (?=\w)", "-", " ".join(text.split()))


@pytest.mark.slow
def test_recipes_document_their_options_and_check_their_range(ranks, tmp_path, capfd):
    names = KNOWN.split(", ")
    wrong = [(name, option, value) for name, option, value, _ in BAD]
    (outputs,) = ranks(1, invoke, [(name, "--help") for name in names] + wrong)
    for name, (code, text) in zip(names, outputs, strict=False):
        assert code == 0
        for option in ("--out", "--epochs", "--global-batch", "--seed"):
            assert option in text, f"{name} has no {option}"
        assert "over all ranks" in text
        assert main(["recipe", "run", name, "--help"]) == 0  # the same, although it does not run the script
        assert one_line(capfd.readouterr().out).partition(" Options: ")[2] == text.partition(" Options: ")[2]
    for (name, option, value, low), (code, text) in zip(BAD, outputs[len(names) :], strict=True):
        assert code == 2, name
        assert f"Invalid value for '{option}': Input should be greater than or equal to {low}" in text, (name, value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_wheel_contains_the_recipes_and_finds_them(tmp_path):
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
    show = "from samestep.cli.recipe_command import recipes; print(*recipes().values(), sep='\\n')"
    ended = subprocess.run([sys.executable, "-c", show], env=environment, capture_output=True, text=True, check=True)
    found = [Path(line) for line in ended.stdout.splitlines()]
    assert {path.parent for path in found} == {tmp_path / "site" / "samestep" / "recipes"}
    assert [path.stem for path in found] == KNOWN.split(", ")

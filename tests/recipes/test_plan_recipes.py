"""`samestep plan RECIPE`: every recipe can be planned without training."""

import json
import sys

import pytest

from samestep.cli.main import main
from tests.conftest import REPOSITORY

KNOWN = sorted(path.stem for path in (REPOSITORY / "recipes").glob("*.py"))
# Recipes that read no model from a file: SmolLM2 and MiniLM take some seconds more.
QUICK = [name for name in KNOWN if name not in ("distill", "finetune", "latent_adapter")]


@pytest.fixture(autouse=True)
def _imports_scripts(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setenv(
        "TORCHINDUCTOR_CACHE_DIR", str(tmp_path)
    )  # torch sets it when tracing, Lightning sets the next one
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    yield
    for name in KNOWN:
        sys.modules.pop(name, None)


def plan(capsys, name, *own):
    assert main(["plan", name, "--global-batch", "64", "--gpus", "h100:2", "--json", "--", *own]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_recipe_can_be_planned_by_name(name, capsys, tmp_path):
    found = plan(capsys, name)
    assert found["model"]["method"] == "traced without memory"
    assert found["command"].startswith("samestep recipe run ")
    assert found["command"].endswith(f" {name}")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("distill", []),
        ("distill", ["--mode", "logits", "--layers", "1", "--teacher"]),
        ("latent_adapter", ["--models"]),
    ],
    ids=["features", "logits", "latents"],
)
def test_a_recipe_with_a_frozen_model_can_be_planned(name, own, capsys, models):
    found = plan(capsys, name, *own, *([str(models[2])] if own else []))
    assert sum(found["model"]["frozen"].values()) > sum(found["model"]["trainable"].values()) > 10**6
    unsupported = {each["teacher_placement"]: each["unsupported"] for each in found["candidates"]}
    if own[:1] == ["--mode"]:
        return  # gradients flow through the student's frozen embeddings, which the planner cannot tell from a teacher
    reason = "gradients flow through the frozen parts, and run.teacher computes no gradients"
    assert unsupported["sharded"] == (reason if name == "latent_adapter" else None)


@pytest.mark.slow
def test_a_recipe_with_adapters_can_be_planned(capsys, models):
    found = plan(capsys, "finetune", "--model", str(models[2]), "--rank", "4")
    trainable, frozen = (sum(found["model"][kind].values()) for kind in ("trainable", "frozen"))
    assert 0 < 50 * trainable < frozen


@pytest.mark.slow
def test_options_of_a_recipe_follow_two_dashes(capsys):
    small, large = (plan(capsys, "progressive_images", *own)["model"]["weights"] for own in ([], ["--width", "128"]))
    assert large > 20 * small


def test_an_unknown_option_lists_the_known_ones(capsys):
    assert main(["plan", "saliency", "--global-batch", "64", "--gpus", "h100:2", "--", "--colour", "red"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("samestep: saliency cannot be called with these options (No such option '--colour'")
    assert message.endswith("It has: --channels, --levels, --width, --height\n")


def test_an_unknown_recipe_lists_the_known_ones(capsys):
    assert main(["plan", "salency", "--global-batch", "64"]) == 2
    assert capsys.readouterr().err == (
        "samestep: salency is neither a function nor a recipe. Pass the module or file, a colon and the function, for "
        f"example train.py:build or mypackage.models:build, or one of the recipes {', '.join(KNOWN)}.\n"
    )


@pytest.fixture
def other_recipes(tmp_path, monkeypatch):
    def write(text):
        (tmp_path / "bare.py").write_text(text)
        monkeypatch.setattr("samestep.cli.recipe_command.recipes", lambda: {"bare": tmp_path / "bare.py"})

    yield write
    sys.modules.pop("bare", None)


def test_a_recipe_without_a_build_function_raises(capsys, other_recipes):
    other_recipes('"""Nothing to build."""')
    assert main(["plan", "bare", "--global-batch", "64"]) == 2
    assert capsys.readouterr().err == (
        "samestep: The recipe bare has no function build that returns its model and a batch. Copy it with `samestep "
        "recipe copy bare`, write one, and pass bare.py:build.\n"
    )


@pytest.mark.parametrize(("module", "extra"), [("nowhere", "recipes"), ("lightning_nowhere", "recipes,lightning")])
def test_a_recipe_whose_packages_are_missing_names_the_extra(capsys, other_recipes, module, extra):
    other_recipes(f"import {module}")
    assert main(["plan", "bare", "--global-batch", "64"]) == 2
    assert capsys.readouterr().err == (
        f"samestep: The recipe bare needs {module}, which is not installed. Run pip install 'samestep[{extra}]'.\n"
    )

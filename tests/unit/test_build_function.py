"""A script that `samestep plan` looks at does not train, however it is written."""

import sys

import pytest
import torch.distributed as dist

from samestep import Run
from samestep.cli.build_function import find_build
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


@pytest.mark.parametrize("words", ["lab:build", "lab.py:build"])
@pytest.mark.parametrize(
    ("training", "what"), [(RUN, "a Run was created"), (LOOP, "an optimizer was stepped")], ids=["run", "loop"]
)
def test_a_script_that_trains_when_imported_is_refused(lab, words, training, what):
    (lab / "lab.py").write_text(BUILD + training)
    with pytest.raises(PlanError) as error:
        find_build(words)
    assert str(error.value) == what + REMEDY
    assert not (lab / "trained").exists()


@pytest.mark.parametrize(("training", "what"), [(RUN, "a Run was created"), (LOOP, "an optimizer was stepped")])
def test_a_build_function_that_trains_is_refused_in_one_line(lab, capsys, training, what):
    inside = training.replace("\n", "\n    ").replace("model, batch = build()", "model, batch = plain()")
    plain = BUILD.replace("def build", "def plain")
    (lab / "lab.py").write_text(f"{plain}\ndef build():{inside}\n    return plain()")
    assert main(["plan", "lab:build", "--global-batch", "8", "--gpus", "t4"]) == 2
    assert capsys.readouterr() == ("", f"samestep: {what}{REMEDY}\n")
    assert not (lab / "trained").exists()


def test_a_script_that_opens_a_process_group_is_refused(lab):
    (lab / "lab.py").write_text(BUILD + GROUP.format(folder=lab))
    try:
        with pytest.raises(PlanError) as error:
            find_build("lab:build")
    finally:
        dist.destroy_process_group()
    assert str(error.value) == "a process group was opened" + REMEDY


def test_a_group_that_waits_for_a_launcher_fails_and_is_told_where_it_belongs(lab):
    (lab / "lab.py").write_text(BUILD + 'import torch.distributed as dist\ndist.init_process_group("gloo")')
    with pytest.raises(PlanError, match=r"^lab cannot be imported \(ValueError: .*RANK expected.* under `if __name__"):
        find_build("lab:build")


def test_a_script_that_ends_when_imported_is_told_so(lab):
    (lab / "lab.py").write_text(BUILD + "raise SystemExit(2)")
    with pytest.raises(PlanError, match=r"^lab cannot be imported \(SystemExit: 2\). A plan imports it to call its"):
        find_build("lab:build")


def test_a_script_whose_training_is_under_main_is_planned_for(lab, capsys):
    guarded = RUN.replace("\n", "\n    ")
    (lab / "lab.py").write_text(f'{BUILD}\nif __name__ == "__main__":{guarded}')
    assert main(["plan", "lab.py:build", "--global-batch", "8", "--gpus", "t4"]) == 0
    assert "chosen   single" in capsys.readouterr().out


def test_after_a_look_everything_may_train_again(lab, tmp_path):
    (lab / "lab.py").write_text(BUILD)
    find_build("lab:build")()
    with Run(global_batch=4, folder=tmp_path / "run") as run:
        assert run.size == 1

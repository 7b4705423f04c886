"""Teachers whose layers stream: what happens where a layer cannot be brought."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from samestep import Run
from samestep.errors import TeacherError


def deep():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


@pytest.mark.parametrize("placement", ["offload", "disk"])
def test_a_teacher_whose_files_were_away_for_a_while_goes_on_when_they_are_back(tmp_path, placement):
    module, path, away = deep(), tmp_path / "teacher.safetensors", tmp_path / "away"
    save_file(module.state_dict(), path)
    rows = torch.randn(2, 4)
    with Run(global_batch=2, folder=tmp_path / "run") as run:
        teacher = run.teacher(deep, weights=path, placement=placement)
        path.rename(away)
        for _ in range(2):
            with pytest.raises((TeacherError, FileNotFoundError)):
                teacher(rows)
        away.rename(path)
        for _ in range(2):
            assert torch.equal(teacher(rows), module(rows))

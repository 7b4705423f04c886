"""A student made of its teacher's folder: layers from all over its depth, or narrower from nothing."""

import json
import re
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from samestep.assets import minilm
from samestep.errors import TeacherError
from samestep.teacher import Student, pooled

QUERY = "encoder.layer.{}.attention.self.query.weight"


def test_a_narrow_student_is_widened_and_begins_from_nothing():
    torch.manual_seed(0)
    student = Student(minilm(), learns="features", layers=1, width=64)
    tokens = torch.randint(1000, (3, 5))
    assert all(parameter.requires_grad for parameter in student.parameters())
    assert student(tokens, torch.ones_like(tokens)).shape == (3, student.teacher_width) == (3, 384)


def test_a_wide_student_begins_with_layers_of_its_teacher_also_out_of_shards(tmp_path):
    for path in minilm().glob("*.json"):
        shutil.copy(path, tmp_path)
    state = load_file(minilm() / "model.safetensors")
    shards = {f"model-{at}.safetensors": dict(list(state.items())[at::2]) for at in range(2)}
    for name, part in shards.items():
        save_file(part, tmp_path / name, {"format": "pt"})
    listed = {"weight_map": {key: name for name, part in shards.items() for key in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(listed))
    students = [Student(folder, learns="features", layers=2) for folder in (minilm(), tmp_path)]
    with safe_open(minilm() / "model.safetensors", "pt") as weights:
        for mine, theirs in ((0, 0), (1, 5)):
            for student in students:
                wanted = weights.get_tensor(QUERY.format(theirs))
                assert torch.equal(student.body.get_parameter(QUERY.format(mine)), wanted)
    assert not students[0].body.get_input_embeddings().weight.requires_grad
    assert [kind.__name__ for kind in students[0].blocks()] == ["BertLayer"]


def test_a_vector_is_the_mean_over_what_is_there():
    hidden = torch.tensor([[[2.0], [4.0], [9.0]]]).half()
    found = pooled(hidden, torch.tensor([[1, 1, 0]]))
    assert (found.tolist(), found.dtype) == ([[3.0]], torch.float32)


MISUSES = {
    "a student does not know learns='words': use one of features, logits": {"learns": "words", "layers": 1},
    "a student of 7 layer(s) of a teacher that has 6: give layers from 1 to 6": {"learns": "features", "layers": 7},
    "a student of width 100: give a multiple of 32, or None for the teacher's own": (
        {"learns": "features", "layers": 1, "width": 100}
    ),
}


@pytest.mark.parametrize("text", MISUSES)
def test_sizes_that_make_no_student_are_refused(text):
    with pytest.raises(TeacherError, match=re.escape(text)):
        Student(minilm(), **MISUSES[text])


def test_a_file_without_what_a_student_begins_with_is_told(tmp_path):
    for path in minilm().glob("*.json"):
        shutil.copy(path, tmp_path)
    save_file({"other.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    text = "holds no embeddings.word_embeddings.weight, with which a student of BertModel would begin: give width="
    with pytest.raises(TeacherError, match=re.escape(text)):
        Student(tmp_path, learns="features", layers=1)

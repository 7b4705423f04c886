"""Outputs that were kept belong to the code that computed them: other code over the same weights is another teacher."""

import json
import linecache
import sys
import types

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from samestep import Run
from samestep.errors import TeacherError

NET = """
from torch import nn

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x) * 2

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def changed(self, x):
        return x / 4

class Net(Plain):
    def forward(self, x):
        return self.changed(self.inner(x)) + 1

def build():
    return Net()
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # transformers makes torch set it, for good


def opened(build, weights=None):
    with Run(global_batch=2, folder="run") as run:
        run.teacher(build, weights=weights, placement="cached", cache="kept")


@pytest.fixture
def open_net(tmp_path, monkeypatch):
    save_file({"inner.linear.weight": torch.eye(3), "inner.linear.bias": torch.zeros(3)}, "net.safetensors")

    def open_it(text):
        path, script = tmp_path / "script.py", types.ModuleType("script_of_a_user")
        path.write_text(text)
        linecache.checkcache(str(path))
        script.__file__ = str(path)
        exec(compile(text, path, "exec"), script.__dict__)
        monkeypatch.setitem(sys.modules, script.__name__, script)  # where the source of a class is looked for
        opened(script.build, "net.safetensors")

    return open_it


@pytest.mark.parametrize("change", [("+ 1", "- 1"), ("* 2", "* 3"), ("/ 4", "/ 5")])
def test_a_module_whose_code_has_changed_over_the_same_weights_is_another_teacher(open_net, change):
    for _ in range(2):
        open_net(NET)
    told = r"another teacher: its code is \w{12}\.\.\. and this one's is \w{12}\.\.\.; give another folder with"
    with pytest.raises(TeacherError, match=told):
        open_net(NET.replace(*change))


def test_a_class_of_another_name_is_another_teacher(open_net):
    open_net(NET)
    with pytest.raises(TeacherError, match="another teacher: its module is Net and this one's is Other; give another"):
        open_net(NET.replace("Net", "Other"))


def test_code_around_the_module_is_no_part_of_it(open_net):
    open_net(NET)
    open_net("# a note" + NET + "LEARNING_RATE = 1e-3\n")


def test_another_layer_of_torch_in_the_same_place_is_another_teacher():
    def smooth():
        return nn.Sequential(nn.Linear(3, 3), nn.GELU())

    def sharp():
        return nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    save_file(smooth().state_dict(), "net.safetensors")
    for _ in range(2):
        opened(smooth, "net.safetensors")
    with pytest.raises(TeacherError, match="keeps outputs of another teacher: its code is"):
        opened(sharp, "net.safetensors")


def test_a_class_without_a_source_is_known_by_its_name():
    made = type("Typed", (nn.Linear,), {})
    save_file(made(3, 3).state_dict(), "net.safetensors")
    for _ in range(2):
        opened(lambda: made(3, 3), "net.safetensors")
    with pytest.raises(TeacherError, match="its module is Typed and this one's is Linear"):
        opened(lambda: nn.Linear(3, 3), "net.safetensors")


def test_a_folder_is_known_by_its_configuration_however_it_is_laid_out(tmp_path):
    folder = tmp_path / "folder"
    with torch.random.fork_rng():
        GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, n_positions=8)).save_pretrained(folder)
    opened(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    opened(folder)
    (folder / "config.json").write_text(json.dumps(config | {"activation_function": "relu"}))
    with pytest.raises(TeacherError, match=r"keeps outputs of another teacher: its config\.json is"):
        opened(folder)

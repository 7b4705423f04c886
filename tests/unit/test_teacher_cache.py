"""The cache of a teacher's outputs: digests of inputs, files that cannot be written, and the key of the teacher."""

import json
import linecache
import resource
import signal
import sys
import types
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from samestep import Run
from samestep.errors import TeacherError
from samestep.teacher.output_cache import RowReader, RowWriter, join_rows, row_digests

INPUTS = torch.randint(0, 5, (6, 7), generator=torch.Generator().manual_seed(0))


def digests(*args, **kwargs):
    return row_digests(args, kwargs, len(INPUTS))


def test_a_digest_does_not_depend_on_the_position_of_its_row():
    order = torch.tensor([5, 4, 3, 2, 1, 0])
    assert torch.equal(digests(INPUTS[order]), digests(INPUTS)[order])
    assert torch.equal(row_digests((INPUTS[2:3],), {}, 1), digests(INPUTS)[2:3])


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32, torch.bfloat16, torch.float64])
def test_one_element_changes_only_the_digest_of_its_row(dtype):
    other = INPUTS.clone()
    other[2, 3] += 1
    changed = (digests(INPUTS.to(dtype)) != digests(other.to(dtype))).all(dim=1)
    assert changed.tolist() == [False, False, True, False, False, False]


def test_the_order_of_elements_changes_the_digest():
    assert (digests(INPUTS + torch.arange(7)) != digests((INPUTS + torch.arange(7)).flip(1))).any(dim=1).all()


def test_dtype_shape_and_name_change_the_digest():
    seen = [
        digests(INPUTS),
        digests(INPUTS.view(torch.float64)),
        digests(INPUTS[:, :, None]),
        digests(tokens=INPUTS),
        digests(INPUTS, INPUTS),
        digests([INPUTS]),
    ]
    assert len({tuple(digest.flatten().tolist()) for digest in seen}) == len(seen)


def test_inputs_without_rows_change_the_digest_of_every_row():
    mask = torch.ones(3, 3)
    seen = [digests(INPUTS), digests(INPUTS, 1), digests(INPUTS, 2), digests(INPUTS, mask), digests(INPUTS, 0 * mask)]
    for row in range(len(INPUTS)):
        assert len({tuple(digest[row].tolist()) for digest in seen}) == len(seen)


def test_digests_of_many_rows_do_not_collide():
    many = torch.arange(50_000)[:, None].expand(-1, 3).contiguous()
    found = row_digests((many,), {}, len(many))
    assert all(len(found[:, half].unique()) == len(many) for half in range(2))


def test_rows_of_different_shapes_cannot_be_joined():
    rows = [(["tensor", None], [torch.zeros(size)]) for size in (2, 3)]
    with pytest.raises(TeacherError, match="holds outputs of different shapes for the samples of one micro-batch"):
        join_rows(rows, Path("cache"), torch.device("cpu"))


RECORD = 56


@contextmanager
def limited(size):
    """Limit the size of files: a longer write is truncated, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def add(writer, index, row):
    return writer.add("texts", 0, index, (index, index), row)


def read_rows(folder, count):
    """The rows that another process finds."""
    reader = RowReader(folder)
    reader.refresh()
    rows = [reader.read("texts", index) for index in range(count)]
    reader.close()
    return rows


def open_files(folder):
    """The files in a folder that this process has open."""
    there = []
    for number in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            there.append(number.readlink())
    return sorted(path for path in there if path.is_relative_to(folder))


def add_fails(writer, index, row):
    with pytest.raises(TeacherError, match=r"cannot write to the cache .*: .*; the rows written so far stay valid"):
        add(writer, index, row)


@pytest.fixture
def writer(tmp_path):
    writer = RowWriter(tmp_path, 0)
    yield writer
    writer.close()


def test_rows_after_a_partially_written_row_are_valid(tmp_path, writer):
    add(writer, 0, b"a" * 200)
    with limited(300):
        add_fails(writer, 1, b"b" * 200)
    for index in (1, 2):
        entry = add(writer, index, b"c" * 200)
        assert entry.start == (index - 1) * 200, "the failed write starts a new file"
    assert read_rows(tmp_path, 3) == [b"a" * 200, b"c" * 200, b"c" * 200]


def test_rows_after_a_partially_written_record_are_found(tmp_path, writer):
    add(writer, 0, b"a")
    with limited(RECORD + RECORD // 2):
        add_fails(writer, 1, b"b")
    for index in (1, 2):
        add(writer, index, b"c")
    assert read_rows(tmp_path, 3) == [b"a", b"c", b"c"]


def test_an_index_that_cannot_be_opened_leaves_no_file_open_and_can_be_written_later(tmp_path, writer):
    writer._stem.with_suffix(".index").mkdir()
    before = open_files(tmp_path)
    add_fails(writer, 0, b"a")
    assert open_files(tmp_path) == before
    (left,) = tmp_path.glob("*.index")
    left.rmdir()
    add(writer, 0, b"a")
    assert read_rows(tmp_path, 1) == [b"a"]


def test_a_folder_that_was_missing_for_a_while_can_be_written_again(tmp_path):
    folder = tmp_path / "cache"
    writer = RowWriter(folder, 0)
    add_fails(writer, 0, b"a")
    folder.mkdir()
    add(writer, 0, b"a")
    writer.close()
    assert read_rows(folder, 1) == [b"a"]


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
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # transformers makes torch set it


def open_cached(build, weights=None):
    with Run(global_batch=2, folder="run") as run:
        run.teacher(build, weights=weights, placement="cached", cache="cache")


@pytest.fixture
def open_net(tmp_path, monkeypatch):
    save_file({"inner.linear.weight": torch.eye(3), "inner.linear.bias": torch.zeros(3)}, "net.safetensors")

    def open_source(text):
        path, script = tmp_path / "script.py", types.ModuleType("user_script")
        path.write_text(text)
        linecache.checkcache(str(path))
        script.__file__ = str(path)
        exec(compile(text, path, "exec"), script.__dict__)
        monkeypatch.setitem(sys.modules, script.__name__, script)  # inspect looks there for the source of a class
        open_cached(script.build, "net.safetensors")

    return open_source


@pytest.mark.parametrize("change", [("+ 1", "- 1"), ("* 2", "* 3"), ("/ 4", "/ 5")])
def test_changed_code_with_the_same_weights_is_another_teacher(open_net, change):
    for _ in range(2):
        open_net(NET)
    message = r"another teacher: its code is \w{12}\.\.\., that of this teacher is \w{12}\.\.\.; pass another"
    with pytest.raises(TeacherError, match=message):
        open_net(NET.replace(*change))


def test_another_class_name_is_another_teacher(open_net):
    open_net(NET)
    with pytest.raises(TeacherError, match="its module is Net, that of this teacher is Other; pass another"):
        open_net(NET.replace("Net", "Other"))


def test_code_outside_of_the_module_does_not_matter(open_net):
    open_net(NET)
    open_net("# a comment" + NET + "LEARNING_RATE = 1e-3\n")


def test_another_torch_layer_is_another_teacher():
    def smooth():
        return nn.Sequential(nn.Linear(3, 3), nn.GELU())

    def sharp():
        return nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    save_file(smooth().state_dict(), "net.safetensors")
    for _ in range(2):
        open_cached(smooth, "net.safetensors")
    with pytest.raises(TeacherError, match="belongs to another teacher: its code is"):
        open_cached(sharp, "net.safetensors")


def test_a_class_without_source_is_identified_by_its_name():
    typed = type("Typed", (nn.Linear,), {})
    save_file(typed(3, 3).state_dict(), "net.safetensors")
    for _ in range(2):
        open_cached(lambda: typed(3, 3), "net.safetensors")
    with pytest.raises(TeacherError, match="its module is Typed, that of this teacher is Linear"):
        open_cached(lambda: nn.Linear(3, 3), "net.safetensors")


@pytest.mark.slow
def test_a_folder_is_identified_by_its_configuration_in_any_layout(tmp_path):
    folder = tmp_path / "folder"
    with torch.random.fork_rng():
        GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, n_positions=8)).save_pretrained(folder)
    open_cached(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    open_cached(folder)
    (folder / "config.json").write_text(json.dumps(config | {"activation_function": "relu"}))
    with pytest.raises(TeacherError, match=r"belongs to another teacher: its config\.json is"):
        open_cached(folder)

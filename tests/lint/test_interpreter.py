"""How lint follows a script: what it knows of values, which conditions surround an event, and what it survives."""

import ast
import json
import textwrap
from pathlib import Path

import pytest

from samestep.findings import Finding, Location
from samestep.lint import linter
from samestep.lint.abstract_interpreter import Interpreter
from samestep.lint.entry_points import follow
from samestep.lint.events import EVENT_FIELDS, Event, Guard, are_opposite
from samestep.lint.linter import lint
from samestep.lint.rule import Analysis, Rule
from samestep.lint.source_files import read_file
from samestep.lint.values import LoaderValue, ModelValue, OptimizerValue, SamplerValue, options_of

HEADER = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
"""
CORPUS = Path(__file__).resolve().parents[1] / "corpus"


def follow_files(folder: Path, script: str, **modules: str) -> Interpreter:
    """Follow a script next to other files; a name with __ is in a package: pkg__tool is pkg/tool.py."""
    for name, text in {"script": script, **modules}.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent != folder:
            (path.parent / "__init__.py").touch()
        path.write_text(textwrap.dedent(text))
    files = [read_file(path) for path in sorted(folder.rglob("*.py"))]
    own = next(file for file in files if file.path.name == "script.py")
    run = follow(own, {file.name: file for file in files})
    assert not run.frames
    return run


@pytest.fixture
def barriers(tmp_path):
    """The barriers of a script, after HEADER."""

    def find(script: str, **modules: str) -> list[Event]:
        run = follow_files(tmp_path, HEADER + textwrap.dedent(script), **modules)
        return [event for event in run.events if event.kind == "collective"]

    return find


def guarded(events: list[Event]) -> list[bool]:
    return [event.rank_guard is not None for event in events]


@pytest.mark.parametrize(
    "condition",
    [
        "rank == 0",
        "int(os.environ['RANK']) == 0",
        "os.environ.get('LOCAL_RANK', '0') == '0'",
        "not rank",
        "rank == 0 and flag",
        "[rank][0] == 0",
        "{'r': rank}['r'] == 0",
        "(lambda: rank)() == 0",
        "f'{rank}' == '0'",
        "any(each == 0 for each in [rank])",
        "(main := rank == 0)",
    ],
)
def test_a_condition_on_the_rank_is_recognized(barriers, condition):
    assert guarded(barriers(f"if {condition}:\n    dist.barrier()\ndist.barrier()\n")) == [True, False]


@pytest.mark.parametrize(
    "condition", ["flag", "dist.get_world_size() > 1", "len([1, 2]) == 2", "dist.is_initialized()"]
)
def test_other_conditions_are_the_same_on_all_ranks(barriers, condition):
    assert guarded(barriers(f"if {condition}:\n    dist.barrier()\n")) == [False]


def test_the_number_of_ranks_is_taken_to_be_more_than_one(barriers):
    script = """
        if dist.get_world_size() == 1 or not dist.is_initialized():
            dist.barrier()
        world = dist.get_world_size()
        several = world > 1
        if several and rank == 0:
            dist.all_reduce(x)
    """
    assert [event.name for event in barriers(script)] == ["all_reduce"]


def test_the_rank_is_followed_through_arguments_and_returns(barriers):
    script = """
        def is_first(number, first=0):
            return number == first
        def run(chosen, *, enabled):
            if chosen and enabled:
                dist.barrier()
        run(is_first(rank), enabled=True)
        run(True, enabled=True)
    """
    assert guarded(barriers(script)) == [True, False]


def test_a_return_under_a_condition_on_the_rank_differs_between_ranks(barriers):
    script = """
        def choose():
            if rank == 0:
                return "first"
            return "other"
        if choose() == "first":
            dist.barrier()
    """
    assert guarded(barriers(script)) == [True]


def test_attributes_keep_what_they_were_assigned(barriers):
    script = """
        class Context:
            def __init__(self, number):
                self.number = number
            @property
            def is_first(self):
                return self.number == 0
        context = Context(rank)
        if context.is_first:
            dist.barrier()
        if Context(3).is_first:
            dist.barrier()
    """
    assert guarded(barriers(script)) == [True]


def test_names_of_unknown_values_say_what_they_are(barriers):
    script = """
        import argparse
        args = argparse.ArgumentParser().parse_args()
        if args.local_rank == 0:
            dist.barrier()
        if args.world_size > 1:
            dist.barrier()
        else:
            dist.all_reduce(x)
        def work(rank, epochs):
            if rank == 0:
                dist.barrier()
            if epochs:
                dist.barrier()
    """
    assert guarded(barriers(script)) == [True, False, True, False]


def test_dataclasses_keep_their_arguments(barriers):
    script = """
        from dataclasses import dataclass
        @dataclass
        class Config:
            number: int
            name: str = "a"
        if Config(rank).number == 0:
            dist.barrier()
        if Config(number=1).name == "a":
            dist.barrier()
    """
    assert guarded(barriers(script)) == [True, False]


def test_what_follows_an_early_return_is_under_the_opposite_condition(barriers):
    script = """
        def save():
            dist.barrier()
            if rank != 0:
                return
            dist.barrier()
        save()
        dist.barrier()
    """
    events = barriers(script)
    assert guarded(events) == [False, True, False]
    guard = events[1].rank_guard
    assert guard is not None
    assert guard.is_negated
    assert guard.text == "rank != 0"


@pytest.mark.parametrize(
    "script",
    [
        "def f():\n    with open('x'):\n        if rank:\n            return\n    dist.barrier()\nf()",
        "def f():\n    if flag:\n        if rank:\n            return\n    dist.barrier()\nf()",
        "def f():\n    for x in y:\n        if rank:\n            return\n    dist.barrier()\nf()",
        "import sys\nif rank:\n    sys.exit()\ndist.barrier()",
        "for x in y:\n    if rank:\n        continue\n    dist.barrier()",
    ],
)
def test_a_return_inside_of_other_blocks_holds_for_what_follows(barriers, script):
    assert guarded(barriers(script)) == [True]


def test_a_break_on_some_ranks_does_not_hold_after_the_loop(barriers):
    script = "for x in y:\n    if rank:\n        break\n    dist.barrier()\ndist.barrier()"
    assert guarded(barriers(script)) == [True, False]


def test_decorators_of_packages_and_of_the_project_add_conditions(barriers):
    script = """
        from functools import wraps
        from lightning.pytorch.utilities import rank_zero_only
        def first_only(function):
            @wraps(function)
            def wrapper(*args, **kwargs):
                if rank == 0:
                    return function(*args, **kwargs)
                return None
            return wrapper
        @rank_zero_only
        def one():
            dist.barrier()
        @first_only
        def two(name, size=1):
            dist.barrier()
        def three():
            dist.barrier()
        one(); two("x", size=2); three()
    """
    assert guarded(barriers(script)) == [True, True, False]


def test_methods_are_found_in_base_classes_and_super(barriers):
    script = """
        class Base:
            def __init__(self, number):
                self.number = number
            def save(self):
                if self.number == 0:
                    dist.barrier()
        class Own(Base):
            def __init__(self):
                super().__init__(rank)
            def save(self):
                super().save()
        Own().save()
    """
    assert guarded(barriers(script)) == [True]


def test_both_branches_decide_what_an_attribute_may_be(tmp_path):
    script = """
        from torch.utils.data import DataLoader, DistributedSampler
        class Trainer:
            def __init__(self, data, flag):
                if flag:
                    self.sampler = DistributedSampler(data)
                else:
                    self.sampler = None
                self.loader = DataLoader(data, sampler=self.sampler)
    """
    run = follow_files(tmp_path, script)
    loader: LoaderValue = next(event.loader for event in run.events if event.kind == "loader")
    assert sum(isinstance(option, SamplerValue) for option in options_of(loader.sampler)) == 1
    assert len(options_of(loader.sampler)) == 2


def test_functions_of_local_modules_and_packages_are_followed(barriers):
    modules = {
        "tools": "import os\ndef first():\n    return int(os.environ['RANK']) == 0\n",
        "pkg__sync": "import torch.distributed as dist\nfrom .deep import wait\ndef both():\n    wait()\n",
        "pkg__deep": "import torch.distributed as dist\ndef wait():\n    dist.barrier()\n",
    }
    script = """
        import tools
        from tools import first as is_first
        from pkg import sync
        from pkg.deep import *
        if is_first():
            sync.both()
        if tools.first():
            wait()
        sync.both()
    """
    events = barriers(script, **modules)
    assert guarded(events) == [True, True, False]
    assert [Path(event.location.file).name for event in events] == ["deep.py"] * 3
    assert [frame.line for frame in events[0].frames] == [13, 4]


def test_modules_that_import_each_other_are_followed(barriers):
    modules = {"one": "import two\ndef f():\n    two.g()\n", "two": "import one, torch\ndef g():\n    one.f()\n"}
    assert barriers("import one\none.f()\ndist.barrier()\n", **modules)


def test_except_with_and_match_are_followed(barriers):
    script = """
        try:
            dist.barrier()
        except ValueError as error:
            dist.barrier()
        else:
            dist.barrier()
        finally:
            dist.barrier()
        with torch.no_grad(), open("x") as file:
            dist.barrier()
        match rank:
            case 0:
                dist.barrier()
            case other if other > 1:
                pass
    """
    events = barriers(script)
    assert guarded(events) == [False] * 5 + [True]
    assert [guard.kind for guard in events[1].guards] == ["except"]
    assert not events[4].is_grad
    assert events[4].contexts == ("no_grad",)


def test_loops_know_the_loader_that_they_read(tmp_path):
    script = """
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader
        from tqdm import tqdm
        def main(data):
            loader = DataLoader(data, batch_size=4)
            model = DDP(nn.Linear(2, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for epoch in range(3):
                for step, (x, y) in enumerate(tqdm(loader)):
                    loss = nn.functional.mse_loss(model(x), y)
                    loss.backward()
                    optimizer.step()
        if __name__ == "__main__":
            main(1)
    """
    run = follow_files(tmp_path, HEADER + textwrap.dedent(script))
    analysis = Analysis(read_file(tmp_path / "script.py"), [], run.events)
    [(event, loader, role)] = analysis.loader_loops
    assert (role, loader.options["batch_size"].constant) == ("train", 4)
    kinds = [each.kind for each in run.events if event.loop in each.loops]
    assert kinds == ["loop", "model_call", "backward", "optimizer_step"]
    optimizer = analysis.of("optimizer_step")[0].optimizer
    assert isinstance(optimizer, OptimizerValue)
    assert isinstance(analysis.of("model_call")[0].model, ModelValue)
    assert analysis.is_distributed


def test_each_rank_reads_its_own_data_from_a_sharded_loader(tmp_path):
    script = """
        from torch.utils.data import DataLoader, DistributedSampler
        for batch in DataLoader(data, sampler=DistributedSampler(data)):
            if batch.sum() > 3:
                dist.barrier()
    """
    [event] = [e for e in follow_files(tmp_path, HEADER + textwrap.dedent(script)).events if e.kind == "collective"]
    assert event.rank_guard is None
    assert event.differing_guard is not None
    assert event.differing_guard.taints[0].kind == "data"


def test_recursion_ends(barriers):
    script = """
        def down(n):
            dist.barrier()
            return down(n - 1) if n else up(n)
        def up(n):
            return down(n)
        down(3)
        items = []
        items.append(items)
        for item in items + items:
            dist.barrier()
    """
    assert len(barriers(script)) == 3  # down(), the loop, and up(), which nothing calls


def test_hooks_of_lightning_are_called(tmp_path):
    script = """
        import lightning as L
        class Model(L.LightningModule):
            def training_step(self, batch, index):
                self.log("loss", batch.mean())
            def prepare_data(self):
                self.all_gather(1)
        trainer = L.Trainer(devices=2)
        trainer.fit(Model())
    """
    run = follow_files(tmp_path, script)
    log = next(event for event in run.events if event.kind == "log")
    assert log.contexts == ("hook:training_step",)
    assert log.name.constant == "loss"
    assert next(event for event in run.events if event.kind == "collective").rank_guard is not None


def test_generators_and_context_managers_give_what_they_yield(barriers):
    script = """
        from contextlib import contextmanager
        def numbers():
            yield rank
        @contextmanager
        def numbered():
            yield rank
        for number in numbers():
            if number == 0:
                dist.barrier()
        with numbered() as number:
            if number == 0:
                dist.barrier()
    """
    assert guarded(barriers(script)) == [True, True]


def test_a_function_may_assign_global_names(barriers):
    script = """
        first = False
        def setup():
            global first
            first = rank == 0
        setup()
        if first:
            dist.barrier()
    """
    assert guarded(barriers(script)) == [True]


def test_a_notebook_is_followed(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "!pip install torch\n", *HEADER.splitlines(True)]},
        {"cell_type": "code", "source": "if rank == 0:\n    dist.barrier()"},
    ]
    path = tmp_path / "notebook.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    result = lint([path])
    assert [finding.code for finding in result.findings] == ["SS301"]
    location = result.findings[0].location
    assert location is not None
    assert (location.cell, location.cell_line, location.column) == (3, 2, 5)
    assert read_file(path).cell_of(location.line) == (3, 2)


def test_a_finding_has_line_and_column(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(HEADER + "if rank == 0: dist.barrier()\n")
    [finding] = lint([path]).findings
    assert finding.location is not None
    assert (finding.location.line, finding.location.column) == (7, 15)
    assert str(finding.location).endswith("script.py:7:15")
    assert finding.to_json()["location"]["column"] == 15


def test_a_location_without_a_column_is_shown_as_before():
    finding = Finding("SS1", "name", "error", Location("gone.py", 3), "", "", "")
    assert str(finding.location) == "gone.py:3"
    assert "column" not in finding.to_json()["location"]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("rank == 0", "rank != 0", True),
        ("rank == 0", "rank > 0", True),
        ("main", "not main", True),
        ("rank == 0", "rank == 0", False),
        ("rank == 0", "rank == 1", False),
    ],
)
def test_opposite_conditions_are_recognized(one, other, expected):
    place = Location("a.py", 1)
    guards = [Guard(place, node=ast.Pass(), condition=ast.parse(text, mode="eval").body) for text in (one, other)]
    assert are_opposite(*guards) is expected


NASTY = [
    "x = " + "+".join(["a"] * 3000),
    "x = " + "(" * 90 + ")" * 90,
    "x = " + "[" * 150 + "]" * 150,
    "f" + "(1)" * 2000,
    "a" + ".b" * 2000,
    "if a:\n  x = 1\n" * 500 + "\n",
    "\n".join(f"{' ' * n}if a{n}:" for n in range(90)) + "\n" + " " * 90 + "pass",
    "def f(a, /, b, *c, d=1, **e): return f(*a, **e)\nf(1, *2, **3)",
    "class A(A): x = A\nA.x.x.x()",
    "from . import *\nfrom .... import x\nimport a.b.c as d\nd.e()",
    "x: int\nx += 1\ndel x, y[0]\n(a, *b), c.d, e[f] = 1\nnonlocal_ = lambda *a, **k: (yield)",
    "def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = 2\n    g()\n    async def h(): await h()\n",
    "try:\n    pass\nexcept* ValueError:\n    pass\nmatch x:\n    case {'a': 1, **rest} | [1, *rest]:\n        pass\n",
    "x = 10 ** 9 ** 9\ny = 1 << 99999999\nz = 'a' * 10 ** 9\nw = -'a'\nv = 1 / 0",
    "@1\ndef f(): pass\n@f\nclass B: pass\nx = {**a, 'b': [*c]}[d:e, ...]\nprint(f'{x!r:>{y}}')",
    "\n".join(f"def f{n}():\n    f{n + 1}(); f{n + 1}(); f{n + 1}()" for n in range(60)) + "\nf0()",
    "\n".join(f"x = x if a{n} else {n}" for n in range(300)),
    "def f(x):\n    return f\nf(f)(f)(f)\nx = y = []\nx.append(x)\nx += x\nx.extend(x)\n",
    "super().x\nclass A:\n    super().__init__()\n    def f(self): super(A, self).f()\nA().f()",
]


@pytest.mark.parametrize("number", range(len(NASTY)))
def test_no_valid_file_ends_lint_or_takes_long(tmp_path, number):
    path = tmp_path / "script.py"
    path.write_text(HEADER + NASTY[number] + "\n")
    assert lint([path]).problems == {}


def test_a_file_that_cannot_be_read_is_a_problem_of_this_file(tmp_path):
    (tmp_path / "broken.py").write_text("import torch.distributed as dist\ndist.init_process_group(")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00torch")
    (tmp_path / "good.py").write_text(HEADER + "if rank == 0:\n    dist.barrier()\n")
    result = lint([tmp_path])
    assert {Path(name).name for name in result.problems} == {"broken.py", "binary.py"}
    assert len(result.findings) == 1


def test_an_exception_of_a_rule_is_a_problem_of_this_file(tmp_path):
    def find(analysis: Analysis):
        yield from ()
        raise KeyError(analysis.file.path.name)

    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text(HEADER)
    result = lint([tmp_path], [Rule("SS999", "fails", "error", "", "", find)])
    assert next(iter(result.problems.values())).startswith("lint failed: KeyError: 'one.py'")
    assert len(result.problems) == 2


def test_the_number_of_processes_does_not_change_the_result():
    folder = CORPUS / "new"
    assert lint([folder], workers=1) == lint([folder], workers=3)


def test_files_without_anything_distributed_are_not_followed(tmp_path):
    texts = {"plain": "import torch", "start": HEADER, "uses": "from start import rank", "other": "import json"}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    files = [read_file(path) for path in sorted(tmp_path.glob("*.py"))]
    assert [file.path.stem for file in linter.scripts_of(files, files)] == ["start", "uses"]


def test_every_event_has_the_fields_of_its_kind():
    for path in sorted(CORPUS.glob("new/*/*.py"))[::4]:
        file = read_file(path)
        for event in follow(file, {file.name: file}).events:
            assert event.data.keys() == {*EVENT_FIELDS[event.kind], "call"}


def test_a_counter_in_a_loop_is_not_its_first_value(tmp_path):
    run = follow_files(
        tmp_path,
        HEADER + "step = 0\nfor _ in range(9):\n    step += 1\n    if step % 4 == 0:\n        dist.barrier()\n",
    )
    assert [event.kind for event in run.events if event.kind == "collective"] == ["collective"]


def test_a_constant_is_looked_up_in_a_container_of_constants(tmp_path):
    script = "def wait(rank=-1):\n    if rank not in [-1, 0]:\n        dist.barrier()\n\n\nwait(-1)\n"
    run = follow_files(tmp_path, HEADER + script)
    assert [event for event in run.events if event.kind == "collective"] == []


def test_something_that_only_some_ranks_have_is_not_the_rank(tmp_path):
    script = "writer = open if rank == 0 else None\nif writer is not None:\n    dist.barrier()\n"
    run = follow_files(tmp_path, HEADER + script)
    (event,) = [event for event in run.events if event.kind == "collective"]
    assert event.rank_guard is not None


def test_a_framework_next_to_a_script_is_not_followed(tmp_path):
    """Its sources would take all the steps of the script, and what it does is known."""
    package = tmp_path / "accelerate"
    package.mkdir()
    (package / "__init__.py").write_text("class Accelerator:\n    pass\n")
    script = tmp_path / "train.py"
    script.write_text(
        "from accelerate import Accelerator\n"
        "accelerator = Accelerator()\n"
        "if accelerator.is_main_process:\n"
        "    accelerator.wait_for_everyone()\n"
    )
    found = [(each.code, each.location.line) for each in lint([tmp_path]).findings if each.location is not None]
    assert ("SS301", 4) in found

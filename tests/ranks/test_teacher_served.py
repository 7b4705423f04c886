"""A teacher that is served: each rank its own outputs, whoever asks how often, and a word where the server dies."""

import contextlib
import gc
import os
import signal
import threading
import time

import psutil
import pytest
import torch

from samestep import Run
from samestep.nn import TopK, distill_loss, top_k
from samestep.teacher.frozen_model import FrozenModel
from samestep.teacher.served import serving_ranks
from samestep.teacher.weight_files import open_weights
from tests.ranks.teachers import CLASSES, Teacher, plain, tokens, train_with, write_teacher


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "teacher.safetensors"
    write_teacher(path)
    return path


@contextlib.contextmanager
def open_served(path, build=Teacher, timeout=30, **options):
    """A run with a served teacher."""
    with Run(global_batch=4, start_timeout=timeout, step_timeout=timeout) as run:
        yield run, run.teacher(build, weights=path, placement="served", **options)


def outputs(path, dtype, servers):
    """Whether outputs have the plain module's bits, for ranks that ask differently often."""
    with open_served(path, dtype=dtype, servers=servers) as (run, teacher):
        module = FrozenModel(Teacher, open_weights(path)).load(run.device, dtype)
        mine = tokens()[run.rank :: run.size]
        alike = []
        for at in range(2 + run.rank):  # no rank waits for another's question
            answer = teacher(tokens=mine[: at + 1])
            with torch.no_grad():
                alike.append(torch.equal(answer, module(mine[: at + 1])) and not answer.requires_grad)
        return alike, teacher.describe(), [t.name for t in threading.enumerate() if "serve" in t.name]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("size", "servers"), [(1, None), (2, None), (3, 2)])
def test_each_rank_gets_the_plain_modules_outputs_for_its_own_inputs(ranks, weights, size, servers, dtype):
    answers = ranks(size, outputs, weights, dtype, servers)
    for rank, (alike, told, serving) in enumerate(answers):
        assert alike == [True] * (2 + rank)
        assert bool(serving) == (rank in serving_ranks(size, servers or 1))
        assert "this rank asks rank " in told


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_student_learns_the_same_as_from_a_plain_copy(ranks, weights, size, ahead):
    (wanted,) = ranks(1, train_with, weights, {"placement": "gpu"})
    for learnt in ranks(size, train_served, weights, ahead):
        for name, value in wanted.items():
            torch.testing.assert_close(learnt[name], value, atol=1e-6, rtol=0)


def train_served(path, ahead):
    return train_with(path, {"placement": "served"}, ahead=ahead)


@pytest.mark.slow
def test_a_process_of_its_own_serves_all_ranks_and_ends_with_them(ranks, weights):
    answers = ranks(2, served_by_process, weights, timeout=90)
    for alike, told, serving, _ in answers:
        assert alike
        assert "on each of 1 process(es), this rank asks process " in told
        assert not serving, "no rank holds the teacher"
    pid = answers[1][3]
    assert isinstance(pid, int)
    assert not psutil.pid_exists(pid)


def served_by_process(path):
    with open_served(path, inner="process", timeout=80) as (_, teacher):
        alike = torch.equal(teacher(tokens()), plain(path)(tokens()))
        serving = [t.name for t in threading.enumerate() if "serve" in t.name]
        return alike, teacher.describe(), serving, getattr(teacher._placed._server, "pid", None)


def served_folder(folder):
    with Run(global_batch=4, start_timeout=80, step_timeout=80) as run:
        teacher = run.teacher(folder, placement="served", inner="process")
        out = teacher(input_ids=tokens(2))
        return type(out).__name__, out.loss, torch.equal(out[0], out.logits), out.logits


@pytest.mark.slow
def test_a_process_of_its_own_serves_a_hugging_face_folder_in_its_own_classes(ranks, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="pip install 'samestep[teacher]'")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # transformers makes torch set it, for good
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=CLASSES, n_positions=8)
    with torch.random.fork_rng():
        made = transformers.GPT2LMHeadModel(config).eval()
    made.save_pretrained(tmp_path / "folder")
    with torch.no_grad():
        wanted = made(input_ids=tokens(2)).logits
    for kind, loss, first, logits in ranks(2, served_folder, tmp_path / "folder", timeout=90):
        assert kind == "CausalLMOutputWithCrossAttentions"
        assert loss is None
        assert first
        assert torch.equal(logits, wanted)


def compress(path):
    with open_served(path, top_k=3, temperature=2.0) as (_, teacher):
        few, wanted = teacher(tokens(4)), top_k(plain(path)(tokens(4)), 3, 2.0)
        alike = [torch.equal(ours, theirs) for ours, theirs in zip(few[:3], wanted[:3], strict=True)]
        return few, alike, distill_loss(torch.zeros(4, 6, CLASSES), few, temperature=2.0).shape


def test_top_k_logits_travel_in_the_place_of_all(ranks, weights):
    for few, alike, shape in ranks(2, compress, weights):
        assert isinstance(few, TopK)
        assert few.temperature == 2.0
        assert alike == [True] * 3
        assert shape == (4, 6)


class Named(torch.nn.Module):
    """A teacher with outputs by name, and a way to fail."""

    def __init__(self):
        super().__init__()
        self.body = Teacher()

    def forward(self, tokens, fail=False, strange=False):
        if fail:
            raise ValueError("no such word")
        logits = self.body(tokens)
        return {"logits": logits, "hidden": (logits.sum(-1), [1, "a", None])} if not strange else {"cache": object()}


def write_named(path):
    from safetensors.torch import load_file, save_file

    write_teacher(path)
    save_file({f"body.{name}": value for name, value in load_file(path).items()}, path)


def named(path):
    with open_served(path, Named) as (_, teacher):
        out = teacher(tokens=tokens(2))
        told = []
        for wrong in ({"fail": True}, {"strange": True}, {"tokens": object()}):
            try:
                teacher(**{"tokens": tokens(2), **wrong})
            except Exception as error:  # noqa: BLE001
                told.append(f"{type(error).__name__}: {error}")
        again = teacher(tokens=tokens(2))
        return out, told, torch.equal(out["logits"], again["logits"])


def test_outputs_of_any_form_come_back_and_a_failure_is_the_askers(ranks, tmp_path):
    path = tmp_path / "named.safetensors"
    write_named(path)
    for out, (fails, strange, unsendable), again in ranks(2, named, path):
        assert list(out) == ["logits", "hidden"]
        assert out["hidden"][1] == [1, "a", None]
        assert fails.startswith("TeacherError: the teacher failed on its server: ValueError: no such word\nTraceback")
        assert "the teacher's output['cache'] is a object, which can be neither sent nor kept" in strange
        assert "TeacherError: the teacher's input[1]['tokens'] is a object, which can be neither" in unsendable
        assert again, "the server goes on"


def several_in_flight(path):
    with open_served(path) as (_, teacher):
        parts = [tokens()[at : at + 4] for at in range(5)]
        asked = [teacher.ahead(part) for part in parts]
        found = [pending.result() for pending in reversed(asked)][::-1]
        module = plain(path)
        return all(torch.equal(answer, module(part)) for answer, part in zip(found, parts, strict=True))


def test_several_questions_may_be_under_way_and_be_read_in_any_order(ranks, weights):
    assert ranks(2, several_in_flight, weights) == [True, True]


def server_dies(path, how):
    with open_served(path) as (run, teacher):
        teacher(tokens(2))
        run.barrier()
        if run.rank == 2:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise MemoryError("no room on rank 2")
        time.sleep(0.5)
        for _ in range(100):
            teacher(tokens(2))
            time.sleep(0.05)


@pytest.mark.parametrize("how", ["killed", "failed"])
def test_a_serving_rank_that_dies_is_told_to_all_who_ask(ranks, weights, how):
    first, second, third = ranks.errors(3, server_dies, weights, how)
    for rank, text in enumerate((first, second)):
        assert f"TeacherError: rank {rank} asked the teacher of rank 2, which is gone (" in text
        assert "it died or was killed, often for want of memory; look for its last lines" in text
        if how == "failed":
            assert "rank 2 failed: MemoryError: no room on rank 2" in text
    assert ("SIGKILL" if how == "killed" else "no room on rank 2") in third


def process_dies(path):
    with open_served(path, inner="process", timeout=80) as (run, teacher):
        teacher(tokens(2))
        run.barrier()
        if isinstance(pid := getattr(teacher._placed._server, "pid", None), int):
            os.kill(pid, signal.SIGKILL)
        run.barrier()
        time.sleep(0.5)
        teacher(tokens(2))


@pytest.mark.slow
def test_a_serving_process_that_dies_is_told_with_its_exit_code(ranks, weights):
    first, second = ranks.errors(2, process_dies, weights, timeout=90)
    assert "TeacherError: rank 0 asked the teacher of process " in first
    assert ", which rank 1 started, which is gone (" in first
    assert "TeacherError: rank 1 asked the teacher of process " in second
    assert "ended with exit code -9" in second


def one_server_fails(path):
    from samestep.teacher import served

    load = served.load
    with Run(global_batch=4, start_timeout=30, step_timeout=30) as run:
        if run.rank == 1:
            served.load = no_room
        try:
            run.teacher(Teacher, weights=path, placement="served", servers=2)
        except Exception as error:  # noqa: BLE001
            return str(error), [t.name for t in threading.enumerate() if t.name.startswith("samestep-teacher")]
        finally:
            served.load = load


def no_room(*_):
    raise MemoryError("no room on rank 1")


def test_a_server_ends_where_another_could_not_be_started(ranks, weights):
    for text, threads in ranks(2, one_server_fails, weights):
        assert "no room on rank 1" in text
        assert threads == []


WAKE = threading.Event()


class Slow(Teacher):
    """A forward pass that takes longer than anybody waits."""

    def forward(self, tokens):
        WAKE.wait(30)
        return super().forward(tokens)


def too_slow(path):
    WAKE.clear()
    with open_served(path, Slow, timeout=4) as (run, teacher):
        try:
            teacher(tokens(2))
        finally:
            time.sleep(4 * run.rank)  # the rank that serves must not leave before the other has lost its patience too
            WAKE.set()


@pytest.mark.slow
def test_a_server_that_does_not_answer_in_time_is_named(ranks, weights):
    for rank, text in enumerate(ranks.errors(2, too_slow, weights)):
        assert f"TeacherError: rank {rank} waits for the teacher of rank 1 since 4 s: if a forward pass takes" in text


def ask_ahead(path):
    """Whether asking came back before anything was computed, and whether the answer was right in the end."""
    WAKE.clear()
    with open_served(path, Slow) as (_, teacher):
        try:
            pending = teacher.ahead(tokens(2))
            before = pending._answer.done()
        finally:
            WAKE.set()
        return before, torch.equal(pending.result(), plain(path)(tokens(2)))


def test_asking_ahead_does_not_wait_for_the_answer(ranks, weights):
    for size in (1, 2):
        assert ranks(size, ask_ahead, weights) == [(False, True)] * size


def parameters_alive():
    gc.collect()
    alive = [each for each in gc.get_objects() if isinstance(each, torch.nn.Parameter) and not each.is_meta]
    return sum(each.nbytes for each in alive)


def held(path):
    """Bytes of parameters that a served teacher brings to this rank, and its bytes as a whole."""
    before = parameters_alive()
    with open_served(path) as (_, teacher):
        teacher(tokens(2))
        return parameters_alive() - before, sum(each.nbytes for each in plain(path).parameters())


def test_ranks_that_do_not_serve_hold_nothing_of_the_teacher(ranks, weights):
    (first, _), (second, whole) = ranks(2, held, weights)
    assert (first, second) == (0, whole)


def of_the_script():
    return Teacher()


of_the_script.__module__ = "__main__"
of_the_script.__qualname__ = "of_the_script"


def process_cannot_import(path):
    import __main__

    __main__.of_the_script = of_the_script
    try:
        with open_served(path, of_the_script, inner="process", timeout=80):
            pass
    finally:
        del __main__.of_the_script


@pytest.mark.slow
def test_a_process_that_cannot_import_build_says_what_to_do(ranks, weights):
    first, second = ranks.errors(2, process_cannot_import, weights, timeout=90)
    wanted = "define it in a module beside the script and import it, or let a rank serve with inner='rank'"
    assert "a process of its own cannot import build=of_the_script (" in second
    assert wanted in second
    assert "failed on rank(s) [1] and not on rank 0" in first
    assert wanted in first


def test_serving_ranks_are_spread_evenly():
    assert serving_ranks(4, 1) == [3]
    assert serving_ranks(8, 2) == [3, 7]
    assert serving_ranks(5, 2) == [1, 4]
    assert serving_ranks(3, 3) == [0, 1, 2]


def open_with(path, options):
    with open_served(path, **options):
        pass


def test_servers_that_cannot_be_are_refused(ranks, weights):
    for text in ranks.errors(2, open_with, weights, {"servers": 3}):
        assert "TeacherError: servers=3 cannot stand on 2 rank(s): give 1 to 2" in text
    for text in ranks.errors(2, open_with, weights, {"servers": 0}):
        assert "TeacherError: servers=0 is no count: give a whole number from 1 on" in text


def stranger(path):
    import socket

    with open_served(path) as (run, teacher):
        return run.rank, teacher(tokens(1)).shape, socket.gethostname()


def test_ranks_of_two_nodes_reach_the_server(ranks, weights):
    assert [answer[:2] for answer in ranks(2, stranger, weights, nodes=2)] == [
        (0, (1, 6, CLASSES)),
        (1, (1, 6, CLASSES)),
    ]

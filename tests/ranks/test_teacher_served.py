"""A served teacher: outputs for each rank, any number of calls, and errors if the server dies."""

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
from samestep.teacher.across_ranks import serving_ranks
from samestep.teacher.frozen_model import FrozenModel
from samestep.teacher.model_files import open_weights
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
    """Whether outputs are bit-equal with the plain module, if ranks make different numbers of calls."""
    with open_served(path, dtype=dtype, servers=servers) as (run, teacher):
        module = FrozenModel(Teacher, open_weights(path)).load(run.device, dtype)
        mine = tokens()[run.rank :: run.size]
        same = []
        for at in range(2 + run.rank):  # no rank waits for the calls of another
            answer = teacher(tokens=mine[: at + 1])
            with torch.no_grad():
                same.append(torch.equal(answer, module(mine[: at + 1])) and not answer.requires_grad)
        return same, teacher.describe(), [t.name for t in threading.enumerate() if "serve" in t.name]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("size", "servers"), [(1, None), (2, None), (3, 2)])
def test_each_rank_gets_the_outputs_of_the_plain_module_for_its_inputs(ranks, weights, size, servers, dtype):
    answers = ranks(size, outputs, weights, dtype, servers)
    for rank, (same, messages, serving) in enumerate(answers):
        assert same == [True] * (2 + rank)
        assert bool(serving) == (rank in serving_ranks(size, servers or 1))
        assert "this rank sends its requests to rank " in messages


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("submit", [False, True])
def test_a_student_trains_the_same_as_with_a_copy(ranks, weights, size, submit):
    (wanted,) = ranks(1, train_with, weights, {"placement": "gpu"})
    for trained in ranks(size, train_served, weights, submit):
        for name, value in wanted.items():
            torch.testing.assert_close(trained[name], value, atol=1e-6, rtol=0)


def train_served(path, submit):
    return train_with(path, {"placement": "served"}, submit=submit)


@pytest.mark.slow
def test_a_server_process_serves_all_ranks_and_ends_with_them(ranks, weights):
    answers = ranks(2, served_by_process, weights, timeout=250)
    for same, messages, serving, _ in answers:
        assert same
        assert "on each of 1 process(es), this rank sends its requests to process " in messages
        assert not serving, "no rank holds the teacher"
    pid = answers[1][3]
    assert isinstance(pid, int)
    assert not psutil.pid_exists(pid)


def served_by_process(path):
    with open_served(path, inner="process", timeout=200) as (_, teacher):
        same = torch.equal(teacher(tokens()), plain(path)(tokens()))
        serving = [t.name for t in threading.enumerate() if "serve" in t.name]
        return same, teacher.describe(), serving, getattr(teacher._placed._server, "pid", None)


def served_folder(folder):
    with Run(global_batch=4, start_timeout=200, step_timeout=200) as run:
        teacher = run.teacher(folder, placement="served", inner="process")
        out = teacher(input_ids=tokens(2))
        return type(out).__name__, out.loss, torch.equal(out[0], out.logits), out.logits


@pytest.mark.slow
def test_a_server_process_serves_a_hugging_face_folder_with_its_output_classes(ranks, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="pip install 'samestep[teacher]'")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # transformers makes torch set it
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=CLASSES, n_positions=8)
    with torch.random.fork_rng():
        made = transformers.GPT2LMHeadModel(config).eval()
    made.save_pretrained(tmp_path / "folder")
    with torch.no_grad():
        wanted = made(input_ids=tokens(2)).logits
    for kind, loss, first, logits in ranks(2, served_folder, tmp_path / "folder", timeout=250):
        assert kind == "CausalLMOutputWithCrossAttentions"
        assert loss is None
        assert first
        assert torch.equal(logits, wanted)


def compress(path):
    with open_served(path, top_k=3, temperature=2.0) as (_, teacher):
        few, wanted = teacher(tokens(4)), top_k(plain(path)(tokens(4)), 3, 2.0)
        same = [torch.equal(ours, theirs) for ours, theirs in zip(few[:3], wanted[:3], strict=True)]
        return few, same, distill_loss(torch.zeros(4, 6, CLASSES), few, temperature=2.0).shape


def test_top_k_logits_are_sent_instead_of_all(ranks, weights):
    for few, same, shape in ranks(2, compress, weights):
        assert isinstance(few, TopK)
        assert few.temperature == 2.0
        assert same == [True] * 3
        assert shape == (4, 6)


class Named(torch.nn.Module):
    """A teacher with outputs by name that can fail."""

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
        messages = []
        for wrong in ({"fail": True}, {"strange": True}, {"tokens": object()}):
            try:
                teacher(**{"tokens": tokens(2), **wrong})
            except Exception as error:  # noqa: BLE001
                messages.append(f"{type(error).__name__}: {error}")
        again = teacher(tokens=tokens(2))
        return out, messages, torch.equal(out["logits"], again["logits"])


def test_outputs_keep_their_structure_and_errors_reach_the_client(ranks, tmp_path):
    path = tmp_path / "named.safetensors"
    write_named(path)
    for out, (fails, strange, unsendable), again in ranks(2, named, path):
        assert list(out) == ["logits", "hidden"]
        assert out["hidden"][1] == [1, "a", None]
        assert fails.startswith("TeacherError: the teacher failed on its server: ValueError: no such word\nTraceback")
        assert "the teacher's output['cache'] is a object, which samestep can neither send nor cache" in strange
        assert "TeacherError: the teacher's input[1]['tokens'] is a object, which samestep can neither" in unsendable
        assert again, "the server continues"


def several_requests(path):
    with open_served(path) as (_, teacher):
        parts = [tokens()[at : at + 4] for at in range(5)]
        submitted = [teacher.submit(part) for part in parts]
        found = [pending.result() for pending in reversed(submitted)][::-1]
        module = plain(path)
        return all(torch.equal(answer, module(part)) for answer, part in zip(found, parts, strict=True))


def test_several_requests_can_be_pending_and_read_in_any_order(ranks, weights):
    assert ranks(2, several_requests, weights) == [True, True]


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


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "failed"])
def test_a_dead_server_rank_is_reported_to_all_clients(ranks, weights, how):
    first, second, third = ranks.errors(3, server_dies, weights, how)
    for rank, text in enumerate((first, second)):
        assert f"TeacherError: rank {rank} lost the teacher on rank 2 (" in text
        assert "it failed or was killed, often because memory ran out; see its last lines" in text
        if how == "failed":
            assert "rank 2 failed: MemoryError: no room on rank 2" in text
    assert ("SIGKILL" if how == "killed" else "no room on rank 2") in third


def process_dies(path):
    with open_served(path, inner="process", timeout=200) as (run, teacher):
        teacher(tokens(2))
        run.barrier()
        if isinstance(pid := getattr(teacher._placed._server, "pid", None), int):
            os.kill(pid, signal.SIGKILL)
        run.barrier()
        time.sleep(0.5)
        teacher(tokens(2))


@pytest.mark.slow
def test_a_dead_server_process_is_reported_with_its_exit_code(ranks, weights):
    first, second = ranks.errors(2, process_dies, weights, timeout=250)
    assert "TeacherError: rank 0 lost the teacher on process " in first
    assert " (started by rank 1) (" in first
    assert "TeacherError: rank 1 lost the teacher on process " in second
    assert "ended with exit code -9" in second


def one_server_fails(path):
    from samestep.teacher import across_ranks

    load = across_ranks.load_for_server
    with Run(global_batch=4, start_timeout=30, step_timeout=30) as run:
        if run.rank == 1:
            across_ranks.load_for_server = out_of_memory
        try:
            run.teacher(Teacher, weights=path, placement="served", servers=2)
        except Exception as error:  # noqa: BLE001
            return str(error), [t.name for t in threading.enumerate() if t.name.startswith("samestep-teacher")]
        finally:
            across_ranks.load_for_server = load


def out_of_memory(*_):
    raise MemoryError("no room on rank 1")


def test_a_server_stops_if_another_cannot_start(ranks, weights):
    for text, threads in ranks(2, one_server_fails, weights):
        assert "no room on rank 1" in text
        assert threads == []


RELEASE = threading.Event()


class Slow(Teacher):
    """A forward pass that takes longer than the timeout."""

    def forward(self, tokens):
        RELEASE.wait(30)
        return super().forward(tokens)


def too_slow(path):
    RELEASE.clear()
    with open_served(path, Slow, timeout=4) as (run, teacher):
        try:
            teacher(tokens(2))
        finally:
            time.sleep(4 * run.rank)  # the server rank must not end before the other has timed out too
            RELEASE.set()


@pytest.mark.slow
def test_a_server_that_exceeds_the_timeout_is_named(ranks, weights):
    for rank, text in enumerate(ranks.errors(2, too_slow, weights)):
        assert f"TeacherError: rank {rank} has waited 4 s for the teacher on rank 1: if a forward pass takes" in text


def submit_and_continue(path):
    """Whether submit returned before the outputs were computed, and whether they were right."""
    RELEASE.clear()
    with open_served(path, Slow) as (run, teacher):
        try:
            pending = teacher.submit(tokens(2))
            before = pending.done()
            run.sum(1)  # the server rank computes no outputs before every rank has looked
        finally:
            RELEASE.set()
        return before, torch.equal(pending.result(), plain(path)(tokens(2)))


def test_submit_does_not_wait_for_the_outputs(ranks, weights):
    for size in (1, 2):
        assert ranks(size, submit_and_continue, weights) == [(False, True)] * size


def parameters_alive():
    gc.collect()
    alive = [each for each in gc.get_objects() if isinstance(each, torch.nn.Parameter) and not each.is_meta]
    return sum(each.nbytes for each in alive)


def parameters_held(path):
    """Bytes of parameters that a served teacher adds on this rank, and those of the full teacher."""
    before = parameters_alive()
    with open_served(path) as (_, teacher):
        teacher(tokens(2))
        return parameters_alive() - before, sum(each.nbytes for each in plain(path).parameters())


def test_ranks_without_a_server_hold_no_weights(ranks, weights):
    (first, _), (second, whole) = ranks(2, parameters_held, weights)
    assert (first, second) == (0, whole)


def build_in_script():
    return Teacher()


build_in_script.__module__ = "__main__"
build_in_script.__qualname__ = "build_in_script"


def process_cannot_import(path):
    import __main__

    __main__.build_in_script = build_in_script
    try:
        with open_served(path, build_in_script, inner="process", timeout=200):
            pass
    finally:
        del __main__.build_in_script


@pytest.mark.slow
def test_a_server_process_that_cannot_import_build_names_the_remedy(ranks, weights):
    first, second = ranks.errors(2, process_cannot_import, weights, timeout=250)
    wanted = "define it in a module next to the script and import it, or serve from a rank with inner='rank'"
    assert "the server process cannot import build=build_in_script (" in second
    assert wanted in second
    assert "failed on rank(s) [1] and not on rank 0" in first
    assert wanted in first


def test_server_ranks_are_distributed_evenly():
    assert serving_ranks(4, 1) == [3]
    assert serving_ranks(8, 2) == [3, 7]
    assert serving_ranks(5, 2) == [1, 4]
    assert serving_ranks(3, 3) == [0, 1, 2]


def open_with(path, options):
    with open_served(path, **options):
        pass


def test_an_invalid_number_of_servers_is_rejected(ranks, weights):
    for text in ranks.errors(2, open_with, weights, {"servers": 3}):
        assert "TeacherError: servers=3 is more than the 2 rank(s) of this run: pass 1 to 2" in text
    for text in ranks.errors(2, open_with, weights, {"servers": 0}):
        assert "TeacherError: servers=0 is not a positive integer: pass 1 or more" in text


def call_on_two_nodes(path):
    import socket

    with open_served(path) as (run, teacher):
        return run.rank, teacher(tokens(1)).shape, socket.gethostname()


def test_ranks_of_two_nodes_reach_the_server(ranks, weights):
    assert [answer[:2] for answer in ranks(2, call_on_two_nodes, weights, nodes=2)] == [
        (0, (1, 6, CLASSES)),
        (1, (1, 6, CLASSES)),
    ]

"""Evidence of simulated ranks: what a launcher finds if ranks run the script below."""

import linecache
from collections.abc import Sequence
from dataclasses import replace

from samestep.hang.evidence import Collective, Frame, ProcessInfo, RankEvidence

SCRIPT, DATASET = "/job/train.py", "/job/dataset.py"
SOURCES = {
    SCRIPT: """\
import torch.distributed as dist
def main(rank):
    for batch in loader:
        loss = model(batch).mean()
        loss.backward()
        if rank == 0:
            evaluate(model)
        dist.barrier()
        time.sleep(120)
        dist.all_reduce(total)
        dist.broadcast(flag, 0)
        breakpoint()
        mean = run.mean(losses)
        value = loss.item()
main(rank)
with Run() as run:
    main(rank)
with lock:
    write(batch)
name = input("name of this run? ")
""",
    DATASET: """\
class Images:
    def __getitem__(self, index):
        return read(self.files[index])
""",
}
NOW = 1_000_000.0
PACKAGES = "/usr/lib/python3.11/site-packages"


def add_sources() -> None:
    """Let linecache show the lines of the script, which is not on the disk."""
    for file, text in SOURCES.items():
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


def remove_sources() -> None:
    for file in SOURCES:
        linecache.cache.pop(file, None)


def line(number: int, file: str = SCRIPT, function: str = "main") -> Frame:
    return Frame(file, number, function)


def torch_frame(file: str, function: str) -> Frame:
    return Frame(f"{PACKAGES}/torch/{file}", 1, function)


OUTER = [line(15, function="<module>")]
BACKWARD = [
    torch_frame("autograd/graph.py", "_engine_run_backward"),
    torch_frame("autograd/__init__.py", "backward"),
    torch_frame("_tensor.py", "backward"),
    line(5),
    *OUTER,
]
WAITS_FOR_LOADER = [
    Frame("/usr/lib/python3.11/multiprocessing/connection.py", 1, "wait"),
    torch_frame("utils/data/dataloader.py", "_try_get_data"),
    torch_frame("utils/data/dataloader.py", "__next__"),
    line(3),
    *OUTER,
]
READS_SAMPLE = [
    line(3, DATASET, "__getitem__"),
    torch_frame("utils/data/_utils/fetch.py", "fetch"),
    torch_frame("utils/data/_utils/worker.py", "_worker_loop"),
    *OUTER,
]
WAITS_FOR_WORK = [
    Frame("/usr/lib/python3.11/multiprocessing/queues.py", 1, "get"),
    torch_frame("utils/data/_utils/worker.py", "_worker_loop"),
    *OUTER,
]


def c10d(name: str, number: int) -> list[Frame]:
    """The stack of a call of torch.distributed at a line of the script."""
    return [
        torch_frame("distributed/distributed_c10d.py", name),
        torch_frame("distributed/c10d_logger.py", "wrapper"),
        line(number),
        *OUTER,
    ]


def at(number: int) -> list[Frame]:
    """The stack of a thread in code of the script that calls no Python."""
    return [line(number), *OUTER]


def call(
    number: int,
    stack: Sequence[Frame] = BACKWARD,
    name: str = "all_reduce",
    shape: Sequence[int] = (264_970,),
    dtype: str = "Float",
    group: str = "0",
    seconds: float = 42.0,
    pending: bool = True,
    ranks: Sequence[int] = (),
) -> Collective:
    """A collective; `name` may begin with the backend, which is gloo if not."""
    shapes = [list(shape)] if dtype else []
    backend, _, operation = name.rpartition(":")
    return Collective(
        group,
        number,
        operation,
        shapes,
        [dtype] if dtype else [],
        NOW - seconds,
        pending,
        600.0,
        backend or "gloo",
        list(stack),
        list(ranks),
    )


def done(collective: Collective) -> Collective:
    return replace(collective, is_pending=False)


def barrier(number: int, line_number: int = 8, **options: object) -> Collective:
    return replace(call(number, c10d("barrier", line_number), "barrier", (), ""), **options)  # type: ignore[arg-type]


def rank(
    number: int,
    *collectives: Collective,
    stack: Sequence[Frame] | None = None,
    state: str = "sleeping",
    cpu: float = 0.0,
    swapping: bool = False,
    node: str = "gpu-07",
    answers: bool = True,
    children: Sequence[ProcessInfo] = (),
    threads: dict[str, list[Frame]] | None = None,
    **options: object,
) -> RankEvidence:
    """A rank; its main thread is in its last pending collective unless `stack` says otherwise."""
    pending = [each for each in collectives if each.is_pending]
    if stack is None:
        stack = pending[-1].stack if pending else []
    stacks = {"main": list(stack), **(threads or {})} if stack else {}
    process = ProcessInfo(4000 + number, state, "python train.py", cpu, 1.0, swapping, "", stacks)
    evidence = RankEvidence(number, node, process, list(children), list(collectives) if answers else None, NOW)
    return replace(evidence, **options)  # type: ignore[arg-type]


def worker(pid: int, stack: Sequence[Frame] = (), state: str = "sleeping", **options: object) -> ProcessInfo:
    """A data worker; one without a stack is known by the name that torch gives it."""
    child = ProcessInfo(pid, state, "python", 0.0, 1.0, stacks={"main": list(stack)} if stack else {})
    return replace(child, **({"name": "pt_data_worker"} | options))  # type: ignore[arg-type]


def others(numbers: Sequence[int], *collectives: Collective, **options: object) -> list[RankEvidence]:
    """Ranks that do the same."""
    return [rank(number, *collectives, **options) for number in numbers]  # type: ignore[arg-type]

"""Scripts that start their ranks by themselves: what the process that starts them does is done once."""

import pytest

from samestep.lint.linter import lint

SCRIPT = """\
import json, shutil
import multiprocessing
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP


def work(rank, world):
    dist.init_process_group("gloo", rank=rank, world_size=world)
    model = DDP(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    {body}
    dist.destroy_process_group()


def write(path):
    with open(path, "w") as file:
        json.dump({{"done": True}}, file)


if __name__ == "__main__":
    write("options.json")
{start}
    write("done.json")
"""
STARTS = {
    "spawn": "    mp.spawn(work, args=(2,), nprocs=2)",
    "spawn_or_call": """\
    if torch.cuda.device_count() > 1:
        mp.spawn(work, args=(2,), nprocs=2)
    else:
        work(0, 1)""",
    "process": """\
    processes = []
    for rank in range(2):
        process = multiprocessing.Process(target=work, args=(rank, 2))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()""",
    "context": """\
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(rank, 2)) for rank in range(2)]
    for process in processes:
        process.start()""",
}


def codes(path, body, start):
    (path / "train.py").write_text(SCRIPT.format(body=body, start=STARTS[start]))
    return [each.code for each in lint([path]).findings]


@pytest.mark.parametrize("start", STARTS)
def test_the_launching_process_may_write_files_before_and_after_the_ranks(tmp_path, start):
    assert codes(tmp_path, "pass", start) == []


@pytest.mark.parametrize("start", STARTS)
def test_faults_of_the_ranks_are_found(tmp_path, start):
    assert codes(tmp_path, 'write("metrics.json")', start) == ["SS501"]
    assert codes(tmp_path, "if rank == 0: dist.barrier()", start) == ["SS301"]


def test_processes_that_are_no_ranks_are_left_alone(tmp_path):
    (tmp_path / "train.py").write_text(
        "import multiprocessing\n"
        "from torch.nn.parallel import DistributedDataParallel\n\n\n"
        "def read(number):\n"
        "    if number == 0:\n"
        "        open('index', 'w').write('x')\n\n\n"
        "for number in range(4):\n"
        "    multiprocessing.Process(target=read, args=(number,)).start()\n"
    )
    assert lint([tmp_path]).findings == []

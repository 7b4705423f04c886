"""Data, steps and runs that a script uses wrongly: the exit code and the sentence."""

import pytest

from tests.faults.harness import Fault, cases, check
from tests.faults.trainings import training

DATA = """
class Data(Dataset):
    def __init__(self, do=None, result=None):
        self.do, self.result = do, result
    def __len__(self):
        return 16
    def __getitem__(self, index):
        if index == 5 and self.do:
            self.do()
        if self.result:
            return self.result(index)
        return torch.ones(1), torch.ones(1)

def fail(kind):
    raise kind
"""


def reading(dataset: str, options: str = "", define: str = "", workers: int = 2) -> str:
    """A training that reads this dataset with data workers."""
    source = f"""
with Run(global_batch=4) as run:
    train(run, folder=None, dataset={dataset}, data=dict(num_workers={workers}{options}))
"""
    return training(DATA + define + source)


SPAWN = """
import multiprocessing
multiprocessing.set_start_method("spawn", force=True)
"""
WORKERS = [
    Fault("a setting that cannot be pickled", r"epoch_settings returned a function that cannot be sent to data workers",
          1, reading("data()", ", epoch_settings=lambda epoch: lambda: 1")),
    Fault("a setting that is a lock", r"epoch_settings returned a lock that cannot be sent to data workers \(TypeError",
          1, reading("data()", ", epoch_settings=lambda epoch: threading.Lock()")),
    Fault("a setting that cannot be unpickled", "returned a Bad that cannot be sent .*ValueError: cannot be rebuilt", 1,
          reading("data()", ", epoch_settings=lambda epoch: Bad()", """
class Bad:
    def __reduce__(self):
        return rebuild, ()

def rebuild():
    raise ValueError("cannot be rebuilt")
""")),
    Fault("epoch_settings raises", "ZeroDivisionError", 1, reading("data()", ", epoch_settings=lambda epoch: 1 // 0")),
    Fault("a worker is killed", "a data worker of this rank was killed or has crashed", 1,
          reading("Data(lambda: os.kill(os.getpid(), signal.SIGKILL))")),
    Fault("a worker exits", "a data worker of this rank was killed or has crashed", 1,
          reading("Data(lambda: os._exit(3))")),
    Fault("a worker has a segmentation fault", "a data worker of this rank was killed or has crashed", 1,
          reading("Data(lambda: __import__('ctypes').string_at(0))")),
    Fault("a worker has too little memory", "sample 5 could not be read on rank 0, worker 1: MemoryError", 1,
          reading("Data(lambda: bytearray(1 << 62))")),
    Fault("a worker calls sys.exit", "sample 5 could not be read on rank 0, worker 1: SystemExit: 3", 1,
          reading("Data(lambda: sys.exit(3))")),
    Fault("a worker raises KeyboardInterrupt", "sample 5 could not be read on rank 0, worker 1: KeyboardInterrupt", 1,
          reading("Data(lambda: fail(KeyboardInterrupt))")),
    Fault("a worker raises StopIteration", "sample 5 could not be read on rank 0, worker 1: StopIteration", 1,
          reading("Data(lambda: fail(StopIteration))")),
    Fault("an exception that cannot be pickled", "sample 5 could not be read on rank 0, worker 1: Bad: two", 1,
          reading("Data(lambda: fail(Bad(1, 2)))", "", """
class Bad(Exception):
    def __init__(self, one, two):
        super().__init__("two arguments")
        self.lock = threading.Lock()
""")),
    Fault("a spawned worker and a lambda in the dataset", "the dataset, its transforms or collate_fn cannot be sent", 1,
          reading("Data(lambda: 1)", "", SPAWN)),
    Fault("a spawned worker and a lambda as collate_fn", "the dataset, its transforms or collate_fn cannot be sent", 1,
          reading("data()", ", collate_fn=lambda samples: torch.utils.data.default_collate(samples)", SPAWN)),
    Fault("a batch with a lock", r"batch\[0\] is of class lock: a batch is a tensor, or tuples", 1,
          reading("data()", ", collate_fn=lambda samples: (threading.Lock(), torch.ones(4, 1))")),
    Fault("far too many workers", "num_workers=100000000 is not a number of data workers: pass 0 to 1024", 1,
          reading("data()", workers=100_000_000)),
]  # fmt: skip
RUNS = [
    Fault("an exception, and another one while the run is closed", "ValueError: the cause closing the run failed too: "
          "OSError: the second", 1, training("""
def fail():
    raise OSError("the second")

with Run(global_batch=4) as run:
    run._lifecycle.context.on_close.append(fail)
    raise ValueError("the cause")
""")),
]  # fmt: skip


def alone(body: str, before: str = "", ranks: int = 2) -> str:
    """A script in which the ranks make different calls of torch."""
    return training(f"""
{before}
with Run(global_batch=4, start_timeout=30, step_timeout=6) as run:
    def each(done):
        if done == 2:
            {body}

    train(run, folder=None, each=each)
""")


RULE = r"every rank must make the same calls in the same order \(is one of them under `if run.is_main:`\?\)"
COLLECTIVES = [
    Fault("all_reduce of torch on one rank, next to DDP", r"rank 0 failed: .* at train\.py:\d+ in all_reduce", 1,
          alone("if run.is_main: dist.all_reduce(torch.ones(5))"), 2),
    Fault("broadcast of torch on one rank, then run.mean", rf"rank 0 .* at train\.py:\d+ in broadcast.*{RULE}", 1,
          alone("if run.is_main: dist.broadcast(torch.ones(3), 0)\n            run.mean([1])"), 2),
    Fault("barrier of torch on one rank, in a group of the script", r"rank 0 .* at train\.py:\d+ in barrier", 1,
          alone("if run.is_main: dist.barrier()\n            run.barrier()", 'dist.init_process_group("gloo")'), 2),
    Fault("an all_reduce of torch on one rank that is not waited for", "step 3/4", 0,
          alone("if run.is_main: run.work = dist.all_reduce(torch.ones(5), async_op=True)"), 2),
]  # fmt: skip
FAULTS = [*WORKERS, *RUNS]


@cases(FAULTS)
def test_a_fault_ends_with_its_sentence(fault, tmp_path):
    check(fault, tmp_path)


@pytest.mark.slow
@cases(COLLECTIVES)
def test_a_collective_of_torch_on_one_rank_is_named(fault, tmp_path):
    check(fault, tmp_path)

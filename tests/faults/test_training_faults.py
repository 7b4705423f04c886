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


def alone(body: str, before: str = "", strategy: str = "ddp", longer: int = 6) -> str:
    """A script in which rank 0 alone makes a call of torch; `longer` is its timeout."""
    return training(f"""
{before}
with Run(global_batch=4, start_timeout=30, step_timeout=6 if os.environ["RANK"] == "1" else {longer}) as run:
    def each(done):
        if done == 2:
            {body}

    train(run, folder=None, each=each, strategy="{strategy}")
""")


def in_body(call: str, before: str = "", after: str = "run.barrier()", longer: int = 10) -> str:
    """A script in which rank 1 alone makes a call directly in the body of `with Run`; `longer` is rank 0's timeout."""
    return training(f"""
seconds = 10 if os.environ["RANK"] == "1" else {longer}
with Run(global_batch=4, start_timeout=seconds) as run:
    {before}
    if not run.is_main:
        {call}
    {after}
""")


def line(script: str, text: str) -> int:
    """The number of the last line of a script that contains this text."""
    *_, found = [number for number, each in enumerate(script.splitlines(), 1) if text in each]
    return found


ALL_REDUCE = in_body("dist.all_reduce(torch.ones(5))", longer=100)
ALL_GATHER = in_body("dist.all_gather([torch.empty(5), torch.empty(5)], torch.ones(5))",
                     'model = run.wrap(nn.Linear(1, 4), "fsdp")', "model(torch.ones(2, 1))")  # fmt: skip
COLLECTIVES = [
    Fault("all_reduce of torch on one rank, in the body of the run",
          rf"rank 0 waits in .* rank 1 failed: .* at train\.py:{line(ALL_REDUCE, 'dist.all_reduce')} in all_reduce", 1,
          ALL_REDUCE, 2),
    Fault("all_reduce of torch on one rank, next to DDP", r"rank 0 .* at train\.py:\d+ in all_reduce", 1,
          alone("if run.is_main: dist.all_reduce(torch.ones(5))"), 2),
    Fault("all_reduce of torch on one rank, next to DDP with a shorter timeout", r"rank 0 .*:\d+ in all_reduce", 1,
          alone("if run.is_main: dist.all_reduce(torch.ones(5))", longer=100), 2),
    Fault("all_reduce of torch on one rank, next to steps of FSDP", r"rank 0 .* at train\.py:\d+ in all_reduce", 1,
          alone("if run.is_main: dist.all_reduce(torch.ones(5))", strategy="fsdp"), 2),
    Fault("all_gather of torch on one rank, next to FSDP",
          rf"rank 1 .* at train\.py:{line(ALL_GATHER, 'dist.all_gather')} in all_gather", 1, ALL_GATHER, 2),
    Fault("broadcast of torch on one rank, then run.mean", r"rank 0 .* at train\.py:\d+ in broadcast", 1,
          alone("if run.is_main: dist.broadcast(torch.ones(3), 0)\n            run.mean([1])"), 2),
    Fault("barrier of torch on one rank, in a group of the script", r"rank 0 .* at train\.py:\d+ in barrier", 1,
          alone("if run.is_main: dist.barrier()\n            run.barrier()", 'dist.init_process_group("gloo")'), 2),
    Fault("an all_reduce of torch on one rank that is not waited for", "step 3/4", 0,
          alone("if run.is_main: run.work = dist.all_reduce(torch.ones(5), async_op=True)"), 2),
]  # fmt: skip


def launched(strategy: str, rank: int = 0) -> Fault:
    """The same under `samestep run`, whose report begins with this rank and its line: as a hang or the first failure.

    It is a failure if the launcher had no time to look at the ranks before the timeout.
    """
    script = alone(f"if run.rank == {rank}: dist.all_reduce(torch.ones(5))", strategy=strategy)
    called = line(script, "dist.all_reduce")
    hang = (
        r"samestep: ranks 0 and 1 wait for each other for \d+ s: they are in different collectives\. "
        rf"rank {rank} [^:]* waits in all_reduce #\d+ \(5 elements\), called from train\.py:{called}: "
        rf".* ended because of it; [^<]*: \S+ rank {rank} pid \d+ [^<]*<- the cause"
    )
    failure = (
        rf"\d of 2 rank\(s\) on \S+ failed; [^<]*: \S+ rank {rank} pid [^<]*<- first failure .* "
        rf"rank {rank} on .*train\.py\", line {called}, in each"
    )
    return Fault(
        f"all_reduce of torch on rank {rank} alone, next to {strategy}, in the report of samestep run",
        f"{hang}|{failure}",
        command="samestep run --nproc-per-node 2 train.py",
        prepare=lambda folder: (folder / "train.py").write_text(script),
    )  # fmt: skip


def passes(differs: str, strategy: str = "fsdp", before: str = "pass") -> str:
    """A script with steps of two micro-batches, in which rank 1 alone does something after a backward pass."""
    return training(f"""
with Run(global_batch=4, start_timeout=60, step_timeout=60) as run:
    model = run.wrap(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)), "{strategy}")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in run.shard(data(), micro_batch=1, num_workers=0).epochs(1):
        for step in epoch:
            differs = step.number == 2 and not run.is_main
            {before}
            for x, y in step:
                loss = step.mean((model(x) - y).flatten())
                if differs: {differs}
                loss.backward()
            if not differs: optimizer.step()
            optimizer.zero_grad()
""")


AGAIN = passes("loss.backward(retain_graph=True)")
LEFT_OUT = passes("continue")
BACKWARD = rf"train\.py:{line(AGAIN, '                loss.backward()')}"
PASSES = [
    Fault("one rank alone makes another backward pass with FSDP",
          rf"step 2: rank 1 runs a backward pass at {BACKWARD} after forward and backward, and rank 0 ends the "
          rf"micro-batch \(the loop calls backward\(\) at train\.py:{line(AGAIN, 'differs: loss')}, {BACKWARD}\)", 1,
          AGAIN, 2),
    Fault("one rank alone makes another backward pass with zero2",
          rf"step 2: rank 1 runs a backward pass at {BACKWARD} after forward and backward, and rank 0 ends", 1,
          passes("loss.backward(retain_graph=True)", "zero2"), 2),
    Fault("one rank alone leaves out a backward pass with FSDP",
          rf"step 2: rank 1 ends the micro-batch at train\.py:{line(LEFT_OUT, 'for x, y in step:')} after "
          rf"forward, and rank 0 runs a backward pass at {BACKWARD} \(the loop calls backward\(\) at {BACKWARD}\)", 1,
          LEFT_OUT, 2),
    Fault("one rank alone calls the model again with FSDP",
          r"step 2: rank 1 calls the model at train\.py:\d+ after forward, and rank 0 runs a backward", 1,
          passes("model(x)"), 2),
    Fault("one rank alone leaves the loop over the micro-batches with FSDP",
          r"step 2: rank 1 has left the loop over the micro-batches early \(break, return or an exception\) at "
          r"train\.py:\d+ after forward, and rank 0 runs a backward pass", 1, passes("break"), 2),
    Fault("one rank alone skips a step with FSDP",
          r"step 2: rank 1 skips the micro-batches of the step at train\.py:\d+, and rank 0 calls the model",
          1, passes("pass", before="if differs: continue"), 2),
]  # fmt: skip


def steps(body: str, ranks: int = 1) -> str:
    """A training whose loop over the micro-batches is `body`."""
    return training(f"""
with Run(global_batch=4, start_timeout=60) as run:
    model, other = run.wrap(nn.Linear(1, 1)), nn.Linear(1, 1)
    optimizer, foreign = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))
    shard = run.shard(data())
    for epoch in shard.epochs(1):
        for step in epoch:
            for x, y in step:
                loss = step.mean((model(x) - y).flatten())
                {body}
""")


def length(value: str) -> str:
    """A dataset with this length."""
    return training(f"""
class Data(Dataset):
    def __len__(self):
        return {value}
    def __getitem__(self, index):
        return data()[index]

with Run(global_batch=4) as run:
    train(run, folder=None, dataset=Data(), data=dict(num_workers=0))
""")


def weights(value: str) -> str:
    """Sampling weights of a dataset with 16 samples."""
    return training(f"with Run(global_batch=4) as run: run.shard(data(), sampling_weights={value})")


def evaluating(body: str) -> str:
    """Two ranks with two models."""
    return training(f"""
with Run(global_batch=4, start_timeout=60) as run:
    model, other = run.wrap(nn.Linear(1, 1)), run.wrap(nn.Linear(1, 1))
    {body}
    run.barrier()
    print("modes", model.training, other.training)
""")


HDF5 = """
import h5py, numpy
from samestep.data import HDF5Dataset

def write(samples=16):
    with h5py.File("data.h5", "w") as file:
        file["x"] = file["y"] = numpy.zeros((samples, 1), "float32")

write()
"""


def hdf5(change: str, workers: int = 0, before: str = "") -> str:
    """A training on an HDF5 file that changes after the second step."""
    return training(
        HDF5
        + f"""
{before}
with Run(global_batch=2) as run:
    dataset = HDF5Dataset("data.h5", ["x", "y"])
    train(run, folder=None, dataset=dataset, data=dict(num_workers={workers}), each=lambda n: n == 2 and ({change}))
"""
    )


CHANGED = "data.h5 was changed or replaced during the run .*: start the run again with the complete file"
DATASETS = [
    Fault("an empty dataset", "list is empty, so there is nothing to shard", 1,
          training("with Run(global_batch=4) as run: run.shard([])")),
    Fault("a length that is too long", "sample 16 could not be read on rank 0, in the training process: IndexError", 1,
          length("100")),
    Fault("a negative length", r"len\(Data\) failed .*: return the number of samples from __len__", 1, length("-3")),
    Fault("a huge length", r"len\(Data\) failed .*: return the number of samples from __len__", 1, length("10**30")),
    Fault("a length that is not an integer", r"len\(Data\) failed \('float' object", 1, length("4.5")),
    Fault("samples that are None", "could not make a batch of 4 samples on rank 0.* found <class 'NoneType", 1,
          reading("Data(result=lambda index: None)", workers=0)),
    Fault("samples of different shapes", "if the samples differ in shape, pass run.shard a collate_fn=", 1,
          reading("Data(result=lambda index: torch.ones(index + 1))", workers=0)),
    Fault("a collate_fn with too many rows", "need one loss for each of the 4 rows of this micro-batch, got shape", 1,
          reading("data()", ", collate_fn=lambda samples: (torch.ones(7, 1), torch.ones(7, 1))", workers=0)),
    Fault("weights of nan", "16 of 16 sampling_weights are negative, nan or infinite", 1,
          weights("torch.full((16,), math.nan)")),
    Fault("weights of zero", "all 16 sampling_weights are 0, so no sample can be drawn", 1, weights("torch.zeros(16)")),
    Fault("too few weights", r"sampling_weights have shape \(3,\) and the dataset has 16", 1, weights("torch.ones(3)")),
    Fault("an HDF5 file that shrinks", CHANGED, 1, hdf5('os.truncate("data.h5", 1000)')),
    Fault("an HDF5 file that is written again", CHANGED, 1, hdf5("write(8)", workers=1)),
    Fault("an HDF5 file that is removed", "no file now", 1, hdf5('os.unlink("data.h5")')),
    Fault("an HDF5 file that is truncated before the start", "data.h5 cannot be opened: it is truncated", 1,
          hdf5("0", before='os.truncate("data.h5", 1000)')),
]  # fmt: skip
STEPS = [
    Fault("an optimizer of another model", r"SGD has 2 parameter\(s\) that no wrapped model owns", 1,
          steps("loss.backward(); foreign.step()")),
    Fault("a loss that is a number", "got a float: use reduction='none'", 1, steps("step.mean(3.0)")),
    Fault("a loss without a graph", "does not require grad", 1, steps("step.mean(y.flatten()).backward()")),
    Fault("two backward passes", "backward through the graph a second time", 1,
          steps("loss = step.mean(model(x).square().flatten()); loss.backward(); loss.backward()")),
    Fault("a step that is read again", "step 0 was iterated too often", 1, steps("list(step)")),
    Fault("a model without parameters", "ReLU has no trainable parameter: call it without run.wrap", 1,
          training("with Run(global_batch=4) as run: run.wrap(nn.ReLU())"), 2),
    Fault("a Run inside of run.once", r"a Run was started inside run\.once\(start\), which one rank alone runs", 1,
          training("""
def start():
    with Run(global_batch=4):
        pass

with Run(global_batch=4, start_timeout=60) as run:
    run.once(start)
"""), 2),
    Fault("two runs at the same time", "both", 0, training("""
with Run(global_batch=4) as run, Run(global_batch=4) as other:
    train(run, folder=None)
    train(other, folder=None)
    print("both")
"""), 2),
    Fault("one rank saves", r"called checkpoint\.save at train\.py:\d+ while rank 1", 1, training("""
with Run(global_batch=4, start_timeout=60) as run:
    checkpoint = run.checkpoint(OUT, model=run.wrap(nn.Linear(1, 1)))
    if run.is_main:
        checkpoint.save()
    run.barrier()
"""), 2),
    Fault("one rank evaluates", r"rank 0 called run\.evaluate at train\.py:\d+ while rank 1 called run\.barrier", 1,
          evaluating("if run.is_main: run.evaluate(model).__enter__()"), 2),
    Fault("one rank leaves an evaluation early", r"called run\.mean at train\.py:\d+ while rank 1 called", 1,
          evaluating("with run.evaluate(model): run.is_main and run.mean([1])"), 2),
    Fault("ranks evaluate different models", r"rank 0 evaluates Linear \(model 0\) and rank 1 evaluates Linear", 1,
          evaluating("run.evaluate(model if run.is_main else other).__enter__()"), 2),
    Fault("nested evaluations", "modes True True", 0,
          evaluating("with run.evaluate(model), run.evaluate(other), run.evaluate(model): run.barrier()"), 2),
]  # fmt: skip
FAULTS = [*WORKERS, *RUNS, *DATASETS, *STEPS]


@pytest.mark.slow
@cases(FAULTS)
def test_a_fault_ends_with_its_sentence(fault, tmp_path):
    check(fault, tmp_path)


@pytest.mark.slow
@cases(COLLECTIVES)
def test_a_collective_of_torch_on_one_rank_is_named(fault, tmp_path):
    check(fault, tmp_path)


@pytest.mark.slow
@cases([launched("ddp"), launched("ddp", rank=1), launched("fsdp")])
def test_the_report_of_equal_timeouts_begins_with_the_rank_that_called_a_collective_alone(fault, tmp_path):
    check(fault, tmp_path)


@pytest.mark.slow
@cases(PASSES)
def test_a_pass_of_a_sharded_model_that_differs_on_one_rank_is_named(fault, tmp_path):
    check(fault, tmp_path)

"""Teachers whose weights, options, caches or servers are wrong: the exit code and the sentence."""

import pytest

from tests.faults.harness import Fault, cases, check
from tests.faults.trainings import training

TEACHER = """
from safetensors.torch import save_file

WEIGHTS = Path("teacher.safetensors")

def build():
    return nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))

class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
    def forward(self, x):
        return self.call(x)

def write(module=None, **tensors):
    save_file({**(module or build()).state_dict(), **tensors}, WEIGHTS)

write()
"""


def calling(before: str = "", options: str = "", build: str = "build") -> str:
    """A run that calls a teacher and waits for the other ranks."""
    return training(
        TEACHER
        + f"""
{before}
with Run(global_batch=4, start_timeout=60) as run:
    options = dict(weights=WEIGHTS, placement="cpu")
    options.update({options})
    print("output", run.teacher({build}, **options)(torch.ones(2, 1)).shape)
    run.barrier()
"""
    )


def caching(change: str, each: str = "0") -> str:
    """Two runs with a cache, which changes between them or after each epoch."""
    return training(
        TEACHER
        + f"""
def distill():
    with Run(global_batch=4) as run:
        teacher = run.teacher(build, weights=WEIGHTS, placement="cached", cache="cache")
        for epoch in (shard := run.shard(data())).epochs(2):
            for step in epoch:
                for x, y in step:
                    teacher(x)
            {each}
    print("ended")

distill()
files = [path for path in Path("cache").rglob("*") if path.is_file()]
{change}
distill()
"""
    )


INCOMPLETE = r"is not a complete safetensors file .*: it was truncated while it was copied, or has another format"
FAULTS = [
    Fault("no weights", "weights=.* does not exist on this machine, and samestep downloads nothing", 1,
          calling("WEIGHTS.unlink()")),
    Fault("truncated weights", INCOMPLETE, 1, calling("os.truncate(WEIGHTS, WEIGHTS.stat().st_size - 4)")),
    Fault("weights of random bytes", INCOMPLETE, 1, calling("WEIGHTS.write_bytes(random.Random(0).randbytes(500))")),
    Fault("weights with a huge header", INCOMPLETE, 1,
          calling('WEIGHTS.write_bytes((1 << 62).to_bytes(8, "little") + b"{" * 100)')),
    Fault("empty weights", "teacher.safetensors is empty: copy or download it again", 1,
          calling('WEIGHTS.write_bytes(b"")')),
    Fault("weights that are a named pipe", "teacher.safetensors is empty", 1,
          calling("WEIGHTS.unlink(); os.mkfifo(WEIGHTS)")),
    Fault("weights that are an empty folder", "the folder .*teacher.safetensors is empty", 1,
          calling("WEIGHTS.unlink(); WEIGHTS.mkdir()")),
    Fault("weights of another shape", r"0\.weight is \(4, 1\), in the file \(7, 1\)", 1,
          calling('write(**{"0.weight": torch.ones(7, 1)})')),
    Fault("weights with another name", r"1 name\(s\) in the file are not in the module", 1,
          calling("write(more=torch.ones(1))")),
    Fault("weights that lack a tensor", r"3 name\(s\) of the module are not in the file", 1,
          calling('save_file({"0.weight": torch.ones(4, 1)}, WEIGHTS)')),
    Fault("weights of nan", "the teacher returned nan in its first call, which the student would learn", 0,
          calling('write(**{"0.weight": torch.full((4, 1), math.nan)})')),
    Fault("an unknown placement", "placement='gpus' does not exist: use placement='gpu'", 1,
          calling(options='placement="gpus"')),
    Fault("an option of another placement", "servers=3 has no effect with placement='cpu'", 1,
          calling(options="servers=3")),
    Fault("an unknown option", r"has no parameter device=: did you mean device_map=\?", 1,
          calling(options='device="cuda"')),
    Fault("a custom placement without a map", "placement='custom' needs device_map=", 1,
          calling(options='placement="custom"')),
    Fault("more servers than ranks", r"servers=99 is more than the 2 rank\(s\) of this run", 1,
          calling(options='placement="served", servers=99'), 2),
    Fault("a dtype that is a string", "dtype='bf16' is not a torch dtype: pass dtype=torch.bfloat16", 1,
          calling(options='dtype="bf16"')),
    Fault("a build function that raises", "ZeroDivisionError: in build", 1,
          calling('def broken():\n    raise ZeroDivisionError("in build")', build="broken"), 2),
    Fault("a build function that returns nothing", "returned a NoneType instead of a torch.nn.Module", 1,
          calling(build="lambda: None")),
    Fault("a module instead of a function", "is a module and already takes memory on every rank", 1,
          calling(build="build()")),
    Fault("a teacher that raises on one rank", "but rank 1 failed: ValueError: broken", 1, calling("""
def call(self, x):
    if os.environ["RANK"] == "1":
        raise ValueError("broken")
    return x

Module.call = call
write(Module())
""", build="Module"), 2),
    Fault("a served teacher that raises", "ValueError: broken", 1, calling("""
def call(self, x):
    raise ValueError("broken")

Module.call = call
write(Module())
""", 'placement="served", servers=1', "Module"), 2),
    Fault("a cache that is a file", "cannot open the cache .*: a file is where a folder is needed: .*; pass", 1,
          calling('Path("cache").touch()', 'placement="cached", cache="cache"')),
    Fault("a cached teacher outside of a step", "stores outputs by sample, but no sample is current", 1,
          calling(options='placement="cached", cache="cache"')),
    Fault("a cache of truncated files", "teacher.json was not written by samestep .*: delete .*cache", 1,
          caching("[os.truncate(path, path.stat().st_size // 2) for path in files]")),
    Fault("a cache of random bytes", "was not written by samestep .*: delete .*cache, or pass another folder", 1,
          caching("[path.write_bytes(random.Random(0).randbytes(path.stat().st_size)) for path in files]")),
    Fault("a cache of folders", "cannot open the cache .*: a folder is where a file is needed", 1,
          caching("[(path.unlink(), path.mkdir()) for path in files]")),
    Fault("truncated outputs in a cache", "ended.* ended$", 0,
          caching('[os.truncate(path, 10) for path in files if path.name != "teacher.json"]')),
]  # fmt: skip


@pytest.mark.slow
@cases(FAULTS)
def test_a_fault_ends_with_its_sentence(fault, tmp_path):
    check(fault, tmp_path)

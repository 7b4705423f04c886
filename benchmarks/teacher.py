"""What a frozen teacher of 1 GB costs a node: one copy for all ranks, against three ways of loading it on each.

    python benchmarks/teacher.py [--megabytes 1000] [--ranks 1 2 4] [--ways "samestep cpu"] [--dtype another]
    python benchmarks/teacher.py --device cuda

For each number of ranks, in processes of their own that take the ways in turn, with the files in the page cache:

- memory: the proportional set size of all ranks together (Pss in /proc/*/smaps_rollup, which counts a page that several
  share once), less what the same processes had before, after several forward passes;
- time: from the call to the first output on the slowest rank. Starting Python and importing libraries is no part of it:
  a tiny teacher has been through the same way before. The first forward pass is, as it is what brings pages in; a later
  one is told beside it, as what computing alone takes. Ranks compute at once with one thread each, so that the clock
  can show what N ranks cost where there are N cores; where there are fewer they wait for each other's turn, and what
  is held against the claim is the processor time of the busiest rank instead.

The claims: with placement "cpu" a node holds at most 1.05 x the teacher's bytes, for any number of ranks, also where
the file's dtype is another; and N ranks have their first output in at most 1.3 x the time of one. Exit code 1 where one
does not hold. The quickest of three rounds counts, on either side.

With --device cuda: blocks that stream from host memory ("offload"), against the longer of computing and of copying over
PCIe at the bandwidth that is measured. The claim: within 25 % of it.
"""

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep import Run

MOST_MEMORY, MOST_TIME, MOST_STREAM = 1.05, 1.3, 1.25
WAYS = ("samestep cpu", "torch.load", "torch.load mmap", "from_pretrained")
DTYPES = {"as the file": None, "another": torch.bfloat16}
WORDS = torch.arange(16).view(1, 16)
FORWARDS, ROUNDS = 3, 3


def config(megabytes: int) -> Any:
    """A Llama whose weights take so many megabytes in float32."""
    import transformers

    width, layers = (1024, 16) if megabytes > 100 else (64, 1)
    wide = round((megabytes * 1e6 / 4 - 2 * 2048 * width - layers * 4 * width**2) / (3 * width * layers) / 64) * 64
    return transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=max(64, wide),
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        vocab_size=2048,
        use_cache=False,
    )


def write(folder: Path, megabytes: int) -> None:
    """Write the teacher and a tiny one, as a Hugging Face folder and as a torch file."""
    import transformers

    for name, size in (("teacher", megabytes), ("tiny", 1)):
        model = transformers.LlamaForCausalLM(config(size))
        model.save_pretrained(folder / name, max_shard_size="10GB")
        torch.save(model.state_dict(), folder / f"{name}.pt")
    os.sync()


def load(way: str, run: Run, path: Path, dtype: torch.dtype | None) -> Callable[..., Any]:
    """A teacher, in one of four ways."""
    import transformers
    from transformers.initialization import no_init_weights

    if way == "samestep cpu":
        return run.teacher(path, placement="cpu", dtype=dtype)
    if way == "from_pretrained":
        return transformers.LlamaForCausalLM.from_pretrained(path, dtype=dtype or torch.float32).eval()
    settings = transformers.AutoConfig.from_pretrained(path)
    with no_init_weights():  # in favour of these two: who writes them by hand seldom knows of it
        model = transformers.LlamaForCausalLM(settings)
    state = torch.load(path.with_suffix(".pt"), weights_only=True, mmap=way == "torch.load mmap")
    model.load_state_dict(state, assign=True)
    return model.to(dtype or torch.float32).eval()


def proportional(pids: list[int]) -> int:
    """Memory of some processes, in bytes."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def node_memory(run: Run) -> int:
    """Memory of all ranks, while none of them does anything."""
    pids = [int(part[0]) for part in run._comm.exchange("pids", [float(os.getpid())])]
    run.barrier()
    found = run.once(proportional, pids)
    run.barrier()
    return found


def rank(folder: Path, ways: list[str], dtypes: list[str]) -> None:
    """One rank of all measurements on so many ranks; the first writes down what was found."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    with Run(global_batch=4, folder=folder / "logs") as run, torch.no_grad():
        cases = [(way, dtype) for dtype in dtypes for way in ways]
        for way, dtype in cases:  # what libraries load late is no part of a teacher
            load(way, run, folder / "tiny", DTYPES[dtype])(input_ids=WORDS)
        for _ in range(ROUNDS):
            for way, dtype in cases:
                now = once(way, run, folder / "teacher", DTYPES[dtype])
                best = found.setdefault(f"{way}/{dtype}", now)
                best.update({name: (max if name == "memory" else min)(best[name], now[name]) for name in now})
    if run.is_main:
        (folder / "found.json").write_text(json.dumps(found))


def once(way: str, run: Run, path: Path, dtype: torch.dtype | None) -> dict[str, float]:
    """One teacher, from the call to several forward passes; all of it is given back afterwards."""
    gc.collect()
    before = node_memory(run)
    run.barrier()
    began, worked = time.perf_counter(), time.process_time()
    teacher = load(way, run, path, dtype)
    loaded = time.perf_counter() - began
    teacher(input_ids=WORDS)
    first, work = time.perf_counter() - began, time.process_time() - worked
    memory, forwards = 0, []
    for _ in range(FORWARDS):
        memory = max(memory, node_memory(run) - before)
        began = time.perf_counter()
        teacher(input_ids=WORDS)
        forwards.append(time.perf_counter() - began)
    memory = max(memory, node_memory(run) - before)
    if hasattr(teacher, "close"):
        teacher.close()
    del teacher
    times = {"load": loaded, "first": first, "work": work, "forward": min(forwards)}
    return {"memory": memory, **{name: run.max(value) for name, value in times.items()}}


def measure(folder: Path, ranks: int, ways: list[str], dtypes: list[str]) -> dict[str, dict[str, float]]:
    """Start so many ranks and wait for what they find."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    quiet = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    # Large tensors that are freed go back to the system, and do not serve the next way unseen.
    quiet |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, __file__, "--rank-of", str(folder), "--ways", *ways, "--dtype", *dtypes]
    started = []
    for number in range(ranks):
        place = {"RANK": str(number), "LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(ranks)}
        around = {**os.environ, **quiet, **(meeting | place if ranks > 1 else {})}
        started.append(subprocess.Popen(command, env=around, stdout=subprocess.DEVNULL))
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"{ranks} rank(s) failed")
    return json.loads((folder / "found.json").read_text())


def compare(megabytes: int, rank_counts: list[int], ways: list[str], dtypes: list[str]) -> int:
    """Measure all ways on all numbers of ranks, and hold the claims against what was found."""
    good, cores = True, len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder, megabytes)
        size = (folder / "teacher" / "model.safetensors").stat().st_size
        print(f"a teacher of {size / 1e9:.2f} GB in float32, {cores} cores, one thread a rank", flush=True)
        by_count = {ranks: measure(folder, ranks, ways, dtypes) for ranks in rank_counts}
    for dtype in dtypes:
        bytes_there = size * (DTYPES[dtype] or torch.float32).itemsize / 4
        print(f"dtype {dtype}: {bytes_there / 1e9:.2f} GB")
        for way in ways:
            alone = by_count[rank_counts[0]][f"{way}/{dtype}"]
            for ranks in rank_counts:
                found = by_count[ranks][f"{way}/{dtype}"]
                share = found["memory"] / bytes_there
                slower, harder = found["first"] / alone["first"], found["work"] / alone["work"]
                print(
                    f"  {way:<16} {ranks} rank(s): {share:5.2f} x the teacher on the node; loaded in "
                    f"{found['load']:5.2f} s, first output after {found['first']:5.2f} s ({slower:4.2f} x "
                    f"{rank_counts[0]} rank), of which a later forward takes {found['forward']:5.2f} s; processor time "
                    f"{found['work']:5.2f} s ({harder:4.2f} x)"
                )
                if way == WAYS[0]:
                    good &= share <= MOST_MEMORY
                    good &= (slower if ranks <= cores else harder) <= MOST_TIME
    return 0 if good else 1


class Deep(nn.Module):
    """Blocks of two large matrices."""

    def __init__(self, width: int = 8192, blocks: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width, bias=False), nn.GELU(), nn.Linear(width, width, bias=False))
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of the last block."""
        for block in self.blocks:
            x = x + block(x)
        return x


def seconds(call: Callable[[], object], rounds: int = 5) -> float:
    """The median time of a call on the GPU, after two that warm up."""
    times = []
    for number in range(rounds + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if number > 1:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure_bandwidth(device: torch.device) -> float:
    """Bytes a second from pinned host memory to the GPU."""
    host = torch.empty(1 << 30, dtype=torch.uint8).pin_memory()
    there = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    return host.nbytes / seconds(lambda: there.copy_(host, non_blocking=True))


def stream() -> int:
    """Offload against the longer of computing and copying."""
    from safetensors.torch import save_file

    from samestep.teacher.frozen_model import FrozenModel
    from samestep.teacher.offload import place_offloaded, place_on_disk
    from samestep.teacher.options import Ground, TeacherOptions
    from samestep.teacher.weight_files import open_weights

    device = torch.device("cuda", 0)
    bandwidth = measure_bandwidth(device)
    good = True
    with tempfile.TemporaryDirectory() as place, Run(global_batch=1, folder=Path(place) / "logs") as run:
        with torch.device("meta"):
            names = list(Deep().state_dict())
        generator = torch.Generator(device).manual_seed(0)
        state = {name: torch.randn(8192, 8192, generator=generator, device=device) * 1e-3 for name in names}
        save_file({name: value.bfloat16().cpu() for name, value in state.items()}, Path(place) / "teacher.safetensors")
        del state
        path = Path(place) / "teacher.safetensors"
        size = path.stat().st_size
        resident = run.teacher(Deep, weights=path, placement="gpu")
        ground = Ground(run._comm, run.device, run.folder, run.print, run.once)
        streamed = {}
        for name, place_it in (("offload", place_offloaded), ("disk", place_on_disk)):
            streamed[name] = place_it(ground, FrozenModel(Deep, open_weights(path)), TeacherOptions())
        copying = size / bandwidth
        print(f"{size / 1e9:.2f} GB in 12 blocks over {bandwidth / 1e9:.1f} GB/s: {1e3 * copying:.1f} ms a pass")
        with torch.no_grad():
            for rows in (64, 8192, 32768, 131072):
                x = torch.randn(rows, 8192, device=device, dtype=torch.bfloat16)
                computing = seconds(lambda x=x: resident(x))
                best = max(computing, copying)
                told = [f"{rows:>6} rows: computing {1e3 * computing:6.1f} ms, the longer of both {1e3 * best:6.1f} ms"]
                for name, placed in streamed.items():
                    assert torch.equal(placed(x), resident(x))
                    took = {}
                    for ahead in (True, False):
                        placed.prefetch = ahead
                        took[ahead] = seconds(lambda x=x, placed=placed: placed(x))
                    ratio = took[True] / best
                    told.append(
                        f"{name} {1e3 * took[True]:6.1f} ms ({ratio:4.2f} x; not ahead {1e3 * took[False]:6.1f})"
                    )
                    good &= name == "disk" or took[True] <= MOST_STREAM * best
                print("; ".join(told), flush=True)
        for placed in streamed.values():
            placed.close()
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    options = parser.parse_args()
    if options.rank_of:
        rank(options.rank_of, options.ways, options.dtype)
        return 0
    return (
        stream() if options.device == "cuda" else compare(options.megabytes, options.ranks, options.ways, options.dtype)
    )


if __name__ == "__main__":
    raise SystemExit(main())

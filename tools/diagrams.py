"""Draw the pictures of the documentation into docs/images: `python tools/diagrams.py [NAME ...]`.

Every picture is an entry of `PICTURES`; `failure` starts a real `samestep run` and shows what it prints.
"""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from svg_kit import Drawing

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
RANKS = ("blue", "green", "orange")


def global_batch() -> Drawing:
    """One global batch on 1, 2 and 3 ranks."""
    samples = (9, 2, 6, 7, 3, 1, 4, 5)
    drawing = Drawing(800, 346, "A global batch of 8 samples split over 1, 2 and 3 ranks")
    drawing.text(24, 36, "One optimizer step: a global batch of 8 samples", "title")
    for at, sample in enumerate(samples):
        drawing.label(140 + at * 46, 56, 40, 34, "plain", str(sample))
    drawing.text(24, 78, "order", "soft")
    drawing.text(600, 78, "fixed by seed and epoch", "soft")
    for row, size in enumerate((1, 2, 3)):
        y, x, first = 122 + row * 62, 140.0, 0
        drawing.text(24, y + 22, f"{size} rank{'s' if size > 1 else ''}", "bold")
        rows = -(-len(samples) // size)
        for rank in range(size):
            count = len(samples) // size + (rank < len(samples) % size)
            for sample in samples[first : first + count]:
                drawing.label(x, y, 40, 34, RANKS[rank], str(sample))
                x += 46
            if count < rows:
                drawing.label(x, y, 40, 34, "none dashed", "pad", words="soft small")
                x += 46
            drawing.text(x - rows * 23 - 3, y + 50, f"rank {rank}", "soft small middle")
            x, first = x + 14, first + count
        drawing.text(600, y + 22, "mean of the 8 losses")
    footer = "Padding keeps the shapes equal on all ranks. Its weight is 0 in the loss, in metrics and in the ledger."
    drawing.text(24, 330, footer, "soft small")
    return drawing


def resume() -> Drawing:
    """A run that is killed and resumes on another number of ranks."""
    drawing = Drawing(800, 370, "A run on 4 ranks is killed, resumes on 2 ranks and ends on 3")
    drawing.text(24, 36, "Kill and resume on another world size", "title")
    for lane in range(4):
        drawing.text(24, 107 + lane * 42, f"rank {lane}", "soft")
    spans = [(96, 336, 4, "4 ranks"), (420, 560, 2, "2 ranks"), (600, 740, 3, "3 ranks")]
    for x1, x2, size, name in spans:
        drawing.text((x1 + x2) / 2, 70, name, "bold middle")
        for lane in range(size):
            drawing.box(x1, 86 + lane * 42, x2 - x1, 30, "blue")
    for lane in range(4):  # the steps after the last checkpoint
        drawing.box(296, 86 + lane * 42, 40, 30, "red dashed")
    drawing.text(338, 191, "✕ killed", "alert bold")
    for x, name in ((196, "step-100"), (296, "step-200"), (560, "step-300"), (740, "step-400")):
        drawing.path(f"M{x} 80 L{x} 266", "dashed")
        drawing.label(x - 34, 268, 68, 24, "green", name, words="small")
    drawing.path("M296 292 L296 314 L408 314 L408 101")
    drawing.arrow(408, 101, 420, 101)
    drawing.text(349, 333, "load step-200 on 2 ranks", "small middle")
    drawing.arrow(562, 100, 598, 100)
    drawing.text(650, 333, "a node joins: save, load on 3 ranks", "small middle")
    footer = "The red steps are trained again with the same samples. The result equals that of an undisturbed run."
    drawing.text(24, 356, footer, "soft small")
    return drawing


def teacher_placements() -> Drawing:
    """Where the weights of a teacher are, placement by placement."""
    drawing = Drawing(860, 520, "The placements of a teacher: where its weights are on a node with two GPUs")
    drawing.text(24, 36, "Where the weights of a teacher are: one node, two ranks", "title")
    drawing.label(610, 20, 84, 24, "blue", "student", words="small")
    drawing.label(704, 20, 132, 24, "orange", "teacher weights", words="small")
    cards: list[tuple[str, str, str, tuple[float, float], float, float]] = [
        # name, two lines of text, teacher's part of GPU 0 and GPU 1, of host memory, of disk
        ("gpu", "a full copy per rank", "", (1, 1), 0, 0),
        ("cpu", "one copy per node,", "computes on the CPU", (0, 0), 1, 0),
        ("balanced", "layers on several GPUs;", "also sequential, custom", (0.5, 0.5), 0, 0),
        ("sharded", "1/N per rank; layers are", "gathered when needed", (0.5, 0.5), 0, 0),
        ("offload", "one copy per node; two", "blocks at a time on a GPU", (0.25, 0.25), 1, 0),
        ("disk", "weight files; two blocks", "at a time on a GPU", (0.25, 0.25), 0, 1),
        ("served", "one rank or process holds", "it and answers all ranks", (0, 1), 0, 0),
        ("cached", "outputs on disk, computed", "once per sample", (0, 0), 0, 0.6),
    ]
    for at, (name, line, more, gpus, host, disk) in enumerate(cards):
        x, y = 24 + at % 4 * 206, 62 + at // 4 * 226
        drawing.box(x, y, 194, 212, "none", radius=8)
        drawing.text(x + 12, y + 24, name, "mono bold")
        if name in ("offload", "disk", "cached"):  # drawn first: boxes that they pass cover them
            start = y + 104 if name == "offload" else y + 136
            drawing.arrow(x + 52, start, x + 52, y + 88)
            drawing.arrow(x + 142, start, x + 142, y + 88)
        for gpu, part in enumerate(gpus):
            left = x + 12 + gpu * 90
            drawing.box(left, y + 36, 80, 52, "plain")
            drawing.text(left + 6, y + 50, f"GPU {gpu}", "soft small")
            drawing.box(left + 6, y + 56, 20, 26, "blue", radius=3)
            if part:
                drawing.box(left + 30, y + 56, 44 * part, 26, "orange", radius=3)
        for row, (label, part) in enumerate((("host memory", host), ("disk", disk))):
            top = y + 104 + row * 32
            drawing.box(x + 12, top, 170, 24, "plain")
            if part:
                drawing.box(x + 106, top + 4, 70 * part, 16, "orange", radius=3)
            drawing.text(x + 18, top + 16, label, "soft small")
        if name in ("sharded", "served"):
            drawing.path(f"M{x + 92} {y + 62} L{x + 102} {y + 62}")
            drawing.path(f"M{x + 92} {y + 70} L{x + 102} {y + 70}")
        drawing.text(x + 12, y + 182, line, "small")
        drawing.text(x + 12, y + 199, more, "small")
    return drawing


def checkpoint_publish() -> Drawing:
    """How a checkpoint becomes visible in one rename."""
    drawing = Drawing(916, 350, "A checkpoint is written to a temporary folder and published by one rename")
    drawing.text(24, 36, "How a checkpoint is published", "title")
    stages = [
        ("every rank", "copies its tensors", "to host memory", "(training waits)"),
        ("every rank", "writes its file:", "fsync, read back,", "compare checksum"),
        ("rank 0", "writes manifest.json", "with sizes and", "checksums, fsync"),
        ("rank 0", "renames the folder", "to its final name,", "fsync of the parent"),
        ("rank 0", "updates `latest`,", "removes the oldest", "checkpoints"),
    ]
    for at, (who, *lines) in enumerate(stages):
        x, kind = 24 + at * 178, ("blue", "plain", "plain", "green", "plain")[at]
        drawing.text(x + 78, 70, who, "soft middle")
        drawing.label(x, 80, 156, 84, kind, *lines)
        if at:
            drawing.arrow(x - 21, 122, x - 1, 122)
    files = ".writing-step-00000120-…/", "rank-00000.safetensors, rank-00001.…"
    drawing.label(202, 184, 334, 62, "none dashed", *files, words="mono small")
    drawing.label(
        558, 184, 334, 62, "green", "step-00000120/", "manifest, index, state, rank files", words="mono small"
    )
    drawing.path("M24 274 L536 274 M24 268 L24 280 M536 268 L536 280")
    drawing.text(280, 296, "killed here: the previous checkpoint is the newest valid one", "middle")
    drawing.path("M558 274 L892 274 M558 268 L558 280 M892 268 L892 280")
    drawing.text(725, 296, "killed here: step 120 is the newest valid one", "middle")
    footer = "After the copy, a thread does the rest while training continues. The next writer clears up after a kill."
    drawing.text(24, 332, footer, "soft small")
    return drawing


FAILING_SCRIPT = """\
import time

from samestep import Run

labels = [3, 8, 17, 4]

with Run(global_batch=4, seed=0) as run:
    train = run.shard(labels, num_workers=0)
    for epoch in train.epochs(1):
        for step in epoch:
            for batch in step:
                if batch.max() > 9:
                    raise ValueError(f"no such label: {batch.max()}")
                time.sleep(60)  # the forward and backward pass
"""


def failure() -> Drawing:
    """Show what `samestep run` prints if rank 1 raises: a real run, with its folder, date and host name replaced."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(FAILING_SCRIPT)
        command = [sys.executable, "-m", "samestep", "run", "--nproc-per-node", "2", "train.py"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP", "TORCH"))}
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        printed = (ran.stdout + ran.stderr).replace(str(Path(folder).resolve()), "/home/ada/lab")
    printed = re.sub(rf"\b{re.escape(os.uname().nodename)}\b", "node1", printed)
    printed = re.sub(r"train-\d{8}-\d{6}", "train-20260131-093005", printed)
    lines = ["$ samestep run --nproc-per-node 2 train.py"]
    for line in printed.rstrip().splitlines():
        wrapped = re.findall(r".{1,92}(?:\s|$)|\S{93,}", line) or [""]
        lines += [wrapped[0].rstrip(), *("    " + rest.rstrip() for rest in wrapped[1:])]
    lines += ["$ echo $?", str(ran.returncode)]
    drawing = Drawing(800, 58 + 19 * len(lines), "What samestep run prints if rank 1 raises an exception")
    for at, color in enumerate(("red", "orange", "green")):
        drawing.box(18 + at * 20, 14, 12, 12, color, radius=6)
    for number, line in enumerate(lines):
        important = "<- first failure" in line or re.match(r"\w+Error: ", line)
        kind = "alert" if important else "bold" if line.startswith("$") else "ink"
        drawing.text(20, 54 + 19 * number, line, f"mono {kind}")
    return drawing


@dataclass(frozen=True)
class Stop:
    """One box of a way through the code: a module, a function in it, and what happens there."""

    module: str
    function: str
    first: str
    second: str = ""
    kind: str = "plain"


SAMPLE = (
    Stop("training/run.py", "Run.shard", "opens this rank's", "part of a dataset"),
    Stop("training/shard.py", "Shard.steps", "micro-batches of every", "step of the epoch"),
    Stop("data/permutation.py", "OrderReader.read", "which sample is at", "which position"),
    Stop("data/partition.py", "Partition.micro_batches", "which positions this", "rank reads; padding"),
    Stop("data/loader.py", "Loader.read", "reads them in workers,", "copies to the device"),
    Stop("data/sample_rng.py", "SampleContext", "random numbers keyed", "by sample"),
    Stop("training/step_loop.py", "StepLoop.run", "one step to your loop,", "then its end"),
    Stop("training/step.py", "Step.__iter__", "one micro-batch", "to your loop"),
    Stop("your script", "model(inputs)", "one loss per sample", kind="blue"),
    Stop("training/step.py", "Step.mean", "scaled to the mean over", "the global batch"),
    Stop("parallel/wrapped_model.py", "set_gradient_sync", "all-reduce with the last", "micro-batch only"),
    Stop("data/ledger.py", "record_training", "the samples of this", "step have counted"),
)
TENSOR = (
    Stop("your script", "checkpoint.save()", "on every rank", kind="blue"),
    Stop("checkpoint/checkpoint.py", "Checkpoint.save", "at a step boundary,", "the same on all ranks"),
    Stop("checkpoint/parts.py", "Parts.state", "state under your names,", "without wrappers"),
    Stop("checkpoint/tensor_storage.py", "HostStaging.stage", "this rank's chunks,", "copied to host memory"),
    Stop("checkpoint/save.py", "BackgroundSave", "a thread writes while", "training continues"),
    Stop("checkpoint/manifest.py", "write_verified", "fsync, read back,", "SHA-256"),
    Stop("checkpoint/save.py", "BackgroundSave._publish", "manifest, then", "one rename"),
    Stop("checkpoint/checkpoint_folder.py", "Retention.apply", "removes the oldest,", "keeps the best"),
    Stop("your script", "run.checkpoint(...)", "on another world size", kind="blue"),
    Stop("checkpoint/restore.py", "restore", "newest valid one, every", "byte checked by all ranks"),
    Stop("checkpoint/tensor_storage.py", "CheckpointReader.load_into", "the chunks that this", "rank's layout needs"),
    Stop("checkpoint/parts.py", "Parts.prepare_load", "into your model and", "optimizer"),
)
FAILURE = (
    Stop("your script", "raise ValueError", "on rank 3", kind="red"),
    Stop("training/lifecycle.py", "Lifecycle.fail", "leaves the run, keeps", "the process group"),
    Stop("distributed/communicator.py", "Communicator.abandon", "posts the cause to", "the shared store"),
    Stop("distributed/rank_status.py", "StatusBoard.end", "what each rank does", "and where"),
    Stop("distributed/communicator.py", "Communicator._explain", "on waiting ranks: who", "failed, at which line"),
    Stop("launch/agent.py", "run_agent", "ends the other ranks,", "restarts if allowed"),
    Stop("launch/rank_logs.py", "RankLogs", "output and error file", "of every rank"),
    Stop("launch/launcher.py", "Launcher.run", "collects the failures", "of this node"),
    Stop("launch/failure_report.py", "sort_by_cause", "own failures before", "lost connections"),
    Stop("launch/failure_report.py", "format_report", "a table, then one", "traceback"),
    Stop("cli/run_command.py", "command", "exit code of the", "first failure"),
)


def way(title: str, stops: tuple[Stop, ...]) -> Drawing:
    """Draw the stops of a way in rows of four, from left to right and from top to bottom."""
    rows = -(-len(stops) // 4)
    drawing = Drawing(1000, 46 + rows * 122, title)
    drawing.text(24, 36, title, "title")
    for at, stop in enumerate(stops):
        x, y = 24 + at % 4 * 242, 56 + at // 4 * 122
        drawing.box(x, y, 226, 96, stop.kind)
        drawing.text(x + 10, y + 22, stop.module, "small" if len(stop.module) > 28 else "bold small")
        drawing.text(x + 10, y + 44, stop.function, "mono small")
        drawing.text(x + 10, y + 65, stop.first, "soft small")
        drawing.text(x + 10, y + 82, stop.second, "soft small")
        if at % 4:
            drawing.arrow(x - 15, y + 48, x - 1, y + 48)
        elif at:
            drawing.path(f"M860 {y - 26} L860 {y - 13} L{x + 60} {y - 13}")
            drawing.arrow(x + 60, y - 13, x + 60, y - 1)
    return drawing


PICTURES = {
    "global-batch": global_batch,
    "resume": resume,
    "teacher-placements": teacher_placements,
    "checkpoint-publish": checkpoint_publish,
    "failure": failure,
    "way-sample": partial(way, "A sample: from the dataset to the gradient", SAMPLE),
    "way-tensor": partial(way, "A tensor: from the model to a file and back on another world size", TENSOR),
    "way-failure": partial(way, "A failure: from an exception on rank 3 to your screen", FAILURE),
}


def main(names: list[str]) -> None:
    """Draw the named pictures, or all."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name in names or PICTURES:
        PICTURES[name]().write(IMAGES / f"{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])

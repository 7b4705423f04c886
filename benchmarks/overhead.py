"""The overhead of a training step: samestep compared with a hand-written DDP loop, Lightning, Fabric and Accelerate.

    python benchmarks/overhead.py [--task mlp transformer] [--rounds 30] [--json FILE]
    python benchmarks/overhead.py --device cuda --contender samestep --loss outside forward chunked [--compile]
    NCCL_MULTI_RANK_GPU_ENABLE=1 python benchmarks/overhead.py --device cuda --nproc 2 [--masked]
    NCCL_MULTI_RANK_GPU_ENABLE=1 python benchmarks/overhead.py --device cuda --nproc 2 --strategy fsdp zero2

Each contender has its own ranks, started once: two on the CPU with gloo and one thread each, one on a GPU, or several
on one GPU over NCCL (2.30 or newer, which accepts several ranks per GPU with that variable). They run
short blocks of steps in turn, in a different order each round, and are idle in between. Ratios are computed per round,
so that a change of the machine's speed affects all contenders, and the median over the rounds is reported. "best"
compares the fastest rounds and "cpu" the CPU seconds of rank 0, which other processes on the machine disturb less. All
contenders read the same rows through a DataLoader without workers, shuffle, use the same AdamW, and log their loss
every 50 steps, or with their own logger at its default. None writes checkpoints. On a GPU all use bf16 with TF32 and a
fused AdamW, except the newcomer (`--newcomer`), who writes the loop of a tutorial for one rank, which trains the same
global batch: fp32, no TF32, the default AdamW.
With FSDP the hand-written loop shards the same blocks with `fully_shard`, and exchanges gradients in the last of
several micro-batches (`--micro-batches 1 4`). A masked mean (`--masked`) is also compared with the plain mean of
samestep. The loss is computed outside of the model, there from an fp32 copy of the logits as in many scripts ("fp32"),
there and compiled by itself ("compiled"), in the forward of the model, or there by `linear_cross_entropy` ("chunked").
With several of these options all combinations take turns in one run, and "outside" is the ratio to the hand-written
loop with the loss outside. Memory is the peak of a step on rank 0.
"""

import argparse
import json
import multiprocessing
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import chain, count, product
from multiprocessing.connection import Connection
from pathlib import Path

from training_tasks import LOSSES, Task, build, losses

LOG_EVERY = 50


def tasks(args) -> Iterator[Task]:
    world = args.nproc or (2 if args.device == "cpu" else 1)
    sizes = {"mlp": (64, 400, 5, 40), "transformer": (4, 200, 1, 4), "gpt2": (32 // world, 40, 3, 10)}
    for name, strategy, parts, loss in product(args.task, args.strategy, args.micro_batches, args.loss):
        yield Task(name, *sizes[name], args.device, args.compile, world, strategy, parts, loss)


def adamw(task: Task, parameters):
    import torch

    return torch.optim.AdamW(parameters, lr=1e-4, **({"fused": True} if task.device == "cuda" else {}))


class Turns:
    """Called before every step: starts and stops the timer, and waits for the next turn at the end of one."""

    def __init__(self, task: Task, pipe: Connection) -> None:
        self._task, self._pipe = task, pipe
        self._length = task.warm_up + task.timed
        self._step = self._length
        self._wall = self._cpu = 0.0
        self._profile = None  # of this turn, and where it is written

    def __call__(self) -> None:  # noqa: D102 see the class
        if self._step == self._length:
            self._wait()
        if self._step == self._task.warm_up:
            self._finish_queue()
            if self._task.device == "cuda":
                import torch

                torch.cuda.reset_peak_memory_stats()
            if self._profile is not None:
                self._profile[0].start()
            self._wall, self._cpu = time.perf_counter(), time.process_time()
        self._step += 1

    def _wait(self) -> None:
        self._finish_queue()
        seconds = time.perf_counter() - self._wall, time.process_time() - self._cpu
        peak = 0
        if self._task.device == "cuda":
            import torch

            peak = torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()  # the contenders share one GPU
        if self._profile is not None:
            self._write_profile(*self._profile)
        self._pipe.send([*(value / self._task.timed for value in seconds), peak])
        message = self._pipe.recv()
        if message == "stop":
            os._exit(0)  # a Trainer cannot be stopped quickly within an epoch
        if message != "go":
            from torch.profiler import profile

            self._profile = profile(), message
        self._step = 0

    def _write_profile(self, profile, file: str) -> None:
        self._profile = None
        profile.stop()
        order = "self_device_time_total" if self._task.device == "cuda" else "self_cpu_time_total"
        table = profile.key_averages().table(order, row_limit=80, max_name_column_width=100)
        Path(file).write_text(f"{self._task}: {self._task.timed} steps\n{table}\n")

    def _finish_queue(self) -> None:
        if self._task.device == "cuda":
            import torch

            torch.cuda.synchronize()


class Log:
    """A line of JSON every LOG_EVERY steps, for contenders without a logger."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "log.jsonl").open("a")

    def __call__(self, step: int, loss) -> None:  # noqa: D102 see the class
        if step % LOG_EVERY == 0:
            self._file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
            self._file.flush()


def batches(task: Task, data, sampler) -> "object":
    from torch.utils.data import DataLoader

    pinned = task.device == "cuda"
    return DataLoader(data, task.rows, sampler=sampler, shuffle=sampler is None, drop_last=True, pin_memory=pinned)


def by_hand(task: Task, turn: Turns, folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DistributedSampler

    model, data = build(task)
    model.to(task.device)
    sampler = None
    if task.device == "cuda":
        torch.set_float32_matmul_precision("high")
    if task.world > 1:
        dist.init_process_group(backend(task))
        sampler = DistributedSampler(data)
    sharded = task.world > 1 and task.strategy != "ddp"
    if sharded:
        shard_by_hand(task, model)
    elif task.compile:
        model = torch.compile(model)
    if task.world > 1 and not sharded:
        model = DistributedDataParallel(model)
    optimizer, log, steps = adamw(task, model.parameters()), Log(folder), count()
    for epoch in count():
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in batches(task, data, sampler):
            turn()
            parts = zip(*(tensor.chunk(task.micro_batches) for tensor in batch), strict=True)
            for number, part in enumerate(parts, 1):
                inputs, targets = (tensor.to(task.device, non_blocking=True) for tensor in part)
                sync_gradients(model, sharded, number == task.micro_batches)
                with torch.autocast(task.device, torch.bfloat16, enabled=task.device == "cuda"):
                    loss = losses(task, model, inputs, targets, "mean") / task.micro_batches
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(next(steps), loss)


def shard_by_hand(task: Task, model) -> None:
    """FSDP2 as its tutorial writes it: every block, then the rest, in bf16 on a GPU, with gradients reduced in fp32."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if task.device == "cuda" else MixedPrecisionPolicy()
    for block in getattr(model, "blocks", model):
        if not any(True for _ in block.parameters()):
            continue
        if task.compile:
            block.compile()
        fully_shard(block, mp_policy=policy, reshard_after_forward=task.strategy == "fsdp")
    fully_shard(model, mp_policy=policy)


def sync_gradients(model, sharded: bool, last: bool) -> None:
    """Exchange gradients in the backward pass of the last micro-batch only."""
    if sharded:
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
    elif hasattr(model, "require_backward_grad_sync"):
        model.require_backward_grad_sync = last


def by_newcomer(task: Task, turn: Turns, folder: Path) -> None:
    """The loop of a tutorial, on one rank."""
    import torch

    model, data = build(task)
    model.to(task.device)
    optimizer, log, steps = torch.optim.AdamW(model.parameters(), lr=1e-4), Log(folder), count()
    for _ in count():
        for batch in batches(task, data, None):
            turn()
            inputs, targets = (tensor.to(task.device) for tensor in batch)
            optimizer.zero_grad()
            loss = losses(task, model, inputs, targets, "mean")
            loss.backward()
            optimizer.step()
            log(next(steps), loss)


def by_samestep(task: Task, turn: Turns, folder: Path, masked: bool = False) -> None:
    import torch
    from torch.optim import AdamW

    from samestep import Run

    module, data = build(task)
    micro_batch = task.rows // task.micro_batches
    with Run(global_batch=task.rows * task.world, seed=0, folder=folder, compile=task.compile) as run:
        model = run.wrap(module, task.strategy if task.world > 1 else None)
        optimizer = AdamW(model.parameters(), lr=1e-4)
        shard = run.shard(data, shuffle=True, drop_last=True, num_workers=0, micro_batch=micro_batch)
        for epoch in shard.epochs(1 << 30):
            for step in epoch:
                turn()
                for inputs, targets in step:
                    values = losses(task, model, inputs, targets, "none")
                    step.mean(values, mask=torch.ones_like(targets) if masked else None).backward()
                optimizer.step()
                optimizer.zero_grad()


def by_masked_samestep(task: Task, turn: Turns, folder: Path) -> None:
    by_samestep(task, turn, folder, masked=True)


def backend(task: Task) -> str:
    return "gloo" if task.device == "cpu" else "nccl"


def layout(task: Task) -> dict[str, int]:
    """Devices and nodes for Lightning: ranks that share a GPU are nodes with one GPU each."""
    return {"devices": task.world} if task.device == "cpu" else {"devices": 1, "num_nodes": task.world}


def lightning_packages():
    """Lightning is published under two names."""
    try:
        import lightning.fabric as fabric
        import lightning.pytorch as pl
        from lightning.fabric.plugins import environments
    except ImportError:
        import lightning_fabric as fabric
        import pytorch_lightning as pl
        from lightning_fabric.plugins import environments
    return pl, fabric, environments


def by_lightning(task: Task, turn: Turns, folder: Path) -> None:
    import torch

    pl, environments = lightning_packages()[0], lightning_packages()[2]
    if task.device == "cuda":
        torch.set_float32_matmul_precision("high")

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, _ = build(task)

        def training_step(self, batch):
            inputs, targets = batch
            loss = losses(task, self.model, inputs, targets, "mean")
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return adamw(task, self.parameters())

    class TurnCallback(pl.Callback):
        def on_train_batch_start(self, *_) -> None:
            turn()

    net = Net()
    if task.compile:
        net.model.compile()
    trainer = pl.Trainer(
        accelerator="gpu" if task.device == "cuda" else "cpu",
        **layout(task),
        strategy=pl.strategies.DDPStrategy(process_group_backend=backend(task)) if task.world > 1 else "auto",
        plugins=[environments.TorchElasticEnvironment()] if task.world > 1 else None,
        precision="bf16-mixed" if task.device == "cuda" else "32-true",
        max_epochs=-1,
        logger=pl.loggers.CSVLogger(folder),
        log_every_n_steps=LOG_EVERY,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[TurnCallback()],
    )
    trainer.fit(net, batches(task, build(task)[1], None))


def by_fabric(task: Task, turn: Turns, folder: Path) -> None:
    import torch

    _, package, environments = lightning_packages()
    if task.device == "cuda":
        torch.set_float32_matmul_precision("high")
    fabric = package.Fabric(
        accelerator="gpu" if task.device == "cuda" else "cpu",
        **layout(task),
        strategy=package.strategies.DDPStrategy(process_group_backend=backend(task)) if task.world > 1 else "auto",
        plugins=[environments.TorchElasticEnvironment()] if task.world > 1 else None,
        precision="bf16-mixed" if task.device == "cuda" else "32-true",
    )
    fabric.launch()
    module, data = build(task)
    module.to(task.device)
    if task.compile:
        module = torch.compile(module)
    model, optimizer = fabric.setup(module, adamw(task, module.parameters()))
    loader, log, steps = fabric.setup_dataloaders(batches(task, data, None)), Log(folder), count()
    for _ in count():
        for inputs, targets in loader:
            turn()
            loss = losses(task, model, inputs, targets, "mean")
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            log(next(steps), loss)


def by_accelerate(task: Task, turn: Turns, folder: Path) -> None:
    import torch
    from accelerate import Accelerator

    if task.device == "cuda":
        torch.set_float32_matmul_precision("high")
    module, data = build(task)
    accelerator = Accelerator(
        cpu=task.device == "cpu",
        mixed_precision="bf16" if task.device == "cuda" else "no",
        dynamo_backend="inductor" if task.compile else "no",
    )
    module.to(task.device)
    model, optimizer, loader = accelerator.prepare(module, adamw(task, module.parameters()), batches(task, data, None))
    log, steps = Log(folder), count()
    for _ in count():
        for inputs, targets in loader:
            turn()
            loss = losses(task, model, inputs, targets, "mean")
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            log(next(steps), loss)


CONTENDERS: dict[str, Callable[[Task, Turns, Path], None]] = {
    "hand-written": by_hand,
    "samestep": by_samestep,
    "lightning": by_lightning,
    "fabric": by_fabric,
    "accelerate": by_accelerate,
    "masked": by_masked_samestep,
    "newcomer": by_newcomer,
}
PEERS = ("lightning", "fabric", "accelerate")


def work(name: str, task: Task, rank: int, port: int, pipe: Connection, folder: Path) -> None:
    """Run one rank of one contender until it receives "stop"."""
    if task.world > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(task.world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        node, local, size = (0, rank, task.world) if task.device == "cpu" else (rank, 0, 1)
        os.environ.update(GROUP_RANK=str(node), LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(size))
    if task.device == "cpu":  # otherwise Lightning uses more threads, and samestep a GPU
        os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    sys.stdout = sys.stderr = (folder / f"output-{rank}.txt").open("w", buffering=1)
    import torch

    if task.device == "cpu":
        torch.set_num_threads(1)
    try:
        CONTENDERS[name](task, Turns(task, pipe), folder)
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise


class Failed(Exception):
    """A contender cannot run on this machine."""


class Contender:
    """The ranks of one contender, which wait for their turn."""

    def __init__(self, name: str, task: Task, folder: Path) -> None:
        self.name, self.task, self._pipes, self._processes = name, task, [], []
        if name == "newcomer":
            task = replace(task, rows=task.rows * task.world, world=1)
        context, port = multiprocessing.get_context("spawn"), free_port()
        for rank in range(task.world):
            pipe, child_pipe = context.Pipe()
            arguments = (name, task, rank, port, child_pipe, folder)
            process = context.Process(target=work, args=arguments, daemon=True)
            process.start()
            child_pipe.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def ready(self) -> list[float]:
        """Wait until every rank waits for a turn; return wall and CPU seconds per step of rank 0 in its last turn."""
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, str):
                raise Failed(f"{self.name} failed: {answer}")
        return answers[0]

    def go(self, profile: Path | None = None) -> None:
        """Start one block of steps; rank 0 writes what it calls to a file if there is one."""
        for rank, pipe in enumerate(self._pipes):
            pipe.send("go" if profile is None or rank else str(profile))

    def turn(self) -> list[float]:
        """Run one block of steps."""
        self.go()
        return self.ready()

    def stop(self) -> None:
        """Stop all ranks."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send("stop")
            process.join(timeout=10)
            process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def compare(groups: list[tuple[Task, list[str]]], rounds: int, profiles: Path | None) -> list[dict[str, object]]:
    """Let the contenders of all tasks take turns; return medians of times and of ratios to the hand-written loop."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as running:
        started = [[Contender(name, task, new_folder(Path(temporary))) for name in names] for task, names in groups]
        for contender in chain(*started):
            running.callback(contender.stop)
        contenders = warm_up([contender for contender in chain(*started) if can_run(contender)])
        times: dict[Contender, list[list[float]]] = {contender: [] for contender in contenders}
        for number in range(rounds):
            for contender in random.Random(number).sample(contenders, len(contenders)):
                times[contender].append(contender.turn())
        for number, contender in enumerate(contenders if profiles else ()):
            contender.go(profiles / f"profile-{number}-{contender.name}.txt")
            contender.ready()
    known = {(each.name, each.task): turns for each, turns in times.items()}
    return [
        summarize(each.task, each.name, known)
        for each in chain(*started)
        if each in times and ("hand-written", each.task) in known
    ]


def new_folder(parent: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=parent))


def warm_up(contenders: "list[Contender]") -> "list[Contender]":
    """The first round, which is not counted: it includes lazy imports and compilation. Returns those that can run."""
    working = []
    for name in dict.fromkeys(contender.name for contender in contenders):
        group = [contender for contender in contenders if contender.name == name]
        # contenders of one kind compile at once, and fit on a GPU; ranks that share a GPU are slow if others run
        compile_at_once = all(contender.task.compile and contender.task.world == 1 for contender in group)
        for some in [group] if compile_at_once else [[contender] for contender in group]:
            for contender in some:
                contender.go()
            working.extend(contender for contender in some if can_run(contender))
    return working


def can_run(contender: Contender) -> bool:
    """Whether a contender waits for a turn; a missing package must not end the comparison."""
    try:
        contender.ready()
    except (Failed, EOFError) as error:
        print(f"skipped: {error}", file=sys.stderr)
        return False
    return True


def summarize(task: Task, name: str, known: dict[tuple[str, Task], list[list[float]]]) -> dict[str, object]:
    own, by_hand = known[name, task], known["hand-written", task]
    outside = known.get(("hand-written", replace(task, loss="outside")))
    plain = known.get(("samestep", task)) if name == "masked" else None
    pairs = list(zip(own, by_hand, strict=True))
    return {
        **asdict(task),
        "contender": name,
        "ms": 1e3 * statistics.median(turn[0] for turn in own),
        "ratio": ratio(own, by_hand),
        "best_ratio": min(turn[0] for turn in own) / min(hand[0] for hand in by_hand),
        "added_us": 1e6 * statistics.median(turn[0] - hand[0] for turn, hand in pairs),
        "cpu_ratio": statistics.median(turn[1] / hand[1] for turn, hand in pairs),
        "added_cpu_us": 1e6 * statistics.median(turn[1] - hand[1] for turn, hand in pairs),
        "gib": max(turn[2] for turn in own) / 2**30,
        "to_outside": ratio(own, outside) if outside and task.loss != "outside" else None,
        "to_plain": ratio(own, plain) if plain else None,
        "rounds": len(own),
        "turns_ms": [1e3 * turn[0] for turn in own],
    }


def ratio(own: list[list[float]], other: list[list[float]]) -> float:
    return statistics.median(mine[0] / its[0] for mine, its in zip(own, other, strict=True))


def line(row) -> str:
    layout = f"{row['strategy']} x {row['micro_batches']}" if row["world"] > 1 else "one rank"
    layout += "" if row["loss"] == "outside" else f", {row['loss']}"
    memory = f"   {row['gib']:6.2f} GiB" if row["gib"] else ""
    memory += "".join(
        f"   x {row[name]:.4f} of {of}"
        for name, of in (("to_outside", "outside"), ("to_plain", "the plain mean"))
        if row[name] is not None
    )
    return (
        f"{row['name']:12} {layout:17} {row['contender']:13} {row['ms']:9.3f} ms/step"
        f"   x {row['ratio']:.4f} {row['added_us']:+8.0f} us   best x {row['best_ratio']:.4f}"
        f"   cpu x {row['cpu_ratio']:.4f} {row['added_cpu_us']:+8.0f} us{memory}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=["mlp", "transformer", "gpt2"])
    parser.add_argument("--contender", nargs="+", choices=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--nproc", type=int, help="ranks per contender; with --device cuda they share one GPU")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--loss", nargs="+", choices=LOSSES, default=["outside"])
    parser.add_argument("--strategy", nargs="+", choices=["ddp", "fsdp", "zero2"], default=["ddp"])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1], help="per rank and step")
    parser.add_argument("--masked", action="store_true", help="also samestep with a masked mean")
    parser.add_argument("--newcomer", action="store_true", help="also a plain loop in fp32, on one rank")
    parser.add_argument("--profile", type=Path, help="write what each contender calls to a file in this folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write one JSON object per line to this file")
    args = parser.parse_args()
    args.task = args.task or (["mlp", "transformer"] if args.device == "cpu" else ["gpt2"])
    if "mlp" in args.task and "chunked" in args.loss:
        parser.error("--loss chunked needs a language model: --task transformer or gpt2")
    groups = [(task, contenders(args, task)) for task in tasks(args)]
    rows = compare(groups, args.rounds, args.profile)
    print("\n".join(map(line, rows)))
    if args.json:
        args.json.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def contenders(args: argparse.Namespace, task: Task) -> list[str]:
    plain = task.strategy == "ddp" and task.micro_batches == 1  # what the peers are written for
    chosen = args.contender or ["samestep", *(PEERS if plain else ())]
    newcomer = args.newcomer and task.loss == "outside"
    return list(dict.fromkeys(["hand-written", *chosen, *["masked"] * args.masked, *["newcomer"] * newcomer]))


if __name__ == "__main__":
    main()

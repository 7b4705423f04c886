"""Peak memory of a step: predicted by a trace without a GPU, and measured in training through Run.

    python benchmarks/memory.py [--case NAME ...] [--json FILE]        on a machine with a GPU
    python benchmarks/memory.py --predict-only [--case NAME ...] [--json FILE]      anywhere
    python benchmarks/memory.py --forecasts FILE [--case NAME ...]     with a GPU, after such a run

Every case is traced by `samestep.planner.trace` in a process that sees no GPU, and trained for a few steps with `Run`,
`run.wrap` and `run.shard` on one rank. The peak is torch's `max_memory_allocated` after the warm-up steps. For
comparison the table has `accelerate estimate-memory` (its own function) and DeepSpeed's ZeRO-2 estimate for one GPU
(its formula: 20 bytes per parameter), which do not count activations. Step times are for information only. The peak of
a case whose shapes depend on computed values is forecast as an upper bound, which the summary does not count as an
error.
"""

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, interpolate, mse_loss

from model_families import FAMILIES

MIB = 2**20
WARM, TIMED = 3, 6


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    workload: str
    samples: int
    precision: str
    optimizer: str = "AdamW"
    recompute: bool = False

    @property
    def name(self) -> str:
        """Name in the table."""
        suffix = "-recomputed" if self.recompute else ""
        return f"{self.workload}-{self.precision}-{self.optimizer}{suffix}-{self.samples}"


CASES = [
    Case("resnet50", 128, "bf16", "SGD"),
    Case("resnet50", 64, "fp32", "SGD"),
    Case("resnet50", 128, "bf16", "AdamW", True),
    Case("gpt2", 16, "bf16"),
    Case("gpt2", 8, "fp32"),
    Case("gpt2", 16, "bf16", "AdamW", True),
    Case("gpt2", 2, "bf16", "SGD"),
    Case("gpt2-medium", 8, "bf16"),
    Case("gpt2-medium", 16, "bf16", "AdamW", True),
    Case("gpt2-medium", 4, "fp32", "SGD"),
    Case("vit-b", 64, "bf16"),
    Case("vit-b", 32, "fp32", "SGD"),
    Case("vit-b", 64, "bf16", "AdamW", True),
    Case("unet", 16, "bf16"),
    Case("unet", 8, "fp32", "SGD"),
    Case("unet", 16, "bf16", "AdamW", True),
    Case("frozen", 32, "bf16"),
    Case("frozen", 16, "fp32", "SGD"),
    Case("frozen", 32, "bf16", "AdamW", True),
    Case("llama", 8, "bf16"),
    Case("llama", 8, "bf16", "AdamW", True),
    Case("mlp", 64, "fp32"),
    Case("mlp", 64, "bf16", "RMSprop"),
    Case("encoder", 32, "bf16"),
    Case("bert", 32, "bf16"),
    Case("bert", 16, "fp32", "SGD"),
    Case("resnet50-nchw", 64, "bf16"),
    Case("resnet50-nchw", 64, "fp32", "SGD"),
    Case("unet-nhwc", 16, "bf16"),
    Case("chunked-gpt2", 16, "bf16"),
    Case("chunked-gpt2", 8, "fp32"),
    Case("lstm", 64, "bf16"),
    Case("lstm", 64, "fp32", "SGD"),
    Case("gru", 64, "bf16"),
    Case("mixtral", 8, "bf16"),
    Case("mixtral", 4, "fp32", "SGD"),
    Case("wav2vec2", 32, "bf16"),
    Case("wav2vec2", 16, "fp32", "SGD"),
    Case("t5", 32, "bf16"),
    Case("t5", 16, "fp32", "SGD"),
    Case("convnext", 64, "bf16"),
    Case("convnext", 64, "fp32", "SGD"),
    Case("segformer", 8, "bf16"),
    Case("segformer", 8, "fp32", "SGD"),
    Case("detector", 32, "bf16"),
    Case("proposals", 64, "bf16"),
]

CHANNELS_LAST = ("resnet50", "unet-nhwc")


class Bottleneck(nn.Module):
    """The block of ResNet-50."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.skip = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        """Run the model."""
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        return self.relu(self.norm3(self.conv3(y)) + self.skip(x))


class ResNet50(nn.Module):
    """ResNet-50 v1.5: the stride is in the 3x3 convolution."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        blocks, channels = [], 64
        for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for at in range(depth):
                blocks.append(Bottleneck(channels, width, stride if at == 0 else 1))
                channels = 4 * width
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(channels, classes)

    def forward(self, x):
        """Run the model."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Residual(nn.Module):
    """Two convolutions of a U-Net, conditioned on the time step."""

    def __init__(self, channels: int, out: int, times: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.time, self.drop = nn.Linear(times, out), nn.Dropout(0.1)
        self.norm2, self.conv2 = nn.GroupNorm(32, out), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x, time):
        """Run the model."""
        y = self.conv1(nn.functional.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(self.drop(nn.functional.silu(self.norm2(y))))


class UNet(nn.Module):
    """A diffusion U-Net: three levels down and up with skip connections."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        times = 4 * width
        self.time = nn.Sequential(nn.Linear(1, times), nn.SiLU(), nn.Linear(times, times))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        widths = (width, 2 * width, 2 * width)
        self.down = nn.ModuleList(Residual(a, b, times) for a, b in zip((width, *widths), widths, strict=False))
        self.middle = nn.ModuleList(Residual(widths[-1], widths[-1], times) for _ in range(2))
        self.up = nn.ModuleList(
            Residual(a + b, c, times)
            for a, b, c in zip(
                (2 * width, 2 * width, 2 * width), widths[::-1], (2 * width, 2 * width, width), strict=True
            )
        )
        self.norm, self.leave = nn.GroupNorm(32, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x, t):
        """Run the model."""
        time, x, skips = self.time(t[:, None]), self.enter(x), []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        for block in self.middle:
            x = block(x, time)
        for block in self.up:
            x = interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], 1), time)
        return self.leave(nn.functional.silu(self.norm(x)))


class Captioner(nn.Module):
    """A frozen image encoder and a trainable language model."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = vit(1)[0].vit.requires_grad_(False)
        self.join, self.decoder = nn.Linear(768, 768), gpt2(1)[0]

    def forward(self, images, tokens):
        """Run the model."""
        seen = self.join(self.encoder(images).last_hidden_state)
        words = self.decoder.transformer.wte(tokens)
        return self.decoder(inputs_embeds=torch.cat([seen, words], 1)).logits[:, seen.shape[1] :]


def images(samples: int, size: int = 224):
    return torch.randn(samples, 3, size, size)


def tokens(samples: int, length: int, vocabulary: int):
    return torch.randint(0, vocabulary, (samples, length))


def next_tokens(model, batch):
    """Cross entropy of every token, averaged per sample."""
    logits = model(batch[0]).logits
    return cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="none").view(len(batch[0]), -1).mean(1)


def classes(model, batch):
    out = model(batch[0])
    return cross_entropy(getattr(out, "logits", out), batch[1], reduction="none")


def resnet50(samples: int):
    return ResNet50(), (images(samples), tokens(samples, 1, 1000)[:, 0]), classes


def gpt2(samples: int, **shape: int):
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = tokens(samples, 1024, 50257)
    return GPT2LMHeadModel(GPT2Config(**shape)), (ids, ids), next_tokens


def gpt2_medium(samples: int):
    return gpt2(samples, n_layer=24, n_embd=1024, n_head=16)


def llama(samples: int):
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = tokens(samples, 1024, 32000)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config), (ids, ids), next_tokens


def vit(samples: int):
    from transformers import ViTConfig, ViTForImageClassification

    return (
        ViTForImageClassification(ViTConfig(num_labels=1000)),
        (images(samples), tokens(samples, 1, 1000)[:, 0]),
        classes,
    )


def unet(samples: int):
    def loss(model, batch):
        return mse_loss(model(batch[0], batch[1]), batch[0], reduction="none").mean((1, 2, 3))

    return UNet(), (images(samples, 128), torch.rand(samples)), loss


def frozen(samples: int):
    def loss(model, batch):
        logits = model(batch[0], batch[1])
        return cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="none").view(len(batch[1]), -1).mean(1)

    return Captioner(), (images(samples), tokens(samples, 128, 50257)), loss


def mlp(samples: int):
    layers = [m for _ in range(6) for m in (nn.Linear(4096, 4096), nn.GELU())]
    return (
        nn.Sequential(*layers, nn.Linear(4096, 10)),
        (torch.randn(samples, 4096), tokens(samples, 1, 10)[:, 0]),
        classes,
    )


class Encoder(nn.Module):
    """torch.nn.TransformerEncoder over sequences of vectors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.1, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.head = nn.Linear(768, 100)

    def forward(self, x):
        """Run the model."""
        return self.head(self.layers(x).mean(1))


def encoder(samples: int):
    return Encoder(), (torch.randn(samples, 512, 768), tokens(samples, 1, 100)[:, 0]), classes


def bert(samples: int):
    """Sentences of different lengths, with an attention mask."""
    from transformers import BertConfig, BertForSequenceClassification

    def loss(model, batch):
        return cross_entropy(model(batch[0], attention_mask=batch[1]).logits, batch[2], reduction="none")

    mask = torch.ones(samples, 384, dtype=torch.long)
    mask[0, 300:] = 0
    model = BertForSequenceClassification(BertConfig(num_labels=5))
    return model, (tokens(samples, 384, 30000), mask, tokens(samples, 1, 5)[:, 0]), loss


WORKLOADS: dict[str, Callable] = {
    "resnet50-nchw": resnet50,
    "unet-nhwc": unet,
    "bert": bert,
    "resnet50": resnet50,
    "gpt2": gpt2,
    "gpt2-medium": gpt2_medium,
    "llama": llama,
    "vit-b": vit,
    "unet": unet,
    "frozen": frozen,
    "mlp": mlp,
    "encoder": encoder,
    **FAMILIES,
}


def make_optimizer(name: str, parameters):
    settings = {"SGD": {"lr": 1e-3, "momentum": 0.9}}.get(name, {"lr": 1e-5})
    return getattr(torch.optim, name)(parameters, **settings)


class Rows:
    """Repeats one sample, so that reading data takes no time."""

    def __init__(self, batch, count: int) -> None:
        self.row, self.count = tuple(tensor[0] for tensor in batch), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        return self.row


def checkpointed_classes(model: nn.Module) -> tuple[type[nn.Module], ...]:
    from samestep.planner.traced_model import checkpointable_classes

    return checkpointable_classes(model, ())


def predict(case: Case) -> dict[str, object]:
    """Trace the case."""
    from samestep.planner.trace import trace_model

    torch.set_num_threads(1)
    began, began_cpu = time.monotonic(), time.process_time()
    profile = trace_model(
        lambda: WORKLOADS[case.workload](4),
        optimizer=lambda parameters: make_optimizer(case.optimizer, parameters),
        precision=case.precision,
        channels_last=case.workload in CHANNELS_LAST,
    )
    seconds, cpu = time.monotonic() - began, time.process_time() - began_cpu
    working = profile.checkpointed_activations if case.recompute else profile.activations
    assert working is not None
    return {
        "predicted": profile.persistent + working.at(case.samples),
        "persistent": profile.persistent,
        "method": profile.method,
        "trace_s": seconds,
        "trace_cpu_s": cpu,
        "profile": asdict(replace(profile, ops=())),
        "ops": [asdict(op) for op in profile.ops],
        **formulae(profile),
    }


def formulae(profile) -> dict[str, float]:
    """Estimates of other tools, without activations and micro-batch size."""
    from accelerate.commands.estimate import estimate_training_usage

    parameters = sum(profile.trainable.values()) + sum(profile.frozen.values())
    usage = estimate_training_usage(parameters, "float32")
    return {"accelerate": float(max(usage.values())), "deepspeed": 20.0 * parameters / 4}


def measure(case: Case) -> dict[str, float]:
    """Train the case for a few steps and read torch's memory statistics."""
    from samestep import Run

    clear()
    before = torch.cuda.memory_allocated()
    with (
        tempfile.TemporaryDirectory() as folder,
        Run(global_batch=case.samples, precision=case.precision, folder=folder) as run,
    ):
        with torch.device(run.device):
            model, batch, loss = WORKLOADS[case.workload](2)
        blocks = checkpointed_classes(model) if case.recompute else ()
        model = run.wrap(model, activation_checkpointing=blocks, channels_last=case.workload in CHANNELS_LAST)
        optimizer = make_optimizer(case.optimizer, model.parameters())
        rows = Rows(tuple(tensor.cpu() for tensor in batch), case.samples * (WARM + TIMED))
        found = train(model, optimizer, loss, run.shard(rows, micro_batch=case.samples, num_workers=0))
    del model, optimizer, batch, loss, rows, run
    return {name: value if name == "step_s" else value - before for name, value in found.items()}


def train(model, optimizer, loss, shard) -> dict[str, float]:
    began = 0.0
    for epoch in shard.epochs(1):
        for step in epoch:
            if step.number == WARM:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                began = time.perf_counter()
            for batch in step:
                step.mean(loss(model, batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.synchronize()
    return {
        "step_s": (time.perf_counter() - began) / TIMED,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "allocated_after": torch.cuda.memory_allocated(),
    }


def clear() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def line(row) -> str:
    if row.get("error"):
        return f"{row['name']:36} failed: {row['error']}"
    gib = 2**30
    text = f"{row['name']:36} predicted {row['predicted'] / gib:7.2f}"
    if "allocated" in row:
        error = row["predicted"] / row["allocated"] - 1
        text += f"  real {row['allocated'] / gib:7.2f}  {100 * error:+6.2f} %  reserved {row['reserved'] / gib:7.2f}"
        text += f"  {1e3 * row['step_s']:8.1f} ms"
    text += f"  accelerate {row['accelerate'] / gib:6.2f}  deepspeed {row['deepspeed'] / gib:6.2f}"
    bound = "  upper bound" if is_bound(row) else ""
    return f"{text}  trace {row['trace_s']:5.1f} s ({row['trace_cpu_s']:.1f} s of CPU){bound}"


def is_bound(row) -> bool:
    """Whether the forecast is an upper bound, since shapes depend on values."""
    return "upper bound" in row["method"]


def summary(rows) -> str:
    rows = [row for row in rows if not row.get("error") and not is_bound(row)]
    if not rows:
        return "no case with a forecast that is not an upper bound was measured"
    errors = [row["predicted"] / row["allocated"] - 1 for row in rows]
    others = {
        name: statistics.median(abs(row[name] / row["allocated"] - 1) for row in rows)
        for name in ("accelerate", "deepspeed")
    }
    return (
        f"{len(rows)} cases: median error {100 * statistics.median(map(abs, errors)):.2f} %, worst "
        f"{100 * max(map(abs, errors)):.2f} %, furthest below {100 * min(errors):+.2f} %; median error of accelerate "
        f"{100 * others['accelerate']:.0f} %, of DeepSpeed {100 * others['deepspeed']:.0f} %"
    )


def predictions(cases, jobs: int):
    """Trace in processes that see no GPU; a case that fails has its error."""
    seen, os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES"), ""
    try:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            return [result_or_error(pending.result) for pending in [pool.submit(predict, case) for case in cases]]
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if seen is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = seen


def result_or_error(function: Callable[[], dict]) -> dict[str, object]:
    """The result, or what was raised: a case that fails must not end the others."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", help="only cases whose name begins with one of these")
    parser.add_argument("--predict-only", action="store_true", help="trace, but do not train")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="number of parallel traces")
    parser.add_argument("--forecasts", help="measure only, and compare with the forecasts in this file")
    parser.add_argument("--json", help="write everything to this file")
    args = parser.parse_args()
    cases = [case for case in CASES if not args.case or case.name.startswith(tuple(args.case))]
    if args.forecasts:
        known = {row["name"]: row for row in json.loads(Path(args.forecasts).read_text())}
        rows = [known[case.name] for case in cases]
    else:
        rows = [
            {"name": case.name, **asdict(case), **prediction}
            for case, prediction in zip(cases, predictions(cases, args.jobs), strict=True)
        ]
    for case, row in zip(cases, rows, strict=True):
        if not args.predict_only and not row.get("error"):
            row.update(result_or_error(partial(measure, case)))
        print(line(row), flush=True)
        if args.json:  # after every case, so that those before one that hangs are kept
            Path(args.json).write_text(json.dumps(rows))
    if not args.predict_only:
        print(summary(rows))
    if any(row.get("error") for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Step time: estimated by `samestep plan` for this GPU after a calibration, and measured in training.

    python benchmarks/step_time.py [--case NAME ...] [--json FILE]        on a machine with a GPU

The workloads are those of benchmarks/memory.py. Each is traced without a GPU. Then its operations run one by one on the
GPU, as `samestep plan` does for an available GPU. Then it is trained by a plain loop with the batch on the GPU, and the
median of the step times is taken. For comparison the table has the estimate from FLOP/s and bandwidth alone, which a
plan uses for a GPU that is not available.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from memory import CASES, CHANNELS_LAST, WORKLOADS, Case, checkpointed_classes, clear, make_optimizer

WARM, TIMED = 4, 12


def trace(case: Case):
    """The profile of the model, in a process that sees no GPU."""
    from samestep.planner.trace import trace_model

    torch.set_num_threads(1)
    return trace_model(
        lambda: WORKLOADS[case.workload](4),
        optimizer=lambda parameters: make_optimizer(case.optimizer, parameters),
        precision=case.precision,
        channels_last=case.workload in CHANNELS_LAST,
    )


def estimate(case: Case, profile, cluster, precision) -> float:
    """Seconds per step on one device, as a plan estimates them."""
    from samestep.planner.layouts import Layout
    from samestep.planner.time_model import estimate_step_time

    layout = Layout(strategy="single", ranks=1, shards=1, activation_checkpointing=case.recompute)
    return estimate_step_time(
        layout, cluster, profile, case.samples, 1, precision=case.precision, tf32=precision.tf32
    ).total


def train(case: Case, precision) -> float:
    """Median seconds per step of a plain training loop."""
    from samestep.parallel.submodules import checkpoint_activations

    clear()
    with torch.device("cuda"):
        model, batch, loss = WORKLOADS[case.workload](case.samples)
    if case.workload in CHANNELS_LAST:
        model = model.to(memory_format=torch.channels_last)
        batch = tuple(t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for t in batch)
    if case.recompute:
        checkpoint_activations(model, checkpointed_classes(model))
    for part in model.modules():
        if list(part.parameters()) and not any(p.requires_grad for p in part.parameters()):
            part.eval()
    optimizer = make_optimizer(case.optimizer, [p for p in model.parameters() if p.requires_grad])
    if case.optimizer in ("AdamW", "SGD"):
        for group in optimizer.param_groups:
            group["fused"] = True
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(WARM + TIMED + 1)]
    for mark in marks[:-1]:
        mark.record()
        with torch.autocast("cuda", precision.dtype) if precision.dtype is not None else nullcontext():
            value = loss(model, batch).mean()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    marks[-1].record()
    torch.cuda.synchronize()
    spans = [before.elapsed_time(after) / 1e3 for before, after in zip(marks[WARM:], marks[WARM + 1 :], strict=False)]
    return statistics.median(spans)


def compare(case: Case, profile, cluster) -> dict[str, object]:
    """Measure one case and return its row."""
    from samestep.parallel.precision import choose_precision, detect_support, set_fp32_products
    from samestep.planner.step_timing import time_model

    device = torch.device("cuda", 0)
    precision = choose_precision([detect_support(device, case.precision, False)])
    start = time.monotonic()
    timed = time_model(
        profile,
        lambda: WORKLOADS[case.workload](4),
        cluster,
        device,
        case.samples,
        precision,
        channels_last=case.workload in CHANNELS_LAST,
    )
    took = time.monotonic() - start
    clear()
    restore = set_fp32_products(precision)
    real = train(case, precision)
    restore()
    clear()
    row = {"name": case.name, "real_s": real, "timing_took_s": took, "timed": timed.measured_time}
    row["timed_s"], row["estimated_s"] = (
        estimate(case, known, cluster, precision) for known in (timed, replace(profile, measured_time=None))
    )
    row["timed_error"], row["estimated_error"] = (row[key] / real - 1 for key in ("timed_s", "estimated_s"))
    print(
        f"{case.name:36} real {real * 1e3:7.1f} ms  operations timed {row['timed_s'] * 1e3:7.1f} "
        f"({row['timed_error']:+.0%}, {took:.1f} s to time)  by rates {row['estimated_s'] * 1e3:7.1f} "
        f"({row['estimated_error']:+.0%})",
        flush=True,
    )
    return row


def operations(case: Case, cluster) -> list[dict[str, object]]:
    """Seconds of a step by operator: measured one by one, and estimated from FLOP/s and bandwidth."""
    from samestep.parallel.precision import choose_precision, detect_support, set_fp32_products
    from samestep.planner.step_timing import as_op, replay
    from samestep.planner.time_model import op_seconds
    from samestep.planner.trace import trace_calls

    device, tf32 = torch.device("cuda", 0), case.precision != "fp32"
    (work,) = trace_calls(
        lambda: WORKLOADS[case.workload](4),
        [case.samples],
        precision=case.precision,
        channels_last=case.workload in CHANNELS_LAST,
    )
    restore = set_fp32_products(choose_precision([detect_support(device, case.precision, False)]))
    seen, kinds = replay(work.calls, device), {}
    restore()
    for call, cost in work.calls.items():
        op, alone = as_op(call, cost), seen.get(call)
        row = kinds.setdefault((op.name, op.dtype), {"count": 0, "flops": 0.0, "moved": 0.0, "rates_s": 0.0})
        row["count"], row["flops"], row["moved"] = (
            row["count"] + op.count,
            row["flops"] + op.flops,
            row["moved"] + op.bytes_moved,
        )
        row["rates_s"] += op_seconds(cluster, op, tf32)
        row["run_s"] = row.get("run_s", 0.0) + (op_seconds(cluster, op, tf32) if alone is None else alone * op.count)
        row["not_run"] = row.get("not_run", 0) + (op.count if alone is None else 0)
    clear()
    return [{"case": case.name, "op": name, "dtype": dtype, **row} for (name, dtype), row in kinds.items()]


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", default=[], help="only cases whose name contains one of these")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--operations", type=Path, help="write the seconds by operator to this file")
    options = parser.parse_args()
    cases = [case for case in CASES if not options.case or any(word in case.name for word in options.case)]
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with ProcessPoolExecutor(min(12, len(cases)), multiprocessing.get_context("spawn")) as pool:
        traced = list(pool.map(trace, cases))
    os.environ.pop("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    from samestep.planner.calibration import apply_calibration, calibrate
    from samestep.planner.cluster_discovery import detect_cluster

    start = time.monotonic()
    calibration = calibrate(torch.device("cuda", 0))
    print(f"calibration in {time.monotonic() - start:.0f} s: {calibration}", flush=True)
    cluster = apply_calibration(detect_cluster(1), calibration)
    rows = [compare(case, profile, cluster) for case, profile in zip(cases, traced, strict=True)]
    for key, label in (("timed_error", "operations timed"), ("estimated_error", "by FLOP/s and bandwidth")):
        errors = [abs(row[key]) for row in rows]
        within = sum(error <= 0.2 for error in errors)
        print(
            f"{label}: median error {statistics.median(errors):.0%}, worst {max(errors):.0%}, "
            f"within 20 % in {within} of {len(rows)}"
        )
    if options.operations:
        kinds = [row for case in cases for row in operations(case, cluster)]
        options.operations.write_text(json.dumps(kinds, indent=1))
    if options.json:
        options.json.write_text(json.dumps(rows, default=str, indent=1))


if __name__ == "__main__":
    main()

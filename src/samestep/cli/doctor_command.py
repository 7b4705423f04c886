"""`samestep doctor`: what this machine has for a run, and what looks wrong with it."""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestep import __version__
from samestep.environment.diagnosis import MachineInfo, Problem, diagnose
from samestep.environment.hardware import GpuLink, Hardware, Software, read_hardware, software_without_torch
from samestep.environment.network import InterfaceChoice, Network, read_network
from samestep.environment.slurm_variables import SlurmInfo, read_slurm
from samestep.environment.world import World, read_environ, read_world
from samestep.errors import WorldError
from samestep.messages import format_bytes

if TYPE_CHECKING:
    from samestep.environment.bf16_probe import Bf16Support


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """Show what this machine has for a run, and what looks wrong with it.

    Ends with 1 if something would break a run, with 0 if all is well or there is advice only.
    """
    with _patience():
        facts = gather(read_environ())
    symptoms = diagnose(facts)
    if as_json:
        click.echo(json.dumps(as_record(facts, symptoms), indent=2))
    else:
        report(facts, symptoms, Console(highlight=False))
    context.exit(1 if any(symptom.breaks for symptom in symptoms) else 0)


def gather(environ: Mapping[str, str]) -> MachineInfo:
    """Look at everything; what takes long (torch, a bfloat16 product in a child, the name service) at the same time."""
    with ThreadPoolExecutor() as pool:
        bf16 = pool.submit(_try_bf16, environ)
        network, slurm = pool.submit(read_network, environ), pool.submit(read_slurm, environ)
        software, hardware = _look()
        world, world_error = _world(environ)
        return MachineInfo(
            software=software,
            hardware=hardware,
            network=network.result(),
            slurm=slurm.result(),
            world=world,
            world_error=world_error,
            bf16=bf16.result().status,
            bf16_detail=bf16.result().detail,
            omp_num_threads=environ.get("OMP_NUM_THREADS"),
            cuda_visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
        )


def as_record(facts: MachineInfo, symptoms: Sequence[Problem]) -> dict[str, object]:
    """What `--json` prints."""
    broken = any(symptom.breaks for symptom in symptoms)
    return {"samestep": __version__, "ok": not broken, **asdict(facts), "symptoms": [asdict(s) for s in symptoms]}


def report(facts: MachineInfo, symptoms: Sequence[Problem], console: Console) -> None:
    """Print the facts as a list and the symptoms beneath it."""
    rows = [("samestep", __version__), *_rows(facts)]
    if console.is_terminal:
        table = Table.grid(padding=(0, 2))
        for label, value in rows:
            table.add_row(Text(label, style="bold"), Text(value))
        console.print(table)
    else:
        # One line a fact, however long, for grep and for logs.
        width = max(len(label) for label, _ in rows)
        for label, value in rows:
            console.print(Text(f"{label:<{width}}  {value}"), soft_wrap=True)
    console.print()
    for symptom in symptoms:
        word, style = ("wrong", "bold red") if symptom.breaks else ("advice", "yellow")
        console.print(Text.assemble((f"{word}: ", style), symptom.what), soft_wrap=True)
        console.print(Text.assemble(("   do: ", "bold"), symptom.remedy), soft_wrap=True)
    if not symptoms:
        console.print(Text("nothing looks wrong", style="green"))


def _rows(facts: MachineInfo) -> Iterator[tuple[str, str]]:
    yield from _software_rows(facts.software)
    yield from _hardware_rows(facts.hardware)
    yield from _network_rows(facts.network)
    yield "SLURM", _slurm_text(facts.slurm)
    yield "world", _world_text(facts.world)
    yield "bfloat16", facts.bf16_detail


def _software_rows(software: Software) -> Iterator[tuple[str, str]]:
    yield "Python", f"{software.python} on {software.system}"
    if software.torch is None:
        yield "torch", f"cannot be imported: {software.torch_error}"
        return
    backends = [name for name, there in (("gloo", software.gloo), ("MPS", software.mps)) if there]
    yield "torch", ", ".join((software.torch, *backends))
    yield "CUDA", f"{software.cuda}" if software.cuda else "none in this build of torch"
    yield "NCCL", software.nccl or "none in this build of torch"


def _hardware_rows(hardware: Hardware) -> Iterator[tuple[str, str]]:
    for gpu in hardware.gpus:
        total, free = format_bytes(gpu.memory_total), format_bytes(gpu.memory_free)
        yield f"GPU {gpu.index}", f"{gpu.name}, {total}, {free} free, capability {'.'.join(map(str, gpu.capability))}"
    if not hardware.gpus:
        yield "GPUs", "none that torch can use"
    if len(hardware.gpus) > 1:
        yield "links", _links_text(hardware.links, len(hardware.gpus))
    cores = hardware.cores
    yield "cores", f"{cores.usable} of {cores.installed} ({cores.reason})"
    yield "memory", f"{format_bytes(hardware.memory_total)}, {format_bytes(hardware.memory_available)} available"
    if hardware.shm_total is None or hardware.shm_free is None:
        yield "/dev/shm", "none"
    else:
        yield "/dev/shm", f"{format_bytes(hardware.shm_total)}, {format_bytes(hardware.shm_free)} free"


def _links_text(links: Sequence[GpuLink], gpus: int) -> str:
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for link in links:
        kinds[link.kind].append(f"{link.first}-{link.second}")
    if not kinds:
        return "unknown: nvidia-smi does not tell"
    if len(kinds) == 1 and len(links) == gpus * (gpus - 1) // 2:
        return f"{next(iter(kinds))} between all pairs"
    return "; ".join(f"{kind} between {', '.join(pairs)}" for kind, pairs in kinds.items())


def _network_rows(network: Network) -> Iterator[tuple[str, str]]:
    yield "host", f"{network.host} ({', '.join(network.host_addresses) or 'its name does not resolve here'})"
    for interface in network.interfaces:
        state = "up" if interface.up else "down"
        yield (
            interface.name,
            ", ".join((state, *interface.addresses)) if interface.addresses else f"{state}, no address",
        )
    yield "gloo uses", _choice_text(network.gloo)
    yield "NCCL uses", _choice_text(network.nccl)


def _choice_text(choice: InterfaceChoice) -> str:
    place = f"{choice.interface or 'no interface'} {choice.address or ''}".strip()
    return f"{place}: {choice.reason}"


def _slurm_text(slurm: SlurmInfo) -> str:
    if slurm.version is None and slurm.job is None:
        return "not here"
    version = slurm.version or "no srun here"
    if slurm.job is None:
        return f"{version}, not in a job"
    return f"{version}, job {slurm.job} on {slurm.nodes or 'unknown'} node(s), partition {slurm.partition or 'unknown'}"


def _world_text(world: World | None) -> str:
    if world is None:
        return "contradicts itself, see below"
    if world.launcher == "none":
        return "one rank, no launcher"
    return f"rank {world.rank} of {world.size}, on node {world.node} of {world.nodes}, started by {world.launcher}"


def _look() -> tuple[Software, Hardware]:
    try:
        from samestep.environment import gpus as detect
    except (ImportError, OSError) as error:  # a missing library of CUDA is an OSError
        return software_without_torch(str(error)), read_hardware()
    return detect.detect_software(), read_hardware(detect.detect_gpus(), detect.detect_links())


def _world(environ: Mapping[str, str]) -> tuple[World | None, str | None]:
    try:
        return read_world(environ), None
    except WorldError as error:
        return None, str(error)


def _try_bf16(environ: Mapping[str, str]) -> "Bf16Support":
    from samestep.environment.bf16_probe import Bf16Support, probe_bf16

    if find_spec("torch") is None:
        return Bf16Support("unknown", "not tried, as torch is not installed")
    return probe_bf16(environ)


def _patience() -> AbstractContextManager[object]:
    """A sign of life on a terminal; on standard error, so that what is printed can be piped on."""
    if sys.stderr.isatty():
        return Console(stderr=True).status("looking at this machine (a few seconds)")
    return nullcontext()

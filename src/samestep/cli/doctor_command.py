"""`samestep doctor`: show the software, hardware and network of this machine, and problems with them."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samestep import __version__
from samestep.environment.container import ContainerInfo, read_container
from samestep.environment.diagnosis import MachineInfo, Problem, diagnose
from samestep.environment.hardware import GpuLink, Hardware, SlurmInfo, Software, probe_bf16, read_hardware, read_slurm
from samestep.environment.network import InterfaceChoice, Network, read_network
from samestep.environment.processes import most_ranks, open_files_limit
from samestep.environment.world import World, read_environ, read_world
from samestep.errors import WorldError
from samestep.messages import format_bytes


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """Check this machine for problems, and show how to fix them.

    The exit code is 1 if a run would fail, and 0 if there are only warnings or no problems.
    """
    # A status line on stderr, so that the output can be piped.
    with Console(stderr=True).status("checking this machine (takes a few seconds)"):
        machine = inspect_machine(read_environ())
    problems = diagnose(machine)
    if as_json:
        click.echo(json.dumps(as_record(machine, problems), indent=2))
    else:
        print_report(machine, problems, Console(highlight=False))
    context.exit(1 if any(problem.is_error for problem in problems) else 0)


def inspect_machine(environ: Mapping[str, str]) -> MachineInfo:
    """Read everything; what takes long (torch, the bfloat16 probe, name resolution) runs concurrently."""
    with ThreadPoolExecutor() as pool:
        bf16 = pool.submit(probe_bf16, environ)
        network, slurm = pool.submit(read_network, environ), pool.submit(read_slurm, environ)
        try:
            from samestep.environment import gpus
        except (ImportError, OSError) as error:  # a missing CUDA library is an OSError
            software, hardware = Software(torch_error=str(error)), read_hardware()
        else:
            software, hardware = gpus.detect_software(), read_hardware(gpus.detect_gpus(), gpus.detect_links())
        try:
            world, world_error = read_world(environ), None
        except WorldError as error:
            world, world_error = None, str(error)
        return MachineInfo(
            software=software,
            hardware=hardware,
            network=network.result(),
            slurm=slurm.result(),
            world=world,
            world_error=world_error,
            bf16=bf16.result(),
            open_files=open_files_limit(),
            omp_num_threads=environ.get("OMP_NUM_THREADS"),
            cuda_visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
            hip_visible_devices=environ.get("HIP_VISIBLE_DEVICES"),
            rocr_visible_devices=environ.get("ROCR_VISIBLE_DEVICES"),
            container=read_container(environ),
        )


def as_record(machine: MachineInfo, problems: Sequence[Problem]) -> dict[str, object]:
    """The object that `--json` prints."""
    ok = not any(problem.is_error for problem in problems)
    return {"samestep": __version__, "ok": ok, **asdict(machine), "problems": [asdict(each) for each in problems]}


def print_report(machine: MachineInfo, problems: Sequence[Problem], console: Console) -> None:
    """Print a table of the machine, then the problems."""
    rows = [("samestep", __version__), *_rows(machine)]
    if console.is_terminal:
        table = Table.grid(padding=(0, 2))
        for label, value in rows:
            table.add_row(Text(label, style="bold"), Text(value))
        console.print(table)
    else:
        # One line per row, however long, for grep and for logs.
        width = max(len(label) for label, _ in rows)
        for label, value in rows:
            console.print(Text(f"{label:<{width}}  {value}"), soft_wrap=True)
    console.print()
    for problem in problems:
        word, style = ("error", "bold red") if problem.is_error else ("warning", "yellow")
        console.print(Text.assemble((f"{word}: ", style), problem.message), soft_wrap=True)
        console.print(Text.assemble(("  fix: ", "bold"), problem.fix), soft_wrap=True)
    if not problems:
        console.print(Text("no problems found", style="green"))


def _rows(machine: MachineInfo) -> Iterator[tuple[str, str]]:
    yield from _software_rows(machine.software)
    yield from _hardware_rows(machine.hardware)
    yield from _container_rows(machine.container)
    yield "files", _open_files_text(machine.open_files)
    yield from _network_rows(machine.network)
    yield "SLURM", _slurm_text(machine.slurm)
    yield "world", _world_text(machine.world)
    yield "bfloat16", machine.bf16.detail


def _software_rows(software: Software) -> Iterator[tuple[str, str]]:
    yield "Python", f"{software.python} on {software.system}"
    if software.torch is None:
        yield "torch", f"cannot be imported: {software.torch_error}"
        return
    backends = [name for name, available in (("gloo", software.gloo), ("MPS", software.mps)) if available]
    yield "torch", ", ".join((software.torch, *backends))
    yield "CUDA", software.cuda or "not in this build of torch"
    if software.rocm:
        yield "ROCm", software.rocm
    yield "NCCL", software.nccl or "not in this build of torch"


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


def _container_rows(container: ContainerInfo) -> Iterator[tuple[str, str]]:
    limit = container.memory_limit
    parts = [container.runtime or "none found"]
    parts += [f"memory limit {format_bytes(limit)}"] if limit is not None else []
    parts += [] if container.has_host_ipc else ["private IPC namespace"]
    yield "container", ", ".join(parts)
    if container.infiniband:
        lock = "any amount of" if container.memlock is None else f"{format_bytes(container.memlock)} of"
        files = "with" if container.has_uverbs else "without"
        yield "InfiniBand", f"{', '.join(container.infiniband)}, {files} device files; may lock {lock} memory"


def _links_text(links: Sequence[GpuLink], gpus: int) -> str:
    pairs: defaultdict[str, list[str]] = defaultdict(list)
    for link in links:
        pairs[link.kind].append(f"{link.first}-{link.second}")
    if not pairs:
        return "unknown: nvidia-smi does not report them"
    if len(pairs) == 1 and len(links) == gpus * (gpus - 1) // 2:
        return f"{next(iter(pairs))} between all pairs"
    return "; ".join(f"{kind} between {', '.join(of_kind)}" for kind, of_kind in pairs.items())


def _open_files_text(limit: int | None) -> str:
    if limit is None:
        return "a process may open any number of them"
    most = most_ranks(limit)
    enough = f"enough for {most} rank(s) on this machine" if most else "too few for `samestep run`"
    return f"a process may open {limit}, sockets included: {enough}"


def _network_rows(network: Network) -> Iterator[tuple[str, str]]:
    yield "host", f"{network.host} ({', '.join(network.host_addresses) or 'its name cannot be resolved'})"
    for interface in network.interfaces:
        yield interface.name, ", ".join(("up" if interface.up else "down", *(interface.addresses or ["no address"])))
    yield "gloo uses", _choice_text(network.gloo)
    yield "NCCL uses", _choice_text(network.nccl)


def _choice_text(choice: InterfaceChoice) -> str:
    return f"{choice.interface or 'no interface'} {choice.address or ''}".strip() + f": {choice.reason}"


def _slurm_text(slurm: SlurmInfo) -> str:
    if slurm.version is None and slurm.job is None:
        return "not installed"
    version = slurm.version or "srun not installed"
    if slurm.job is None:
        return f"{version}, not in a job"
    return f"{version}, job {slurm.job} on {slurm.nodes or 'unknown'} node(s), partition {slurm.partition or 'unknown'}"


def _world_text(world: World | None) -> str:
    if world is None:
        return "contradictory variables, see below"
    if world.launcher == "none":
        return "one rank, no launcher"
    return f"rank {world.rank} of {world.size}, on node {world.node} of {world.nodes}, started by {world.launcher}"

"""`samestep doctor`: each rule with a prepared machine, the report, and the command on this machine."""

import io
import json
import os
import pty
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from samestep.cli.doctor_command import as_record, print_report
from samestep.environment.container import ContainerInfo
from samestep.environment.diagnosis import RULES, MachineInfo, Problem, diagnose
from samestep.environment.hardware import Bf16Support, Cores, Gpu, GpuLink, Hardware, SlurmInfo, Software
from samestep.environment.network import Interface, InterfaceChoice, Network
from samestep.environment.processes import files_of_launcher
from samestep.environment.world import World

GIB = 2**30
SHM_USE = "data workers pass batches through it, and fail when it is full"
COMMAND = [sys.executable, "-c", "from samestep.cli.doctor_command import command; command()"]


def gpu(index, free=80):
    return Gpu(index, "NVIDIA H100", 80 * GIB, free * GIB, (9, 0))


HEALTHY = MachineInfo(
    software=Software("3.11.7", "Linux-6.1", "2.13.0+cu128", cuda="12.8", nccl="2.27.5", gloo=True),
    hardware=Hardware(
        cores=Cores(16, 16, "no limit"),
        memory_total=64 * GIB,
        memory_available=32 * GIB,
        shm_total=32 * GIB,
        shm_free=31 * GIB,
        nvidia_devices=2,
        nvidia_smi=True,
        gpus=(gpu(0), gpu(1)),
        links=(GpuLink(0, 1, "NV18"),),
    ),
    network=Network(
        host="node1",
        host_addresses=("192.0.2.2",),
        interfaces=(
            Interface("lo", ("127.0.0.1", "::1"), up=True, loopback=True),
            Interface("eth0", ("192.0.2.2",), up=True, loopback=False),
            Interface("eth1", (), up=False, loopback=False),
        ),
        gloo=InterfaceChoice("eth0", "192.0.2.2", "the host name node1 resolves to 192.0.2.2"),
        nccl=InterfaceChoice("eth0", "192.0.2.2", "the first that is not docker, lo or virbr"),
    ),
    slurm=SlurmInfo(None, None, None, None),
    world=World(),
    world_error=None,
    bf16=Bf16Support("works", "a bfloat16 product works on this CPU"),
    open_files=4096,
    omp_num_threads=None,
    cuda_visible_devices=None,
)


def with_software(**changes):
    return replace(HEALTHY, software=replace(HEALTHY.software, **changes))


def with_hardware(**changes):
    return replace(HEALTHY, hardware=replace(HEALTHY.hardware, **changes))


def with_network(**changes):
    return replace(HEALTHY, network=replace(HEALTHY.network, **changes))


def in_container(**changes):
    return replace(HEALTHY, container=ContainerInfo(**changes))


def on_amd(rocm="6.4.2", nvidia_devices=0, hip=None, rocr=None, cuda_visible_devices=None, **container):
    software = replace(HEALTHY.software, torch="2.13.0+rocm6.4", cuda=None, rocm=rocm)
    machine = without_gpus(software, nvidia_devices=nvidia_devices, nvidia_smi=False)
    return replace(
        machine,
        container=ContainerInfo(**{"amd_gpus": 2, "kfd": True, "kfd_is_usable": True, **container}),
        hip_visible_devices=hip,
        rocr_visible_devices=rocr,
        cuda_visible_devices=cuda_visible_devices,
    )


def without_gpus(software=HEALTHY.software, **changes):
    return replace(with_hardware(gpus=(), links=(), **changes), software=software)


def test_a_healthy_machine_has_no_problems():
    assert diagnose(HEALTHY) == []


CASES = {
    "torch is missing": (
        replace(without_gpus(nvidia_devices=0, nvidia_smi=False), software=Software(torch_error="No module 'torch'")),
        Problem("torch-missing", True, "torch cannot be imported: No module 'torch'", "pip install 'torch>=2.11'"),
    ),
    "torch is old": (
        with_software(torch="2.9.1+cu128"),
        Problem(
            "torch-old",
            True,
            "torch 2.9.1+cu128 is too old: samestep needs 2.11 or newer",
            "pip install 'torch>=2.11'",
        ),
    ),
    "torch is a CPU build on a machine with NVIDIA devices": (
        without_gpus(replace(HEALTHY.software, torch="2.13.0+cpu", cuda=None, nccl=None)),
        Problem(
            "cpu-build",
            True,
            "this machine has 2 NVIDIA device(s), but torch 2.13.0+cpu is a CPU build, so a run would use the CPU",
            "install a CUDA build with the command from https://pytorch.org/get-started/locally",
        ),
    ),
    "the driver is too old for torch": (
        without_gpus(replace(HEALTHY.software, cuda_error="The NVIDIA driver on your system is too old")),
        Problem(
            "no-gpu",
            True,
            "torch is built for CUDA 12.8, but cannot use the 2 NVIDIA device(s): "
            "The NVIDIA driver on your system is too old",
            "run nvidia-smi, which shows the newest CUDA version that the driver supports; update the driver, or "
            "install a torch build for that CUDA version",
        ),
    ),
    "nvidia-smi without a device": (
        without_gpus(nvidia_devices=0),
        Problem(
            "no-gpu",
            False,
            "nvidia-smi is installed, but there is no NVIDIA device",
            "on a login node this is normal: run `samestep doctor` in a job; start a container with --gpus all",
        ),
    ),
    "GPUs are hidden": (
        replace(without_gpus(), cuda_visible_devices=""),
        Problem(
            "no-gpu",
            False,
            "torch finds no GPU with CUDA_VISIBLE_DEVICES=''",
            "unset CUDA_VISIBLE_DEVICES to use all GPUs, or list some, as in CUDA_VISIBLE_DEVICES=0,1",
        ),
    ),
    "other processes use most of a GPU": (
        with_hardware(gpus=(gpu(0), gpu(1, free=10))),
        Problem(
            "gpu-in-use",
            False,
            "GPU 1 (NVIDIA H100) has 10.0 GiB of 80.0 GiB free: other processes use the rest",
            "list these processes with nvidia-smi, and exclude it with CUDA_VISIBLE_DEVICES=0",
        ),
    ),
    "other processes use all of the only GPU": (
        with_hardware(gpus=(gpu(0, free=0),)),
        Problem(
            "gpu-in-use",
            True,
            "GPU 0 (NVIDIA H100) has 0 B of 80.0 GiB free: other processes use the rest",
            "list these processes with nvidia-smi, and wait until they end",
        ),
    ),
    "there are fewer cores than GPUs": (
        with_hardware(cores=Cores(1, 64, "the control group allows 1.5")),
        Problem(
            "few-cores",
            False,
            "only 1 of 64 core(s) can be used (the control group allows 1.5) for 2 GPUs: the ranks would wait for each "
            "other's Python code",
            "request at least 2, e.g. with --cpus-per-task in SLURM or --cpus in docker",
        ),
    ),
    "few open files": (
        replace(HEALTHY, open_files=1024, world=World(size=1024, local_size=8, nodes=128)),
        Problem(
            "few-open-files",
            True,
            "a process may open 1024 files, but a process of a job with 1024 rank(s) opens up to 4130, sockets "
            "included",
            "raise the limit before the run with `ulimit -n 8260`, in /etc/security/limits.conf, or with --ulimit "
            "nofile in docker",
        ),
    ),
    "shm is small": (
        with_hardware(shm_total=64 * 2**20, shm_free=64 * 2**20),
        Problem(
            "shm-small",
            False,
            f"/dev/shm has a size of only 64.0 MiB: {SHM_USE}",
            "start the container with --shm-size=8g or --ipc=host, or load data with num_workers=0",
        ),
    ),
    "shm is full": (
        with_hardware(shm_free=GIB // 2),
        Problem(
            "shm-small",
            False,
            f"/dev/shm has only 512.0 MiB of 32.0 GiB free: {SHM_USE}",
            "delete files that ended processes left there (ls -l /dev/shm), or load data with num_workers=0",
        ),
    ),
    "there are more threads than cores": (
        replace(HEALTHY, omp_num_threads="16"),
        Problem(
            "many-threads",
            False,
            "OMP_NUM_THREADS=16 with 2 rank(s) gives 32 threads on 16 core(s)",
            "unset OMP_NUM_THREADS so that `samestep run` chooses it, or set it to 8",
        ),
    ),
    "the number of threads is not a number": (
        replace(HEALTHY, omp_num_threads="many"),
        Problem("many-threads", False, "OMP_NUM_THREADS='many' is not a number of threads", "unset OMP_NUM_THREADS"),
    ),
    "the world contradicts itself": (
        replace(HEALTHY, world=None, world_error="RANK=3 without WORLD_SIZE. Set: RANK=3. To fix it: unset RANK"),
        Problem("world-contradicts", True, "RANK=3 without WORLD_SIZE. Set: RANK=3.", "unset RANK"),
    ),
    "the host name is a loopback address in a job with several nodes": (
        replace(
            with_network(gloo=InterfaceChoice("lo", "127.0.1.1", "the host name node1 resolves to 127.0.1.1")),
            slurm=SlurmInfo("22.05.8", "4242", "batch", 4),
        ),
        Problem(
            "host-is-loopback",
            True,
            "the job has 4 nodes, but gloo would listen on 127.0.1.1, which other nodes cannot reach: "
            "the host name node1 resolves to 127.0.1.1",
            "export GLOO_SOCKET_IFNAME=eth0, or give node1 its own address in /etc/hosts",
        ),
    ),
    "gloo's interface is missing": (
        with_network(
            gloo=InterfaceChoice(None, None, "GLOO_SOCKET_IFNAME=ib0 matches no interface", "GLOO_SOCKET_IFNAME"),
        ),
        Problem(
            "interface-unusable",
            True,
            "gloo has no usable interface: GLOO_SOCKET_IFNAME=ib0 matches no interface",
            "unset GLOO_SOCKET_IFNAME, or choose one that is up: export GLOO_SOCKET_IFNAME=eth0",
        ),
    ),
    "NCCL's interface is down": (
        with_network(
            nccl=InterfaceChoice(
                None, None, "NCCL_SOCKET_IFNAME=eth1 matches eth1, which is down", "NCCL_SOCKET_IFNAME"
            ),
        ),
        Problem(
            "interface-unusable",
            True,
            "NCCL has no usable interface: NCCL_SOCKET_IFNAME=eth1 matches eth1, which is down",
            "unset NCCL_SOCKET_IFNAME, or choose one that is up: export NCCL_SOCKET_IFNAME=eth0",
        ),
    ),
    "NCCL has no interface at all": (
        with_network(nccl=InterfaceChoice(None, None, "no interface is up and has an address")),
        Problem(
            "interface-unusable",
            True,
            "NCCL has no usable interface: no interface is up and has an address",
            "bring an interface up, as in `ip link set eth0 up`",
        ),
    ),
    "bfloat16 needs a workaround": (
        replace(HEALTHY, bf16=Bf16Support("workaround", "bfloat16 crashes on this CPU (SIGILL)")),
        Problem(
            "bf16-crashes",
            False,
            "bfloat16 crashes on this CPU (SIGILL)",
            "start with `samestep run`, which sets it, or export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16",
        ),
    ),
    "InfiniBand is not in the container": (
        in_container(infiniband=("mlx5_0", "mlx5_1")),
        Problem(
            "infiniband-hidden",
            False,
            "the kernel knows the InfiniBand device(s) mlx5_0, mlx5_1, but /dev/infiniband has no device files, so "
            "NCCL would use TCP between nodes",
            "start the container with --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1, or Apptainer "
            "without --contain; outside of a container, load the kernel module ib_uverbs",
        ),
    ),
    "too little memory can be locked for InfiniBand": (
        in_container(infiniband=("mlx5_0",), has_uverbs=True, memlock=8 * 2**20),
        Problem(
            "memlock-small",
            False,
            "a process may lock only 8.0 MiB of memory, and InfiniBand needs to lock its buffers",
            "start the container with --ulimit memlock=-1 --cap-add=IPC_LOCK, or set `ulimit -l unlimited`, in SLURM "
            "for slurmd and with PropagateResourceLimitsExcept=MEMLOCK",
        ),
    ),
    "srun has started a container for each rank": (
        replace(in_container(has_host_ipc=False), world=World(1, 4, 1, 4, launcher="slurm")),
        Problem(
            "ipc-private",
            False,
            "each of the 4 ranks on this node may be in a separate container, and this one has a private IPC "
            "namespace: NCCL could not use shared memory between these ranks",
            "start the containers with --ipc=host, or start one container per node with `samestep run` in it",
        ),
    ),
    "Python is process 1": (
        in_container(runtime="Docker", process_1="python3.11"),
        Problem(
            "no-init",
            False,
            "process 1 of this container is python3.11, which neither collects ended processes nor ends by SIGTERM "
            "unless it handles it",
            "start the container with `docker run --init`, or with tini as its entry point",
        ),
    ),
    "the memory of the control group is less than the ranks need": (
        in_container(memory_limit=3 * GIB),
        Problem(
            "memory-limited",
            True,
            "the control group allows 3.0 GiB of memory, with what is in /dev/shm, and 2 rank(s) need 2.0 GiB each "
            "before the model and the data: the kernel would kill them",
            "raise the limit, with --memory in docker, resources.limits.memory in Kubernetes, or --mem in SLURM",
        ),
    ),
    "torch for ROCm on NVIDIA devices": (
        on_amd(nvidia_devices=2, amd_gpus=0),
        Problem(
            "cpu-build",
            True,
            "torch 2.13.0+rocm6.4 is built for ROCm, but this machine has 2 NVIDIA device(s)",
            "install a CUDA build with the command from https://pytorch.org/get-started/locally",
        ),
    ),
    "torch is a CPU build on a machine with AMD GPUs": (
        on_amd(rocm=None),
        Problem(
            "amd-gpu-unused",
            True,
            "this machine has 2 AMD GPU(s), but torch 2.13.0+rocm6.4 is a CPU build, so a run would use the CPU",
            "install a ROCm build with the command from https://pytorch.org/get-started/locally",
        ),
    ),
    "AMD GPUs are not in the container": (
        on_amd(kfd=False, kfd_is_usable=False),
        Problem(
            "amd-gpu-unused",
            True,
            "torch is built for ROCm 6.4.2 and the kernel knows 2 AMD GPU(s), but /dev/kfd is missing",
            "start the container with --device=/dev/kfd --device=/dev/dri --group-add video, or with apptainer --rocm",
        ),
    ),
    "the user may not use AMD GPUs": (
        on_amd(kfd_is_usable=False),
        Problem(
            "amd-gpu-unused",
            True,
            "torch is built for ROCm 6.4.2 and the kernel knows 2 AMD GPU(s), but this user may not open /dev/kfd",
            "add the user to the groups render and video; in docker, pass --group-add with the number of the group of "
            "/dev/kfd on the host",
        ),
    ),
    "AMD GPUs are hidden": (
        on_amd(hip="", cuda_visible_devices="7"),
        Problem(
            "amd-gpu-hidden",
            False,
            "torch finds no GPU with HIP_VISIBLE_DEVICES=, CUDA_VISIBLE_DEVICES=7",
            "unset HIP_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES to use all GPUs",
        ),
    ),
    "AMD GPUs are selected twice": (
        replace(
            with_software(cuda=None, rocm="6.4.2"),
            hip_visible_devices="2,3",
            rocr_visible_devices="2,3",
            hardware=replace(HEALTHY.hardware, nvidia_devices=0),
        ),
        Problem(
            "amd-gpu-hidden",
            False,
            "HIP_VISIBLE_DEVICES=2,3 counts the GPUs that ROCR_VISIBLE_DEVICES=2,3 leaves, so some may be hidden twice",
            "set one of them",
        ),
    ),
    "bfloat16 crashes": (
        replace(HEALTHY, bf16=Bf16Support("crashes", "bfloat16 crashes on this CPU (SIGILL), always")),
        Problem(
            "bf16-crashes",
            True,
            "bfloat16 crashes on this CPU (SIGILL), always",
            "train in float32 or float16 on this CPU",
        ),
    ),
}


@pytest.mark.parametrize(("machine", "problem"), CASES.values(), ids=CASES.keys())
def test_each_fault_gives_its_problem_and_no_other(machine, problem):
    assert diagnose(machine) == [problem]


def test_every_rule_has_a_case():
    assert {problem.rule for _, problem in CASES.values()} == set(RULES)


NO_PROBLEM = {
    "a machine without GPUs": without_gpus(
        replace(HEALTHY.software, torch="2.13.0+cpu", cuda=None, nccl=None), nvidia_devices=0, nvidia_smi=False
    ),
    "the oldest torch": with_software(torch="2.11.0"),
    "a much newer torch": with_software(torch="10.0.0a0+git5ba3"),
    "a Mac without shm": with_hardware(shm_total=None, shm_free=None),
    "a loopback host with one node": with_network(
        gloo=InterfaceChoice("lo", "127.0.0.1", "the host name resolves to it")
    ),
    "as many threads as cores": replace(HEALTHY, omp_num_threads="8,2"),
    "no interface for NCCL without GPUs": replace(
        without_gpus(HEALTHY.software, nvidia_devices=0, nvidia_smi=False),
        network=replace(HEALTHY.network, nccl=InterfaceChoice(None, None, "no interface is up and has an address")),
    ),
    "a container with an init, InfiniBand and enough memory": in_container(
        runtime="Docker", process_1="tini", infiniband=("mlx5_0",), has_uverbs=True, memory_limit=64 * GIB
    ),
    "an unknown process 1": in_container(runtime="Docker", process_1="entry", is_process_1=True),
    "a private IPC namespace with one launcher per node": replace(
        in_container(has_host_ipc=False), world=World(1, 4, 1, 4, launcher="torchrun")
    ),
    "a limit for locked memory without InfiniBand": in_container(memlock=8 * 2**20),
    "AMD GPUs that torch can use": replace(
        on_amd(hip="0,1"), hardware=replace(HEALTHY.hardware, nvidia_devices=0, nvidia_smi=False)
    ),
    "a ROCm build of torch without a GPU": on_amd(amd_gpus=0, kfd=False),
    "bfloat16 unknown": replace(HEALTHY, bf16=Bf16Support("unknown", "not probed")),
}


@pytest.mark.parametrize("machine", NO_PROBLEM.values(), ids=NO_PROBLEM.keys())
def test_a_correct_setup_is_not_reported(machine):
    assert diagnose(machine) == []


def test_errors_come_before_warnings():
    machine = replace(with_hardware(shm_total=0, shm_free=0), bf16=Bf16Support("crashes", "it crashes"))
    assert [problem.rule for problem in diagnose(machine)] == ["bf16-crashes", "shm-small"]


# The report


def printed(machine, **options):
    stream = io.StringIO()
    print_report(machine, diagnose(machine), Console(file=stream, highlight=False, **options))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("limit", "says"),
    [(12, "too few for `samestep run`"), (40, "enough for 1 rank(s)"), (47, "enough for 1"), (48, "enough for 2")],
)
def test_the_doctor_and_the_launcher_need_the_same_number_of_files(limit, says):
    machine = replace(HEALTHY, open_files=limit)  # with two GPUs, so that `samestep run` starts two ranks
    assert f"a process may open {limit}, sockets included: {says}" in printed(machine)
    assert (files_of_launcher(2) <= limit) == (diagnose(machine) == [])
    assert (limit < 48) == ("a job with 2 rank(s) opens up to 48, sockets included" in printed(machine))


def test_a_report_in_a_pipe_has_one_line_per_row():
    lines = printed(HEALTHY, width=40).splitlines()
    assert lines[1:] == [
        "Python     3.11.7 on Linux-6.1",
        "torch      2.13.0+cu128, gloo",
        "CUDA       12.8",
        "NCCL       2.27.5",
        "GPU 0      NVIDIA H100, 80.0 GiB, 80.0 GiB free, capability 9.0",
        "GPU 1      NVIDIA H100, 80.0 GiB, 80.0 GiB free, capability 9.0",
        "links      NV18 between all pairs",
        "cores      16 of 16 (no limit)",
        "memory     64.0 GiB, 32.0 GiB available",
        "/dev/shm   32.0 GiB, 31.0 GiB free",
        "container  none found",
        "files      a process may open 4096, sockets included: enough for 508 rank(s) on this machine",
        "host       node1 (192.0.2.2)",
        "lo         up, 127.0.0.1, ::1",
        "eth0       up, 192.0.2.2",
        "eth1       down, no address",
        "gloo uses  eth0 192.0.2.2: the host name node1 resolves to 192.0.2.2",
        "NCCL uses  eth0 192.0.2.2: the first that is not docker, lo or virbr",
        "SLURM      not installed",
        "world      one rank, no launcher",
        "bfloat16   a bfloat16 product works on this CPU",
        "",
        "no problems found",
    ]


def test_a_report_lists_problems_and_fixes():
    machine = replace(
        with_hardware(shm_total=0, shm_free=0), world=None, world_error="RANK=3 [red]. To fix it: unset RANK"
    )
    lines = printed(machine).splitlines()
    assert lines[-4:] == [
        "error: RANK=3 [red].",
        "  fix: unset RANK",
        f"warning: /dev/shm has a size of only 0 B: {SHM_USE}",
        "  fix: start the container with --shm-size=8g or --ipc=host, or load data with num_workers=0",
    ]
    assert "world      contradictory variables, see below" in lines


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"world": World(3, 8, 3, 4, 0, 2, launcher="torchrun")}, "rank 3 of 8, on node 0 of 2, started by torchrun"),
        ({"slurm": SlurmInfo("22.05.8", None, None, None)}, "22.05.8, not in a job"),
        ({"slurm": SlurmInfo("22.05.8", "42", "batch", 4)}, "22.05.8, job 42 on 4 node(s), partition batch"),
        (
            {"slurm": SlurmInfo(None, "42", None, None)},
            "srun not installed, job 42 on unknown node(s), partition unknown",
        ),
        ({"software": Software(torch_error="no libcudart")}, "cannot be imported: no libcudart"),
        ({"hardware": replace(HEALTHY.hardware, gpus=())}, "none that torch can use"),
        ({"software": replace(HEALTHY.software, cuda=None, rocm="6.4.2")}, "ROCm       6.4.2"),
        (
            {"container": ContainerInfo(runtime="Docker", memory_limit=8 * GIB, has_host_ipc=False)},
            "container  Docker, memory limit 8.0 GiB, private IPC namespace",
        ),
        (
            {"container": ContainerInfo(infiniband=("mlx5_0",), memlock=8 * 2**20)},
            "InfiniBand  mlx5_0, without device files; may lock 8.0 MiB of memory",
        ),
        (
            {"container": ContainerInfo(infiniband=("mlx5_0",), has_uverbs=True)},
            "mlx5_0, with device files; may lock any amount of memory",
        ),
        ({"hardware": replace(HEALTHY.hardware, shm_total=None)}, "/dev/shm   none"),
        ({"hardware": replace(HEALTHY.hardware, links=())}, "unknown: nvidia-smi does not report them"),
        (
            {
                "hardware": replace(
                    HEALTHY.hardware,
                    gpus=(gpu(0), gpu(1), gpu(2)),
                    links=(GpuLink(0, 1, "NV4"), GpuLink(0, 2, "SYS"), GpuLink(1, 2, "SYS")),
                )
            },
            "NV4 between 0-1; SYS between 0-2, 1-2",
        ),
    ],
)
def test_a_report_shows_the_machine(changes, line):
    assert line in printed(replace(HEALTHY, **changes))


def test_a_report_fits_a_terminal():
    text = printed(HEALTHY, width=40, force_terminal=True, color_system=None)
    assert max(map(len, text.splitlines())) <= 40
    assert "no problems found" in text


def test_the_record_is_json_with_an_overall_result():
    record = json.loads(json.dumps(as_record(HEALTHY, [])))
    assert record["ok"] is True
    assert record["hardware"]["links"] == [{"first": 0, "second": 1, "kind": "NV18"}]
    broken = as_record(HEALTHY, [Problem("x", True, "message", "fix")])
    assert broken["ok"] is False
    assert broken["problems"] == [{"rule": "x", "is_error": True, "message": "message", "fix": "fix"}]
    assert as_record(HEALTHY, [Problem("x", False, "message", "fix")])["ok"] is True


# On this machine


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache folder, so that bfloat16 is probed once."""
    return str(tmp_path_factory.mktemp("cache"))


def doctor(cache, *arguments, **variables):
    environ = {**os.environ, "XDG_CACHE_HOME": cache, **variables}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=environ, check=False, timeout=200)


@pytest.mark.slow
def test_the_command_finds_incomplete_variables_and_exits_with_1(cache):
    done = doctor(cache, "--json", WORLD_SIZE="2")
    record = json.loads(done.stdout)
    assert (done.returncode, done.stderr, record["ok"]) == (1, "", False)
    (problem,) = [problem for problem in record["problems"] if problem["rule"] == "world-contradicts"]
    assert problem["message"].startswith("WORLD_SIZE=2 is set, but RANK is missing.")
    assert "samestep run train.py" in problem["fix"]
    assert record["world"] is None
    assert record["software"]["torch"]
    assert record["bf16"]["status"] in ("works", "workaround", "crashes")
    assert record["hardware"]["cores"]["usable"] >= 1


@pytest.mark.slow
def test_the_command_prints_text_and_exits_with_0_without_errors(cache):
    done = doctor(cache)
    assert done.stderr == ""
    assert done.returncode == (1 if "\nerror: " in done.stdout else 0)
    labels = [line[:9].strip() for line in done.stdout.splitlines()]
    for label in ("samestep", "Python", "torch", "CUDA", "NCCL", "cores", "memory", "/dev/shm", "gloo uses", "SLURM"):
        assert label in labels


@pytest.mark.slow
def test_a_terminal_shows_a_status_line_and_a_pipe_only_the_json(cache):
    master, slave = pty.openpty()
    environ = {**os.environ, "XDG_CACHE_HOME": cache, "TERM": "xterm"}
    child = subprocess.Popen([*COMMAND, "--json"], stdout=subprocess.PIPE, stderr=slave, env=environ)
    os.close(slave)
    seen = read_until_closed(master).decode()
    printed = child.communicate(timeout=200)[0]
    assert "checking this machine (takes a few seconds)" in seen
    assert seen.rfind("\x1b[?25h") > seen.rfind("\x1b[?25l"), "the cursor stays hidden"
    assert json.loads(printed)["samestep"]


def read_until_closed(terminal):
    seen = b""
    try:
        while chunk := os.read(terminal, 4096):
            seen += chunk
    except OSError:  # Linux reports this when the other end is closed
        return seen
    finally:
        os.close(terminal)
    return seen


def test_the_command_works_without_torch(cache):
    hide = (
        "import sys; sys.modules['torch'] = None\n"
        "import importlib.util; found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'torch' else found(name)\n"
        "from samestep.cli.doctor_command import command; command(['--json'])"
    )
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, check=False, timeout=200)
    record = json.loads(done.stdout)
    assert done.returncode == 1
    assert record["software"]["torch"] is None
    assert [each["message"] for each in record["problems"] if each["rule"] == "torch-missing"] == [
        f"torch cannot be imported: {record['software']['torch_error']}"
    ]
    assert record["bf16"]["detail"] == "not probed, since torch is not installed"

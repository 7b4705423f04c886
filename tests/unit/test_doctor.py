"""`samestep doctor`: each rule on facts that are fed to it, the report, and the command on this machine."""

import io
import json
import os
import pty
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from samestep.cli.doctor_command import as_record, report
from samestep.environment.diagnosis import RULES, MachineInfo, Problem, diagnose
from samestep.environment.hardware import Cores, Gpu, GpuLink, Hardware, Software, software_without_torch
from samestep.environment.network import Interface, InterfaceChoice, Network
from samestep.environment.slurm_variables import SlurmInfo
from samestep.environment.world import World

GIB = 2**30
WORKERS = "DataLoader workers hand over batches through it, and die of a bus error when it is full"
COMMAND = [sys.executable, "-c", "from samestep.cli.doctor_command import command; command()"]


def gpu(index, free=80):
    return Gpu(index, "NVIDIA H100", 80 * GIB, free * GIB, (9, 0))


WELL = MachineInfo(
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
        gloo=InterfaceChoice("eth0", "192.0.2.2", "the host's name node1 resolves to 192.0.2.2"),
        nccl=InterfaceChoice("eth0", "192.0.2.2", "the first that is neither docker, lo nor virbr"),
    ),
    slurm=SlurmInfo(None, None, None, None),
    world=World(),
    world_error=None,
    bf16="works",
    bf16_detail="a bfloat16 product works on this CPU",
    omp_num_threads=None,
    cuda_visible_devices=None,
)


def with_software(**changes):
    return replace(WELL, software=replace(WELL.software, **changes))


def with_hardware(**changes):
    return replace(WELL, hardware=replace(WELL.hardware, **changes))


def with_network(**changes):
    return replace(WELL, network=replace(WELL.network, **changes))


def without_gpus(software=WELL.software, **changes):
    return replace(with_hardware(gpus=(), links=(), **changes), software=software)


def test_a_machine_that_is_well_has_no_symptoms():
    assert diagnose(WELL) == []


CASES = {
    "torch is missing": (
        replace(without_gpus(nvidia_devices=0, nvidia_smi=False), software=software_without_torch("No module 'torch'")),
        Problem("torch-missing", True, "torch cannot be imported: No module 'torch'", "pip install 'torch>=2.11'"),
    ),
    "torch is old": (
        with_software(torch="2.9.1+cu128"),
        Problem(
            "torch-old",
            True,
            "torch 2.9.1+cu128 is older than 2.11, the oldest that samestep supports",
            "pip install 'torch>=2.11'",
        ),
    ),
    "torch is a CPU build beside NVIDIA devices": (
        without_gpus(replace(WELL.software, torch="2.13.0+cpu", cuda=None, nccl=None)),
        Problem(
            "cpu-build",
            True,
            "this machine has 2 NVIDIA device(s) and torch 2.13.0+cpu is a build without CUDA: a run would use the CPU",
            "install a build with CUDA, by the command that https://pytorch.org/get-started/locally gives",
        ),
    ),
    "the driver is too old for torch": (
        without_gpus(replace(WELL.software, cuda_error="The NVIDIA driver on your system is too old")),
        Problem(
            "no-gpu",
            True,
            "torch is built for CUDA 12.8 and cannot use the 2 NVIDIA device(s) here: "
            "The NVIDIA driver on your system is too old",
            "run nvidia-smi: it shows the newest CUDA that the driver serves; update the driver, or install a torch "
            "that is built for that CUDA",
        ),
    ),
    "nvidia-smi without a device": (
        without_gpus(nvidia_devices=0),
        Problem(
            "no-gpu",
            False,
            "nvidia-smi is here and no NVIDIA device is",
            "on a login node this is as it should be: run `samestep doctor` in a job; in a container, start it with "
            "--gpus all",
        ),
    ),
    "GPUs are hidden": (
        replace(without_gpus(), cuda_visible_devices=""),
        Problem(
            "no-gpu",
            False,
            "torch sees no GPU with CUDA_VISIBLE_DEVICES=''",
            "unset CUDA_VISIBLE_DEVICES to use them all, or name those to use, as in CUDA_VISIBLE_DEVICES=0,1",
        ),
    ),
    "others hold most of a GPU": (
        with_hardware(gpus=(gpu(0), gpu(1, free=10))),
        Problem(
            "gpu-taken",
            False,
            "GPU 1 (NVIDIA H100) has 10.0 GiB of 80.0 GiB free: other processes hold the rest",
            "see whose they are with nvidia-smi, and leave it out with CUDA_VISIBLE_DEVICES=0",
        ),
    ),
    "others hold all of the only GPU": (
        with_hardware(gpus=(gpu(0, free=0),)),
        Problem(
            "gpu-taken",
            True,
            "GPU 0 (NVIDIA H100) has 0 B of 80.0 GiB free: other processes hold the rest",
            "see whose they are with nvidia-smi, and wait until they end",
        ),
    ),
    "there are fewer cores than GPUs": (
        with_hardware(cores=Cores(1, 64, "the control group allows 1.5")),
        Problem(
            "few-cores",
            False,
            "1 core(s) serve 2 GPUs (the control group allows 1.5, of 64 installed): ranks would wait for each other's "
            "Python",
            "ask for at least 2, e.g. with --cpus-per-task in SLURM or --cpus in docker",
        ),
    ),
    "shm is small": (
        with_hardware(shm_total=64 * 2**20, shm_free=64 * 2**20),
        Problem(
            "shm-small",
            False,
            f"/dev/shm holds 64.0 MiB: {WORKERS}",
            "start the container with --shm-size=8g or --ipc=host, or load with workers=0",
        ),
    ),
    "shm is full": (
        with_hardware(shm_free=GIB // 2),
        Problem(
            "shm-small",
            False,
            f"/dev/shm has 512.0 MiB of 32.0 GiB free: {WORKERS}",
            "remove what ended processes left there (ls -l /dev/shm), or load with workers=0",
        ),
    ),
    "threads times ranks are over the cores": (
        replace(WELL, omp_num_threads="16"),
        Problem(
            "many-threads",
            False,
            "OMP_NUM_THREADS=16 for each of 2 rank(s) makes 32 threads on 16 core(s)",
            "unset OMP_NUM_THREADS and let `samestep run` choose, or set it to 8",
        ),
    ),
    "threads are no number": (
        replace(WELL, omp_num_threads="many"),
        Problem("many-threads", False, "OMP_NUM_THREADS='many' is not a number of threads", "unset OMP_NUM_THREADS"),
    ),
    "the world contradicts itself": (
        replace(WELL, world=None, world_error="RANK=3 without WORLD_SIZE. Set: RANK=3. To repair it: unset RANK"),
        Problem("world-contradicts", True, "RANK=3 without WORLD_SIZE. Set: RANK=3.", "unset RANK"),
    ),
    "the host is its own loopback in a job of several nodes": (
        replace(
            with_network(gloo=InterfaceChoice("lo", "127.0.1.1", "the host's name node1 resolves to 127.0.1.1")),
            slurm=SlurmInfo("22.05.8", "4242", "batch", 4),
        ),
        Problem(
            "host-is-loopback",
            True,
            "this job has 4 nodes and gloo would listen on 127.0.1.1, where no other node reaches it: "
            "the host's name node1 resolves to 127.0.1.1",
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
            "gloo has no interface to use: GLOO_SOCKET_IFNAME=ib0 matches no interface",
            "unset GLOO_SOCKET_IFNAME, or name one that is up: export GLOO_SOCKET_IFNAME=eth0",
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
            "NCCL has no interface to use: NCCL_SOCKET_IFNAME=eth1 matches eth1, which is down",
            "unset NCCL_SOCKET_IFNAME, or name one that is up: export NCCL_SOCKET_IFNAME=eth0",
        ),
    ),
    "NCCL has no interface at all": (
        with_network(nccl=InterfaceChoice(None, None, "no interface is up and has an address")),
        Problem(
            "interface-unusable",
            True,
            "NCCL has no interface to use: no interface is up and has an address",
            "bring one up, as in `ip link set eth0 up`",
        ),
    ),
    "bfloat16 is cured": (
        replace(WELL, bf16="workaround", bf16_detail="bfloat16 kills a process on this CPU (SIGILL)"),
        Problem(
            "bf16-dies",
            False,
            "bfloat16 kills a process on this CPU (SIGILL)",
            "start with `samestep run`, which sets it, or export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16",
        ),
    ),
    "bfloat16 dies": (
        replace(WELL, bf16="crashes", bf16_detail="bfloat16 kills a process on this CPU (SIGILL), even so"),
        Problem(
            "bf16-dies",
            True,
            "bfloat16 kills a process on this CPU (SIGILL), even so",
            "train in float32 or float16 on this CPU",
        ),
    ),
}


@pytest.mark.parametrize(("facts", "symptom"), CASES.values(), ids=CASES.keys())
def test_each_fault_gives_its_symptom_and_no_other(facts, symptom):
    assert diagnose(facts) == [symptom]


def test_every_rule_has_a_case():
    assert {symptom.rule for _, symptom in CASES.values()} == set(RULES)


QUIET = {
    "a machine without GPUs": without_gpus(
        replace(WELL.software, torch="2.13.0+cpu", cuda=None, nccl=None), nvidia_devices=0, nvidia_smi=False
    ),
    "the oldest torch": with_software(torch="2.11.0"),
    "a much newer torch": with_software(torch="10.0.0a0+git5ba3"),
    "a Mac without shm": with_hardware(shm_total=None, shm_free=None),
    "a loopback host with one node": with_network(
        gloo=InterfaceChoice("lo", "127.0.0.1", "the host's name resolves to it")
    ),
    "as many threads as cores": replace(WELL, omp_num_threads="8,2"),
    "no interface for NCCL without GPUs": replace(
        without_gpus(WELL.software, nvidia_devices=0, nvidia_smi=False),
        network=replace(WELL.network, nccl=InterfaceChoice(None, None, "no interface is up and has an address")),
    ),
    "bfloat16 unknown": replace(WELL, bf16="unknown"),
}


@pytest.mark.parametrize("facts", QUIET.values(), ids=QUIET.keys())
def test_what_is_not_wrong_is_not_mentioned(facts):
    assert diagnose(facts) == []


def test_what_breaks_a_run_comes_first():
    facts = replace(with_hardware(shm_total=0, shm_free=0), bf16="crashes", bf16_detail="it dies")
    assert [symptom.rule for symptom in diagnose(facts)] == ["bf16-dies", "shm-small"]


# The report


def printed(facts, **options):
    stream = io.StringIO()
    report(facts, diagnose(facts), Console(file=stream, highlight=False, **options))
    return stream.getvalue()


def test_a_report_in_a_pipe_has_one_line_a_fact():
    lines = printed(WELL, width=40).splitlines()
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
        "host       node1 (192.0.2.2)",
        "lo         up, 127.0.0.1, ::1",
        "eth0       up, 192.0.2.2",
        "eth1       down, no address",
        "gloo uses  eth0 192.0.2.2: the host's name node1 resolves to 192.0.2.2",
        "NCCL uses  eth0 192.0.2.2: the first that is neither docker, lo nor virbr",
        "SLURM      not here",
        "world      one rank, no launcher",
        "bfloat16   a bfloat16 product works on this CPU",
        "",
        "nothing looks wrong",
    ]


def test_a_report_names_what_is_wrong_and_what_to_do():
    facts = replace(
        with_hardware(shm_total=0, shm_free=0), world=None, world_error="RANK=3 [red]. To repair it: unset RANK"
    )
    lines = printed(facts).splitlines()
    assert lines[-4:] == [
        "wrong: RANK=3 [red].",
        "   do: unset RANK",
        f"advice: /dev/shm holds 0 B: {WORKERS}",
        "   do: start the container with --shm-size=8g or --ipc=host, or load with workers=0",
    ]
    assert "world      contradicts itself, see below" in lines


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"world": World(3, 8, 3, 4, 0, 2, launcher="torchrun")}, "rank 3 of 8, on node 0 of 2, started by torchrun"),
        ({"slurm": SlurmInfo("22.05.8", None, None, None)}, "22.05.8, not in a job"),
        ({"slurm": SlurmInfo("22.05.8", "42", "batch", 4)}, "22.05.8, job 42 on 4 node(s), partition batch"),
        ({"slurm": SlurmInfo(None, "42", None, None)}, "no srun here, job 42 on unknown node(s), partition unknown"),
        ({"software": software_without_torch("no libcudart")}, "cannot be imported: no libcudart"),
        ({"hardware": replace(WELL.hardware, gpus=())}, "none that torch can use"),
        ({"hardware": replace(WELL.hardware, shm_total=None)}, "/dev/shm   none"),
        ({"hardware": replace(WELL.hardware, links=())}, "unknown: nvidia-smi does not tell"),
        (
            {
                "hardware": replace(
                    WELL.hardware,
                    gpus=(gpu(0), gpu(1), gpu(2)),
                    links=(GpuLink(0, 1, "NV4"), GpuLink(0, 2, "SYS"), GpuLink(1, 2, "SYS")),
                )
            },
            "NV4 between 0-1; SYS between 0-2, 1-2",
        ),
    ],
)
def test_a_report_tells_what_there_is(changes, line):
    assert line in printed(replace(WELL, **changes))


def test_a_report_fits_a_terminal():
    text = printed(WELL, width=40, force_terminal=True, color_system=None)
    assert max(map(len, text.splitlines())) <= 40
    assert "nothing looks wrong" in text


def test_the_record_is_json_and_says_whether_all_is_well():
    record = json.loads(json.dumps(as_record(WELL, [])))
    assert record["ok"] is True
    assert record["hardware"]["links"] == [{"first": 0, "second": 1, "kind": "NV18"}]
    broken = as_record(WELL, [Problem("x", True, "what", "remedy")])
    assert broken["ok"] is False
    assert broken["symptoms"] == [{"rule": "x", "breaks": True, "what": "what", "remedy": "remedy"}]
    assert as_record(WELL, [Problem("x", False, "what", "remedy")])["ok"] is True


# On this machine


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where the answer about bfloat16 is kept, so that it is tried once."""
    return str(tmp_path_factory.mktemp("cache"))


def doctor(cache, *arguments, **variables):
    environ = {**os.environ, "XDG_CACHE_HOME": cache, **variables}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=environ, check=False, timeout=60)


@pytest.mark.slow
def test_the_command_finds_a_half_set_world_and_ends_with_1(cache):
    done = doctor(cache, "--json", WORLD_SIZE="2")
    record = json.loads(done.stdout)
    assert (done.returncode, done.stderr, record["ok"]) == (1, "", False)
    (symptom,) = [symptom for symptom in record["symptoms"] if symptom["rule"] == "world-contradicts"]
    assert symptom["what"].startswith("WORLD_SIZE=2 without RANK does not say which of the 2 rank(s) this process is.")
    assert "samestep run train.py" in symptom["remedy"]
    assert record["world"] is None
    assert record["software"]["torch"]
    assert record["bf16"] in ("works", "workaround", "crashes")
    assert record["hardware"]["cores"]["usable"] >= 1


def test_the_command_prints_for_people_and_ends_with_0_unless_a_run_would_break(cache):
    done = doctor(cache)
    assert done.stderr == ""
    assert done.returncode == (1 if "\nwrong: " in done.stdout else 0)
    labels = [line[:9].strip() for line in done.stdout.splitlines()]
    for label in ("samestep", "Python", "torch", "CUDA", "NCCL", "cores", "memory", "/dev/shm", "gloo uses", "SLURM"):
        assert label in labels


def test_a_terminal_sees_a_sign_of_life_and_the_pipe_only_the_object(cache):
    ours, theirs = pty.openpty()
    environ = {**os.environ, "XDG_CACHE_HOME": cache, "TERM": "xterm"}
    child = subprocess.Popen([*COMMAND, "--json"], stdout=subprocess.PIPE, stderr=theirs, env=environ)
    os.close(theirs)
    printed = child.communicate(timeout=60)[0]
    seen = os.read(ours, 65536).decode()
    os.close(ours)
    assert "looking at this machine (a few seconds)" in seen
    assert seen.rfind("\x1b[?25h") > seen.rfind("\x1b[?25l"), "the cursor stays hidden"
    assert json.loads(printed)["samestep"]


def test_without_torch_the_doctor_still_speaks(cache):
    hide = (
        "import sys; sys.modules['torch'] = None\n"
        "import importlib.util; found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'torch' else found(name)\n"
        "from samestep.cli.doctor_command import command; command(['--json'])"
    )
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, check=False, timeout=60)
    record = json.loads(done.stdout)
    assert done.returncode == 1
    assert record["software"]["torch"] is None
    assert [s["what"] for s in record["symptoms"] if s["rule"] == "torch-missing"] == [
        f"torch cannot be imported: {record['software']['torch_error']}"
    ]
    assert record["bf16_detail"] == "not tried, as torch is not installed"

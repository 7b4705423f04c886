"""Cores, memory, GPUs, interfaces and SLURM, read from this machine and from prepared files."""

import json
import subprocess
import sys

import psutil
import pytest

from samestep.environment.gpus import detect_software, parse_links, parse_memory
from samestep.environment.hardware import (
    Limits,
    SlurmInfo,
    count_oom_kills,
    read_hardware,
    read_limits,
    read_slurm,
    usable_cores,
    usable_memory,
)
from samestep.environment.network import Interface, choose_gloo, choose_nccl, read_network

GIB = 2**30


def write_files(root, files):
    """Write files under a root folder in place of `/`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# cgroups


def test_a_system_without_cgroups_has_no_limits(tmp_path):
    assert read_limits(tmp_path) == Limits(None, None, None)


@pytest.mark.parametrize("text", ["", "garbage", "max", "100 0", "1 2 3", "nan 100000", "9" * 5000, "\udcff", "-1 -1"])
@pytest.mark.parametrize("name", ["cpu.max", "memory.max", "memory.current", "memory.stat"])
def test_a_cgroup_file_with_garbage_is_no_limit(name, text, tmp_path):
    """Some container runtimes emulate these files."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    valid = {"cpu.max": "200000 100000", "memory.max": "1000", "memory.current": "10", "memory.stat": "anon 5"}
    for each, content in {**valid, name: text}.items():
        (tmp_path / "sys/fs/cgroup" / each).write_bytes(content.encode(errors="surrogateescape"))
    limits = read_limits(tmp_path)
    assert limits.cores == (None if name == "cpu.max" else 2.0)
    assert limits.memory == (None if name in ("memory.max", "memory.current") else 1000)


def test_limits_of_a_parent_cgroup_apply_in_version_2(tmp_path):
    root = write_files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/cpu.max": "450000 100000\n",
            "sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{6 * GIB}\n",
            "sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/step/memory.current": f"{5 * GIB}\n",
        },
    )
    assert read_limits(root) == Limits(cores=4.5, memory=8 * GIB, memory_left=3 * GIB)


def test_a_container_that_sees_the_path_of_the_host_reads_its_own_cgroup(tmp_path):
    root = write_files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/docker-5ba3.scope\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        },
    )
    assert read_limits(root) == Limits(cores=1.5, memory=2 * GIB, memory_left=0)


def test_a_path_outside_of_the_mount_is_not_followed(tmp_path):
    root = write_files(tmp_path, {"proc/self/cgroup": "0::/../../other\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"})
    write_files(tmp_path, {"other/cpu.max": "100000 100000\n"})
    assert read_limits(root).cores == 2


def test_version_1_limits_are_read_per_controller(tmp_path):
    root = write_files(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/box\n0::/\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/box/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{20 * GIB}\n",
        },
    )
    assert read_limits(root) == Limits(cores=3.0, memory=4 * GIB, memory_left=3 * GIB)


@pytest.mark.parametrize(
    ("installed", "affinity", "quota", "usable", "reason"),
    [
        (64, 64, None, 64, "no limit"),
        (64, 8, None, 8, "CPU affinity of this process"),
        (64, 64, 4.5, 4, "the control group allows 4.5"),
        (64, 8, 0.5, 1, "the control group allows 0.5"),
        (64, 8, 16.0, 8, "CPU affinity of this process"),
    ],
)
def test_usable_cores_follow_from_affinity_and_quota(installed, affinity, quota, usable, reason):
    cores = usable_cores(installed, affinity, quota)
    assert (cores.usable, cores.installed, cores.reason) == (usable, installed, reason)


def test_processes_killed_for_memory_are_counted_in_the_cgroup_or_on_the_system(tmp_path):
    assert count_oom_kills(tmp_path) == 0
    write_files(tmp_path, {"proc/vmstat": "oom_kill 9\npgfault 3"})
    assert count_oom_kills(tmp_path) == 9
    events = "low 0\noom 5\noom_kill 2\noom_group_kill 0"
    write_files(tmp_path, {"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/memory.events": events})
    assert count_oom_kills(tmp_path) == 2


def test_usable_memory_follows_from_the_cgroup():
    assert usable_memory(64 * GIB, 40 * GIB, Limits()) == (64 * GIB, 40 * GIB)
    assert usable_memory(64 * GIB, 40 * GIB, Limits(None, 8 * GIB, 3 * GIB)) == (8 * GIB, 3 * GIB)
    assert usable_memory(64 * GIB, 2 * GIB, Limits(None, 80 * GIB, 70 * GIB)) == (64 * GIB, 2 * GIB)


# This machine


def test_the_hardware_of_this_machine_matches_psutil():
    hardware = read_hardware()
    assert 1 <= hardware.cores.usable <= hardware.cores.installed == psutil.cpu_count()
    assert 0 < hardware.memory_available <= hardware.memory_total <= psutil.virtual_memory().total
    assert (hardware.gpus, hardware.links) == ((), ())


def test_a_process_bound_to_one_core_can_use_one():
    script = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from samestep.environment.hardware import read_hardware; print(read_hardware().cores.usable)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "1\n"


def test_device_files_of_the_driver_are_counted_and_shm_may_be_missing(tmp_path):
    root = write_files(
        tmp_path, {f"dev/{name}": "" for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null")}
    )
    hardware = read_hardware(root=root)
    assert hardware.nvidia_devices == 2
    assert (hardware.shm_total, hardware.shm_free) == (None, None)


def test_reading_the_hardware_does_not_import_torch():
    script = (
        "import sys, samestep.environment.hardware, samestep.environment.network\n"
        "import samestep.environment.hardware, samestep.environment.diagnosis\n"
        "import samestep.cli.doctor_command\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_versions_come_from_torch():
    import torch

    software = detect_software()
    assert software.torch == torch.__version__
    assert software.cuda == torch.version.cuda
    assert software.gloo
    assert software.cuda_error is None or not torch.cuda.is_available()


# nvidia-smi

TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tSYS\tPIX\t0-15\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tSYS\tNODE\t0-15\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tNV18\tSYS\t16-31\t1\t\tN/A\n"
    "GPU3\tSYS\tSYS\tNV18\t X \tSYS\t16-31\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tSYS\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe and the link between NUMA nodes\n"
    "  NV#  = Connection traversing a bonded set of # NVLinks\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)


def test_links_are_read_from_the_matrix_without_network_cards():
    assert parse_links(TOPOLOGY) == {
        (0, 1): "NV18",
        (0, 2): "SYS",
        (0, 3): "SYS",
        (1, 2): "SYS",
        (1, 3): "SYS",
        (2, 3): "NV18",
    }


@pytest.mark.parametrize("text", ["", "Failed to initialize NVML: Driver/library version mismatch\n", "\n\n"])
def test_output_without_a_matrix_gives_no_links(text):
    assert parse_links(text) == {}
    assert parse_memory(text) == {}


def test_free_memory_is_read_by_uuid_and_omitted_if_not_available():
    text = "0, GPU-5ba3-01, 1000\n1, GPU-5ba3-02, [N/A]\n7, GPU-5ba3-03, 0\n"
    assert parse_memory(text) == {"5ba3-01": (0, 1000 * 2**20), "5ba3-03": (7, 0)}


# Interfaces

LO = Interface("lo", ("127.0.0.1", "::1"), up=True, loopback=True)
ETH = Interface("eth0", ("192.0.2.2",), up=True, loopback=False)
DOWN = Interface("eth1", ("192.0.2.3",), up=False, loopback=False)
BARE = Interface("eth2", (), up=True, loopback=False)
IB = Interface("ib0", ("198.51.100.2",), up=True, loopback=False)
DOCKER = Interface("docker0", ("172.17.0.1",), up=True, loopback=False)
ALL = (LO, DOCKER, ETH, DOWN, BARE, IB)


@pytest.mark.parametrize(
    ("addresses", "value", "interface", "address", "reason"),
    [
        (["192.0.2.2"], None, "eth0", "192.0.2.2", "the host name node1 resolves to 192.0.2.2"),
        (["127.0.1.1"], None, "lo", "127.0.1.1", "the host name node1 resolves to 127.0.1.1"),
        ([], None, "lo", "127.0.0.1", "the host name node1 resolves to no address of this machine"),
        (["127.0.0.1"], "ib0", "ib0", "198.51.100.2", "GLOO_SOCKET_IFNAME=ib0"),
        (["127.0.0.1"], "ib0,eth0", "ib0", "198.51.100.2", "GLOO_SOCKET_IFNAME=ib0"),
        (["192.0.2.2"], "ib", None, None, "GLOO_SOCKET_IFNAME=ib matches no interface"),
        (["192.0.2.2"], "eth1", None, None, "GLOO_SOCKET_IFNAME=eth1 matches eth1, which is down"),
        (["192.0.2.2"], "eth2", None, None, "GLOO_SOCKET_IFNAME=eth2 matches eth2, which has no address"),
    ],
)
def test_gloo_uses_the_variable_then_the_host_name_then_loopback(addresses, value, interface, address, reason):
    choice = choose_gloo(ALL, "node1", addresses, {"GLOO_SOCKET_IFNAME": value} if value else {})
    assert (choice.interface, choice.address, choice.reason) == (interface, address, reason)
    assert choice.variable == ("GLOO_SOCKET_IFNAME" if value else None)


@pytest.mark.parametrize(
    ("interfaces", "value", "interface", "reason"),
    [
        (ALL, None, "ib0", "InfiniBand comes first"),
        ((LO, DOCKER, DOWN, BARE, ETH), None, "eth0", "the first that is not docker, lo or virbr"),
        ((LO, DOCKER, DOWN), None, "docker0", "only docker and lo are up"),
        ((LO, DOWN), None, "lo", "only lo is up"),
        ((DOWN, BARE), None, None, "no interface is up and has an address"),
        (ALL, "eth", "eth0", "NCCL_SOCKET_IFNAME=eth"),
        (ALL, "=eth0", "eth0", "NCCL_SOCKET_IFNAME==eth0"),
        (ALL, "^ib,lo,docker", "eth0", "NCCL_SOCKET_IFNAME=^ib,lo,docker"),
        (ALL, "=eth", None, "NCCL_SOCKET_IFNAME==eth matches no interface"),
        (ALL, "eth1", None, "NCCL_SOCKET_IFNAME=eth1 matches eth1, which is down"),
    ],
)
def test_nccl_uses_its_own_order(interfaces, value, interface, reason):
    choice = choose_nccl(interfaces, {"NCCL_SOCKET_IFNAME": value} if value else {})
    assert (choice.interface, choice.reason) == (interface, reason)


@pytest.mark.slow
def test_gloo_listens_on_the_predicted_address(tmp_path):
    script = (
        "import json, sys, psutil, torch.distributed as dist\n"
        "from samestep.environment.network import read_network\n"
        "from samestep.environment.world import read_environ\n"
        "dist.init_process_group('gloo', store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)\n"
        "dist.barrier()\n"
        "listening = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}\n"
        "print(json.dumps([sorted(listening), read_network(read_environ()).gloo.address]))\n"
        "dist.destroy_process_group()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "store")], capture_output=True, text=True, check=True
    )
    listening, predicted = json.loads(done.stdout)
    assert listening == [predicted]


def test_the_interfaces_of_this_machine_are_listed():
    network = read_network({})
    (loopback,) = [i for i in network.interfaces if i.loopback and i.up]
    assert "127.0.0.1" in loopback.addresses
    assert network.host


# SLURM


def test_slurm_is_read_from_srun_and_the_variables(tmp_path, monkeypatch):
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\necho slurm-wlm 22.05.8\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    environ = {"SLURM_JOB_ID": "4242", "SLURM_JOB_PARTITION": "batch", "SLURM_JOB_NUM_NODES": "4"}
    assert read_slurm(environ) == SlurmInfo("22.05.8", "4242", "batch", 4)
    assert read_slurm({}) == SlurmInfo("22.05.8", None, None, None)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 3", "exit code 3"),
        ("echo 'srun: error: first' >&2; echo 'srun: fatal: no slurm.conf' >&2; exit 1", "srun: fatal: no slurm.conf"),
    ],
)
def test_a_failing_srun_is_reported(tmp_path, monkeypatch, script, message):
    srun = tmp_path / "srun"
    srun.write_text(f"#!/bin/sh\n{script}\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert read_slurm({}).version == f"unknown (srun --version: {message})"


def test_without_srun_slurm_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_slurm({}) == SlurmInfo(None, None, None, None)

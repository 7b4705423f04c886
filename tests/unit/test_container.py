"""What `samestep doctor` reads about containers: from prepared files, and in real namespaces."""

import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from samestep.environment.container import ContainerInfo, read_container
from tests.launch.launched import IMPORT_PATH

IPC_OF_HOST = "ipc:[4026531839]"
READ = """
import json
from dataclasses import asdict
from samestep.environment.container import read_container
from samestep.environment.hardware import read_hardware
found = read_container({})
print(json.dumps({**asdict(found), "shm": read_hardware().shm_total, "lacks_init": found.lacks_init}))
"""


def write(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def read(root: Path, **environ: str) -> ContainerInfo:
    return read_container(environ, root)


def test_an_empty_system_has_nothing(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert read(tmp_path) == ContainerInfo(
        is_process_1=os.getpid() == 1, memlock=None if limit == resource.RLIM_INFINITY else limit
    )


@pytest.mark.parametrize(
    ("path", "runtime"),
    [(".dockerenv", "Docker"), ("run/.containerenv", "Podman"), (".singularity.d/env", "Apptainer")],
)
def test_a_container_is_known_by_its_files(tmp_path, path, runtime):
    write(tmp_path, path)
    assert read(tmp_path).runtime == runtime


@pytest.mark.parametrize(
    ("variable", "runtime"),
    [
        ("APPTAINER_CONTAINER", "Apptainer"),
        ("SINGULARITY_CONTAINER", "Apptainer"),
        ("KUBERNETES_SERVICE_HOST", "Kubernetes"),
    ],
)
def test_a_container_is_known_by_its_variables(tmp_path, variable, runtime):
    assert read(tmp_path, **{variable: "x"}).runtime == runtime


@pytest.mark.parametrize(("name", "lacks"), [("python3.11", True), ("sh", True), ("tini", False), ("", False)])
def test_process_1_is_an_init_or_not(tmp_path, name, lacks):
    write(tmp_path, ".dockerenv")
    write(tmp_path, "proc/1/comm", f"{name}\n")
    assert (read(tmp_path).process_1, read(tmp_path).lacks_init) == (name, lacks)


def test_process_1_outside_of_a_container_is_not_judged(tmp_path):
    write(tmp_path, "proc/1/comm", "python\n")
    assert not read(tmp_path).lacks_init


def test_infiniband_devices_and_their_files(tmp_path):
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / "sys/class/infiniband" / name).mkdir(parents=True)
    assert (read(tmp_path).infiniband, read(tmp_path).has_uverbs) == (("mlx5_0", "mlx5_1"), False)
    write(tmp_path, "dev/infiniband/rdma_cm")
    assert not read(tmp_path).has_uverbs
    write(tmp_path, "dev/infiniband/uverbs0")
    assert read(tmp_path).has_uverbs


@pytest.mark.parametrize(("ipc", "is_host"), [(IPC_OF_HOST, True), ("ipc:[4026532178]", False)])
def test_the_ipc_namespace_is_that_of_the_host_or_not(tmp_path, ipc, is_host):
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/ipc").symlink_to(ipc)
    assert read(tmp_path).has_host_ipc is is_host


def test_a_process_with_the_capability_may_lock_any_amount_of_memory(tmp_path):
    write(tmp_path, "proc/self/status", "Name:\tpython\nCapEff:\t0000000000004000\n")
    assert read(tmp_path).memlock is None


def test_the_memory_limit_is_that_of_the_control_group(tmp_path):
    write(tmp_path, "proc/self/cgroup", "0::/job\n")
    write(tmp_path, "sys/fs/cgroup/job/memory.max", "1073741824\n")
    write(tmp_path, "sys/fs/cgroup/job/memory.current", "1048576\n")
    assert read(tmp_path).memory_limit == 2**30


def test_amd_gpus_are_counted_without_the_cpu(tmp_path):
    for node, gpu in (("0", "0"), ("1", "51234"), ("2", "4711")):
        write(tmp_path, f"sys/class/kfd/kfd/topology/nodes/{node}/gpu_id", f"{gpu}\n")
    found = read(tmp_path)
    assert (found.amd_gpus, found.kfd, found.kfd_is_usable) == (2, False, False)
    write(tmp_path, "dev/kfd")
    assert (read(tmp_path).kfd, read(tmp_path).kfd_is_usable) == (True, True)


def test_a_container_of_real_namespaces_is_read_as_one():
    """Private IPC and PID namespaces, Python as process 1, and the 64 MiB of /dev/shm that Docker gives."""
    inside = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" -c "$1"'
    namespaces = ["unshare", "--mount", "--ipc", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*namespaces, "true"], capture_output=True, check=False, timeout=60).returncode:
        pytest.skip("this user may not create namespaces")
    command = [*namespaces, "sh", "-c", inside, sys.executable, READ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout)
    assert found["is_process_1"]
    assert found["process_1"].startswith("python")
    assert found["lacks_init"]
    assert not found["has_host_ipc"]
    assert found["shm"] == 64 * 2**20


def test_the_record_is_json(tmp_path):
    assert json.loads(json.dumps(asdict(read(tmp_path))))["runtime"] is None


BIG_BATCHES = """
import torch
from samestep import Run

class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.zeros(3, 512, 512)  # 3 MiB

if __name__ == "__main__":
    with Run(global_batch=4) as run:
        for epoch in run.shard(Images(), num_workers=1).epochs(1):
            for step in epoch:
                list(step)
"""


@pytest.mark.slow
def test_data_workers_that_fill_a_small_shm_say_so(tmp_path):
    (tmp_path / "train.py").write_text(BIG_BATCHES)
    inside = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" train.py'
    namespaces = ["unshare", "--mount", "--ipc"]
    if subprocess.run([*namespaces, "true"], capture_output=True, check=False, timeout=60).returncode:
        pytest.skip("this user may not create namespaces")
    command = [*namespaces, "sh", "-c", inside, sys.executable]
    environ = {**os.environ, **IMPORT_PATH}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, cwd=tmp_path, env=environ)
    assert done.returncode == 1
    assert re.search(
        r"DataError: /dev/shm is full, through which data workers pass batches on rank 0, worker 0: RuntimeError: "
        r"unable to allocate shared memory.*: start the container with --shm-size=8g or --ipc=host, or pass run.shard",
        done.stderr,
    )

"""A real SLURM on this machine: munged, slurmctld and two slurmd as children of the test, in a temporary folder."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from tests.launch.launched import LAUNCHERS, wait_for
from tests.warm import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
# Parameters that differ from SLURM's defaults, for one machine without cgroups and systemd.
SETTINGS = """\
ClusterName=ci
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=10000,batch_sched_delay=0
KillWait=2
SlurmdTimeout=10
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=4 RealMemory=4000
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=4 RealMemory=4000
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Why a cluster cannot be started here, and how to fix it; None if it can."""
    path = os.environ.get("PATH", "") + os.pathsep + "/usr/sbin"
    missing = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if missing:
        return (
            f"{', '.join(missing)} not found: on Debian and Ubuntu, run "
            "`apt-get install --no-install-recommends slurm-wlm munge` as root"
        )
    if os.geteuid() != 0:
        return "slurmctld, slurmd and munged must run as root"
    return None


@dataclass(frozen=True)
class Cluster:
    """Two nodes with four CPUs each."""

    folder: Path
    environment: dict[str, str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def pids(self) -> set[int]:
        """The daemons' processes; slurmctld has a child that runs scripts."""
        control = psutil.Process(self.daemons["slurmctld"].pid)
        return {daemon.pid for daemon in self.daemons.values()} | {child.pid for child in control.children()}

    def run(self, *command: str, cwd: Path | None = None, seconds: float = 240.0) -> subprocess.CompletedProcess[str]:
        """Run a command as a user of the cluster would."""
        return subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=seconds, check=False
        )

    def samestep(self, *arguments: str, cwd: Path, seconds: float = 240.0) -> subprocess.CompletedProcess[str]:
        """Run the command `samestep` in the cluster."""
        return self.run(sys.executable, "-m", "samestep", *arguments, cwd=cwd, seconds=seconds)

    def job(self, job: str) -> dict[str, str]:
        """The controller's record of a job."""
        done = self.run("scontrol", "--oneliner", "show", "job", job)
        assert done.returncode == 0, done.stderr
        return dict(item.partition("=")[::2] for item in done.stdout.split() if "=" in item)

    def wait_until(self, job: str, states: set[str], seconds: float = 240.0) -> dict[str, str]:
        """Poll until a job is in one of these states."""
        wait_for(lambda: self.job(job)["JobState"] in states, seconds, lambda: self.describe(job))
        return self.job(job)

    def describe(self, job: str) -> str:
        """The records of a job and of the nodes, and the end of the job's log, for a test that fails."""
        record = self.run("scontrol", "show", "job", job).stdout
        log = Path(self.job(job).get("StdOut", ""))
        end = log.read_text()[-4000:] if log.is_file() else f"no log {log}"
        return "\n".join([record, self.run("sinfo", "--Node", "--long").stdout, f"the end of {log}:", end])

    def end_jobs(self) -> None:
        """Cancel all jobs."""
        self.run("scancel", "--user=root")
        wait_for(
            lambda: not self.run("squeue", "--noheader").stdout.strip(), 60, lambda: self.run("squeue", "--long").stdout
        )


@contextmanager
def start_cluster() -> Iterator[Cluster]:
    """Start the cluster, wait until both nodes are idle, and end all its processes afterwards."""
    # Not in pytest's folder: the path of a socket must be shorter than 108 characters.
    with TemporaryDirectory(prefix="slurm-") as name, ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        cluster = Cluster(folder, _environment(folder))
        _write_settings(folder)
        stack.callback(_stop, cluster)
        munge = ["--key-file=munge.key", "--socket=munge.sock", "--pid-file=munge.pid", "--log-file=munge.log"]
        options = [option.replace("=", f"={folder}/") for option in [*munge, "--seed-file=munge.seed"]]
        _start(cluster, "munged", "munged", "-F", "-f", *options)
        wait_for((folder / "munge.sock").exists, 150)
        _start(cluster, "slurmctld", "slurmctld", "-D", "-f", f"{folder}/slurm.conf")
        for node in ("node1", "node2"):
            _start(cluster, node, "slurmd", "-D", "-f", f"{folder}/slurm.conf", "-N", node)
        wait_for(lambda: _idle(cluster), 200)
        yield cluster


def _environment(folder: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith((*LAUNCHERS, "SBATCH_"))}
    return {
        **inherited,
        "PATH": inherited.get("PATH", "") + os.pathsep + "/usr/sbin",
        "SLURM_CONF": f"{folder}/slurm.conf",
        "XDG_STATE_HOME": f"{folder}/home-state",
    }


def _write_settings(folder: Path) -> None:
    control, first, second = free_port(), free_port(), free_port()
    settings = SETTINGS.format(
        host=socket.gethostname().partition(".")[0], folder=folder, control=control, first=first, second=second
    )
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(settings)
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))


def _start(cluster: Cluster, name: str, *command: str) -> None:
    with (cluster.folder / f"{name}.out").open("wb") as out:
        cluster.daemons[name] = subprocess.Popen(
            command, env=cluster.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


def _idle(cluster: Cluster) -> bool:
    ended = {name: daemon.returncode for name, daemon in cluster.daemons.items() if daemon.poll() is not None}
    assert not ended, f"{ended}: " + "\n".join((cluster.folder / f"{name}.out").read_text() for name in ended)
    return cluster.run("sinfo", "-h", "-N", "-t", "idle").stdout.count("node") >= 2


def _stop(cluster: Cluster) -> None:
    for name in reversed(cluster.daemons):
        daemon = cluster.daemons[name]
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

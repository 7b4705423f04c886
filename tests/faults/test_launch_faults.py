"""Bad inputs of the launcher and of the variables that it sets: the exit code and the sentence.

A launcher is a script here, `main(["run", ...])` in a process that has imported torch already.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from textwrap import dedent
from uuid import uuid4

import psutil
import pytest

from tests.elastic.conftest import NEEDED
from tests.faults.harness import Fault, cases, check, check_together
from tests.launch.launched import MARK, variable, wait_for

pytestmark = pytest.mark.slow  # nearly every entry starts real commands

NUMBER = "7" * 5000
PRIVILEGED = """
import ctypes, os
assert ctypes.CDLL(None).unshare(0x40000000 | 0x04000000) == 0  # the namespaces of network and host name
os.setuid(65534)
"""


@cache
def why_not() -> str | None:
    """Why namespaces and users cannot be changed here, or None; in CI, where they must be, the tests fail instead."""
    if NEEDED in os.environ:
        return None
    probe = subprocess.run([sys.executable, "-I", "-S", "-c", PRIVILEGED], capture_output=True, check=False)
    return "needs root with CAP_SYS_ADMIN and CAP_SETUID" if probe.returncode else None


def privileged(faults: list[Fault]) -> list[Fault]:
    """The same faults; those that need root are skipped without it."""
    return [replace(each, why_not=why_not()) if re.search("setuid|unshare|capset", each.script) else each
            for each in faults]  # fmt: skip


RUN = """
    from samestep import Run
    with Run(global_batch=4, start_timeout=2) as run:
        run.shard([1, 2, 3, 4])
        print("trained on", run.size)
"""
NO_PORT = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
SRUN = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_NODELIST": "node[1-2]",
}  # fmt: skip
TWO = {**NO_PORT, "MASTER_PORT": "29999"}


def environment(name: str, value: str, says: str, /, **others: str) -> Fault:
    """A variable with a bad value, in the environment of a script that opens a Run."""
    shown = value if len(value) < 20 else f"{len(value)} characters"
    return Fault(f"{name}={shown!r} {' '.join(others)}"[:60], says, script=RUN, environment={**others, name: value})


VARIABLES = [
    environment("RANK", NUMBER, r"RANK=7{60}\.\.\.\S* is too large: it has 5000 digits", WORLD_SIZE="2"),
    environment("WORLD_SIZE", NUMBER, "is too large: it has 5000 digits", RANK="0"),
    environment("WORLD_SIZE", "1000001", "WORLD_SIZE=1000001 is more than 1000000 ranks: no job has so many", RANK="0"),
    environment("WORLD_SIZE", "0x2", "WORLD_SIZE=0x2 is not a non-negative integer", RANK="0"),
    environment("RANK", "1.5", "RANK=1.5 is not a non-negative integer", WORLD_SIZE="2"),
    environment("RANK", "", "RANK='' is not a non-negative integer", WORLD_SIZE="2"),
    environment("RANK", "2", "RANK=2 is out of range for WORLD_SIZE=2", WORLD_SIZE="2"),
    environment("LOCAL_RANK", NUMBER, "is too large: it has 5000 digits", **TWO),
    environment("LOCAL_RANK", "1000", "LOCAL_RANK=1000 is out of range for 2 rank", **TWO),
    environment("LOCAL_WORLD_SIZE", "99999999", "LOCAL_WORLD_SIZE=99999999 is larger than WORLD_SIZE=2", **TWO),
    environment("GROUP_WORLD_SIZE", "99999999", "GROUP_WORLD_SIZE=99999999 is larger than WORLD_SIZE=2", **TWO),
    environment("MASTER_PORT", "0", "MASTER_PORT=0 is not a port from 1 to 65535", **NO_PORT),
    environment("MASTER_PORT", "http", "MASTER_PORT=http is not a non-negative integer", **NO_PORT),
    environment("MASTER_PORT", NUMBER, "is too large: it has 5000 digits", **NO_PORT),
    environment("TORCHELASTIC_RESTART_COUNT", "soon", "TORCHELASTIC_RESTART_COUNT=soon is not a non-negative", **TWO),
    *(
        environment(
            f"SAMESTEP_{name}", value,
            rf"WorldError: SAMESTEP_{name}=\S+ is not a number from 0 to \S+: samestep sets this variable itself for "
            rf"the processes that it starts; run `unset SAMESTEP_{name}`",
        )
        for name, value in [
            ("DEADLINE", "soon"), ("DEADLINE", "nan"), ("DEADLINE", "-1"), ("DEADLINE", NUMBER),
            ("OOM_RETRIES", "few"), ("OOM_RETRIES", "65"), ("OOM_RETRIES", NUMBER),
            ("LAST_STEP", "many"), ("LAST_STEP", "-1"), ("LAST_STEP", NUMBER),
        ]
    ),
    environment("SLURM_NTASKS", "1000001", "SLURM_NTASKS=1000001 is more than 1000000 ranks", **SRUN),
    environment("SLURM_NTASKS", NUMBER, "is too large: it has 5000 digits", **SRUN),
    environment("SLURM_JOB_NODELIST", "node[0-99999999999]", "0-99999999999. is not a range of nodes such as", **SRUN),
    environment("SLURM_JOB_NODELIST", "n[0-999]m[0-999]", "'n.0-999.m.0-999.' has more than 100000 nodes", **SRUN),
    environment("SLURM_TASKS_PER_NODE", "2(x99999999999)", "'2.x99999999999.' is not a list of tasks such as", **SRUN),
    environment("SAMESTEP_PRECISION", "fp7", "SAMESTEP_PRECISION='fp7' is not valid: use one of"),
    environment("SAMESTEP_FOLDER", "x" * 5000, r"LogError: the run folder .* cannot be created: File name too long"),
    environment("SAMESTEP_COMPARISON", "y" * 5000, "the run folder .* cannot be created: File name too long"),
    environment("SAMESTEP_FOLDER", "/dev/null/x", "the run folder /dev/null/x cannot be created: /dev/null is a file"),
]  # fmt: skip


@cases(VARIABLES)
def test_a_bad_variable_is_named(fault, tmp_path):
    check(fault, tmp_path)


def answer_http(client: socket.socket) -> None:
    client.recv(100)
    client.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    client.close()


def say_hello(client: socket.socket) -> None:
    client.sendall(b"220 mail.example.com ESMTP ready\r\n")
    client.recv(100)


def stay_silent(client: socket.socket) -> None:
    while client.recv(100):
        pass


SERVICES = {"HTTP": answer_http, "mail": say_hello, "silent": stay_silent, "closing": socket.socket.close}


@contextmanager
def service(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Another service on a free port of this machine."""

    def serve() -> None:
        with suppress(OSError):  # closed at the end
            while True:
                client = server.accept()[0]
                threading.Thread(target=handle, args=[client], daemon=True).start()

    def handle(client: socket.socket) -> None:
        with suppress(OSError), client:
            answer(client)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def wrong_service(name: str, port: int) -> Fault:
    says = (
        f"WorldError: the process that listens at 127.0.0.1:{port} is not rank 0 of this job, since it does not "
        rf"answer like a store of torch \((no answer|torch says: \S.*)\): set MASTER_PORT"
    )
    return Fault(name, says, script=RUN, environment={**TWO, "MASTER_PORT": str(port)})


def test_another_service_at_the_port_of_rank_0_is_noticed(tmp_path):
    with ExitStack() as stack:
        ports = {name: stack.enter_context(service(answer)) for name, answer in SERVICES.items()}
        check_together([wrong_service(name, port) for name, port in ports.items()], tmp_path)


@pytest.mark.parametrize("name", ["HTTP", "silent"])
def test_rank_0_says_that_its_port_is_in_use(name, tmp_path):
    with service(SERVICES[name]) as port:
        environment = {**TWO, "MASTER_PORT": str(port), "RANK": "0"}
        says = f"WorldError: rank 0 cannot listen on 127.0.0.1:{port}: set MASTER_PORT to a free port"
        check(Fault(name, says, script=RUN, environment=environment), tmp_path)


NO_NETWORK = [
    *(
        Fault(
            f"host of rank 0 {host[:12]!r} of rank {rank}",
            f"WorldError: rank {rank} cannot reach rank 0: the host name .* cannot be resolved .*; set MASTER_ADDR",
            script=RUN,
            environment={**TWO, "MASTER_ADDR": host, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"},
        )
        for rank, host in [("0", "no-such-host.invalid"), ("1", "no-such-host.invalid"), ("1", "a..b"),
                           ("1", "two words"), ("1", "h" * 300), ("1", "line\nbreak"), ("1", "ü" * 70)]
    ),
    *(
        Fault(
            f"no loopback network of rank {rank}",
            f"WorldError: rank {rank} cannot reach rank 0: this machine has no route to 127.0.0.1 .*, since its "
            "loopback interface is down: run `ip link set lo up`",
            script="import ctypes; assert ctypes.CDLL(None).unshare(0x40000000) == 0\n" + dedent(RUN),
            environment={**TWO, "RANK": rank},
        )
        for rank in ("0", "1")
    ),
]  # fmt: skip


def test_without_a_way_to_rank_0_the_cause_is_named(tmp_path):
    check_together(privileged(NO_NETWORK), tmp_path)


def write_targets(folder: Path) -> None:
    os.mkfifo(folder / "pipe.py")
    (folder / "folder.py").mkdir()
    (folder / "binary.py").write_bytes(bytes(range(256)))
    (folder / "latin.py").write_bytes(b"name = '\xe9'\n")
    (folder / "broken.py").write_text("x = 1\nfor y in x\n")


def command_line(name: str, *arguments: str, says: str, before: str = "") -> Fault:
    """A command line that no rank is started for; `before` is code that runs before it."""
    source = f"import os, sys\nfrom samestep.cli.main import main\n{before}\nsys.exit(main({list(arguments)!r}))"
    return Fault(name, says, code=2, script=source, prepare=write_targets)


HUGE = "1" + "0" * 20
AS_OTHER_USER = "os.chmod('broken.py', 0o600); os.chmod('.', 0o755); os.setuid(65534)"
OPTIONS = [
    *(
        command_line(
            f"run --nproc-per-node {value[:24]}", "run", "--nproc-per-node", value, "train.py",
            says="--nproc-per-node .* is more than 4096, and every rank is a process that imports torch: use one rank",
        )
        for value in (HUGE, NUMBER, "4097")
    ),
    *(
        command_line(
            f"run --nnodes {value[:24]}", "run", "--nnodes", value, "train.py",
            says="--nnodes .*, which must be at most 1000000, is not a number of nodes: pass a number of at least 1",
        )
        for value in (HUGE, NUMBER, "1000001", f"1:{HUGE}")
    ),
    command_line("parity with many ranks", "parity", "--ranks", f"1,{HUGE}", "train.py",
                 says=f"--ranks=1,{HUGE} must be at least two different numbers, for example .* at most 4096"),
    command_line("endpoint with port 0", "run", "--nnodes", "2", "--rdzv-endpoint", "localhost:0", "train.py",
                 says="localhost:0 has port 0, which means any free port, so other processes cannot know it"),
    command_line("static endpoint with port 0", "run", "--rdzv-backend", "static", "--rdzv-endpoint", "localhost:0",
                 "train.py", says="localhost:0 has port 0"),
    command_line("endpoint that does not resolve", "run", "--nnodes", "2", "--rdzv-endpoint", "no-such-host.invalid:9",
                 "--rdzv-conf", "read_timeout=1", "train.py",
                 says="the launcher cannot reach its rendezvous at no-such-host.invalid:9: the host name "
                 r"no-such-host.invalid cannot be resolved \(.*\); pass an address that every node can "
                 "reach, or wait longer than 1 s for it with --rdzv-conf join_timeout=600"),
    command_line("master that does not resolve", "run", "--nnodes", "2", "--node-rank", "1", "--master-addr", "a..b",
                 "--rdzv-conf", "read_timeout=1", "train.py", says="the host name a..b cannot be resolved"),
    command_line("endpoint with a port of 5,000 digits", "run", "--nnodes", "2", "--rdzv-endpoint", f"a:{NUMBER}",
                 "train.py", says=r"'a:7{58}\.\.\.' is not an endpoint|a:7{58}\.\.\. is not an endpoint"),
    command_line("master port too long", "run", "--master-port", NUMBER, "train.py", says="--master-port must be"),
    *(
        command_line(f"run --time-limit {value[:24]}", "run", "--time-limit", value, "train.py",
                     says="--time-limit .* is longer than 100 years: leave it out to have no time limit")
        for value in (f"{HUGE}h", NUMBER, "999999d")
    ),
    command_line("max-restarts of -1", "run", "--max-restarts", "-1", "train.py", says="--max-restarts must be"),
    command_line("max-restarts too large", "run", "--max-restarts", NUMBER, "train.py", says="--max-restarts must be"),
    command_line("grace of 10**20", "run", "--grace", HUGE, "train.py", says=f"--grace must be .* got {HUGE}"),
    *(
        command_line(
            f"shutdown timeout {value[:12]}", "run", "broken.py",
            before=f"os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT'] = {value!r}; open('broken.py', 'w').close()",
            says="TORCH_ELASTIC_SHUTDOWN_TIMEOUT=.* is not a number of seconds: set it to a whole number up to 1000000",
        )
        for value in ("soon", NUMBER, "1.5")
    ),
    *(
        command_line(
            f"backend {name}", "run", "--rdzv-backend", name, "--rdzv-endpoint", "localhost:2379", "broken.py",
            before="open('broken.py', 'w').close()",
            says=f"--rdzv-backend {name} needs a package that is not installed .*: install it, or use c10d",
        )
        for name in ("etcd", "etcd-v2")
    ),
    *(
        command_line(
            f"rdzv-conf {setting[:16]}", "run", "--rdzv-conf", setting, "broken.py",
            before="open('broken.py', 'w').close()", says="torch rejects --rdzv-conf: .*; pass timeouts in whole",
        )
        for setting in (f"join_timeout={HUGE}", f"read_timeout={HUGE}", "join_timeout=-1", "is_host=maybe")
    ),
    command_line("script without a name", "run", "", says="'' is a folder, not a script"),
    command_line("script in bytes that are not UTF-8", "run", "\udcff.py", says=r"script .*udcff.py' not found in /"),
    command_line("module without a name", "run", "-m", "", says="module  ?not found"),
    command_line("folder in a loop of links", "run", "--folder", "loop/x", "broken.py",
                 before="open('broken.py', 'w').close(); os.symlink('loop', 'loop')",
                 says=r"cannot create the run's folder loop/x \(Too many levels of symbolic links\): choose another"),
    command_line("folder that is a pipe", "run", "--folder", "pipe.py", "broken.py",
                 before="open('broken.py', 'w').close()", says="--folder pipe.py is a file: choose a folder or a new"),
    command_line("script is a pipe", "run", "pipe.py", says="pipe.py is not a regular file, and every rank reads the"),
    command_line("script is a device", "run", "/dev/zero", says="/dev/zero is not a regular file"),
    command_line("script is a folder", "run", "folder.py", says="folder.py is a folder, not a script: pass a file"),
    command_line("script is binary", "run", "binary.py", says=r"binary.py is not a Python script.*\(.*\): correct it"),
    command_line("script in another encoding", "run", "latin.py", says=r"latin.py is not a Python script.*utf-8.*"),
    command_line("script with a syntax error", "run", "broken.py",
                 says=r"broken.py is not a Python script in line 2 \(expected ':'\): correct it, or pass another file"),
    command_line("script with a long name", "run", "x" * 5000, says=r"script x+\.\.\. cannot be read \(File name too"),
    command_line("script in a file", "run", "broken.py/train.py", says="script broken.py/train.py not found in /"),
    command_line("script that this user may not read", "run", "broken.py", before=AS_OTHER_USER,
                 says=r"script broken.py cannot be read \(Permission denied\): check its permissions"),
    command_line("deleted folder", "run", "train.py", before="os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')",
                 says="the current folder does not exist any more: change to another one with `cd`"),
    command_line("deleted folder with doctor", "doctor",
                 before="os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')",
                 says="the current folder does not exist any more: change to another one with `cd`"),
    command_line("deleted folder with parity", "parity", "train.py",
                 before="os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')",
                 says="the current folder does not exist any more: change to another one with `cd`"),
    command_line("no loopback network", "run", "train.py",
                 before="import ctypes; assert ctypes.CDLL(None).unshare(0x40000000) == 0",
                 says="the launcher cannot reach its rendezvous at localhost:0: this machine has no route to localhost "
                 r"\(.*\), since its loopback interface is down: run `ip link set lo up`"),
]  # fmt: skip


@cases(privileged(OPTIONS))
def test_a_bad_command_line_is_one_sentence(fault, tmp_path):
    ended = check(fault, tmp_path)
    assert "Traceback" not in ended.outputs[0]


def launch(
    name: str, script: str, says: str, code: int = 1, ranks: int = 1, options: str = "", before: str = ""
) -> Fault:
    """`samestep run` of a script; `before` is code that runs in the launcher before."""
    arguments = ["run", "--nproc-per-node", str(ranks), "--folder", "kept", *options.split(), "rank.py"]
    source = f"import os, sys\nfrom samestep.cli.main import main\n{before}\nsys.exit(main({arguments!r}))"
    text = "import os, signal, subprocess, sys, time\nrank = os.environ['RANK']\n" + dedent(script)
    return Fault(name, says, code, script=source, prepare=lambda folder: (folder / "rank.py").write_text(text))


ENDED = "samestep: all ranks have ended, so the launcher has ended what they left running: process [0-9]+"
FIRST = "<- first failure.*rank [0-9] on .*, "
OPEN_FILES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))"
OTHER_NAME = (
    "import ctypes, socket; assert ctypes.CDLL(None).unshare(0x04000000) == 0; socket.sethostname('no-such-name')"
)
# Without CAP_KILL, root may signal its own processes only, as a launcher whose rank used sudo.
NO_CAP_KILL = """
import ctypes
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capget(header, sets) == 0
sets[0] &= ~(1 << 5)
assert ctypes.CDLL(None).capset(header, sets) == 0
"""
LAUNCHES = [
    launch("child after success", "subprocess.Popen(['sleep', '50'])", ENDED, code=0),
    launch("child in its own session", "subprocess.Popen(['sleep', '50'], start_new_session=True)", ENDED, code=0),
    launch("child of a child", "subprocess.run('(setsid sleep 50 &)', shell=True)", ENDED, code=0),
    launch(
        "child that ignores SIGTERM",
        "subprocess.Popen(['sh', '-c', 'trap : TERM; while :; do sleep 0.1; done'])",
        ENDED,
        code=0,
        before="os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT'] = '1'",
    ),
    launch(
        "child after failure",
        "subprocess.Popen(['sleep', '50'], start_new_session=True); sys.exit(3)",
        f"{FIRST}exit code 3; it printed nothing",
        code=3,
    ),
    launch(
        "child after a kill",
        "subprocess.Popen(['sleep', '50']); os.kill(os.getpid(), signal.SIGKILL)",
        f"{FIRST}killed by SIGKILL: often the kernel's out-of-memory killer",
        code=137,
    ),
    launch(
        "children without a parent that waits",
        "for _ in range(50):\n    os.fork() or os._exit(0)\nprint('forked')",
        "forked",
        code=0,
    ),
    launch(
        "killed launcher, ranks in native code",
        """
           if rank == "1":
               subprocess.Popen(["sleep", "60"], start_new_session=True)
               os.kill(os.getppid(), signal.SIGKILL)
           sum(range(10**12))  # holds the GIL for hours
           """,
        "",
        code=-signal.SIGKILL,
        ranks=2,
    ),
    Fault(
        "killed launcher, second launch of its process",
        "",
        code=-signal.SIGKILL,
        script="""
            import os, signal, subprocess
            from samestep.environment.processes import OrphanGuard, launcher_variable
            os.environ.update(launcher_variable())  # as the first launch did
            OrphanGuard().start()
            subprocess.Popen(["sleep", "300"], start_new_session=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """,
    ),
    launch(
        "process of another user",
        """
            loop = f"while [ -d /proc/{os.getppid()} ]; do sleep 0.1; done"
            subprocess.Popen(["sh", "-c", loop], user=65534, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            """,
        "all ranks have ended, but the launcher cannot end what they left running: process [0-9]+, ",
        code=0,
        before=NO_CAP_KILL,
    ),
    launch(
        "stopped rank",
        """
           if rank == "1":
               os.kill(os.getpid(), signal.SIGSTOP)
           time.sleep(0.3)
           os.kill(os.getppid(), signal.SIGTERM)
           time.sleep(60)
           """,
        "samestep: stopped by SIGTERM; all ranks have ended",
        code=143,
        ranks=2,
    ),
    launch(
        "rank that ignores SIGTERM",
        """
           signal.signal(signal.SIGTERM, signal.SIG_IGN)
           if rank == "1":
               os.kill(os.getppid(), signal.SIGTERM)
           time.sleep(60)
           """,
        "samestep: stopped by SIGTERM; all ranks have ended",
        code=143,
        ranks=2,
        options="--grace 1",
    ),
    launch(
        "crash in native code",
        "import ctypes; ctypes.string_at(0)",
        f"{FIRST}killed by SIGSEGV: a crash in native",
        code=139,
    ),
    launch("abort", "os.abort()", f"{FIRST}killed by SIGABRT: native code aborted", code=134),
    launch(
        "bus error", "os.kill(os.getpid(), signal.SIGBUS)", f"{FIRST}killed by SIGBUS: often a full /dev/shm", code=135
    ),
    launch("real-time signal", "os.kill(os.getpid(), 40)", f"{FIRST}killed by signal 40", code=168),
    launch(
        "KeyboardInterrupt",
        "raise KeyboardInterrupt('in line 3')",
        f"{FIRST}killed by SIGINT: Ctrl-C, or a KeyboardInterrupt in the script: Traceback .*: in line 3$",
        code=130,
    ),
    launch(
        "exit code of a killed subprocess",
        "sys.exit(subprocess.run(['sh', '-c', 'kill -TERM $$']).returncode)",
        f"{FIRST}exit code 241: `sys.exit` got the return code of a subprocess that SIGTERM killed",
        code=241,
    ),
    launch("exit code -1", "sys.exit(-1)", f"{FIRST}exit code 255; it printed nothing", code=255),
    launch(
        "end without Python's end",
        "rank == '1' and os._exit(7); time.sleep(60)",
        f"{FIRST}exit code 7; it printed nothing",
        code=7,
        ranks=2,
    ),
    launch(
        "closed streams",
        "os.close(1); os.close(2); raise ValueError('unseen')",
        f"{FIRST}exit code 1; it printed nothing",
    ),
    launch(
        "binary output", "sys.stderr.buffer.write(bytes(range(256)) * 100); sys.exit(9)", f"{FIRST}exit code 9", code=9
    ),
    launch(
        "one line of 5 MB",
        "sys.stdout.write('y' * 5_000_000); sys.exit(9)",
        f"{FIRST}exit code 9; its last lines: y+",
        code=9,
    ),
    launch(
        "removed log folder",
        """
           import shutil
           if rank == "1":
               shutil.rmtree("kept")
               raise ValueError("after")
           time.sleep(60)
           """,
        f"samestep: the log folder .* was removed while the ranks were running .*{FIRST}exit code 1",
        ranks=2,
    ),
    launch(
        "file in place of the log folder",
        "",
        r"cannot write the logs of the ranks to .*/logs \(File exists\): choose another",
        code=2,
        before="os.mkdir('kept'); open('kept/logs', 'w').close()",
    ),
    launch(
        "12 open files",
        "",
        "this process may open 12 files and needs up to 40, sockets included: run `ulimit -n 4096` "
        "before; or start fewer ranks",
        code=2,
        before=OPEN_FILES,
    ),
    launch("arguments of 3 MB", "", "Argument list too long", code=2, options="rank.py " + 3000 * f"{1000 * 'x'} "),
    launch(
        "killed guard",
        """
           import psutil
           guard, = [each for each in psutil.Process(os.getppid()).children() if "-I" in each.cmdline()]
           guard.kill()
           print("the guard is gone")
           """,
        "the guard is gone",
        code=0,
    ),
    Fault(
        "stopped guard",
        "the guard is gone",
        code=0,
        script="""
            import os, signal
            from samestep.environment.processes import OrphanGuard, kill_descendants
            guard = OrphanGuard()
            guard.start()
            assert len(kill_descendants(number=signal.SIGSTOP)) == 1
            guard.stop()
            assert not kill_descendants()
            print("the guard is gone")
        """,
    ),
    launch(
        "rank that becomes a daemon",
        "os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(60)",
        ENDED,
        code=0,
    ),
    launch(
        "host name that does not resolve", "print(os.environ['MASTER_ADDR'])", "localhost", code=0, before=OTHER_NAME
    ),
    launch(
        "no more processes",
        "",
        r"this user may not start more processes \(.*\): start fewer ranks, or raise `ulimit -u`",
        code=2,
        before="import encodings.idna, resource; os.chmod('.', 0o777); os.setuid(65534); "
        "resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))",
    ),
]


@pytest.mark.slow
@cases(privileged(LAUNCHES))
def test_a_launch_ends_with_its_sentence_and_leaves_no_process(fault, tmp_path):
    mark = uuid4().hex
    try:
        check(replace(fault, environment={MARK: mark}), tmp_path)
        wait_for(lambda: not marked(mark), 120, lambda: str([process.cmdline() for process in marked(mark)]))
    finally:
        for process in marked(mark):
            process.kill()


def marked(mark: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if variable(process, MARK) == mark]


RANKS = [
    Fault(
        "deleted folder",
        "LogError: the current folder does not exist any more, so the run folder cannot be created: change to another",
        script=f"import os; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')\n{dedent(RUN)}",
    ),
    Fault(
        "error file that cannot be written",
        "ValueError: the cause$",
        script="""
            from samestep import Run
            with Run(global_batch=4) as run:
                raise ValueError("the cause")
        """,
        environment={"TORCHELASTIC_ERROR_FILE": "/no/such/folder/error.json"},
    ),
    Fault(
        "two ranks 0",
        "rank 0 cannot listen on 127.0.0.1:[0-9]+: set MASTER_PORT to a free port",
        ranks=2,
        script=f"import os; os.environ['RANK'] = os.environ['LOCAL_RANK'] = '0'\n{dedent(RUN)}",
    ),
    Fault(
        "two ranks 1",
        "rank 1 cannot connect to rank 0 at 127.0.0.1:[0-9]+ within 2 s: check that rank 0 has started",
        ranks=2,
        script=f"import os; os.environ['RANK'] = os.environ['LOCAL_RANK'] = '1'\n{dedent(RUN)}",
    ),
    Fault(
        "ranks with different numbers of ranks",
        "rank 1 waited for 3 ranks and lost the store of rank 0 .*: rank 0 has exited, so look for its last lines",
        ranks=2,
        script="""
            import os
            if os.environ["RANK"] == "1":
                os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "3"
            from samestep import Run
            with Run(global_batch=4, start_timeout=15 + 60 * (os.environ["RANK"] == "1")):
                pass
        """,
    ),
    Fault(
        "12 open files",
        "rank 0 cannot connect 2 ranks: this process may open 12 files and needs up to 42, sockets included",
        ranks=2,
        script=f"{OPEN_FILES}\n{dedent(RUN)}",
    ),
    Fault(
        "open files for all but the last ranks",
        "rank 0 cannot connect 6 ranks: this process may open 52 files and needs up to 58, sockets included",
        ranks=6,
        script=f"{OPEN_FILES.replace('12', '52')}\n{dedent(RUN)}",
    ),
    Fault(
        "limit of open files that may be raised",
        "from 40 to 4096 of 5000",
        code=0,
        ranks=2,
        script="""
            import resource
            from samestep import Run
            resource.setrlimit(resource.RLIMIT_NOFILE, (40, 5000))
            with Run(global_batch=4):
                print("from 40 to {} of {}".format(*resource.getrlimit(resource.RLIMIT_NOFILE)))
        """,
    ),
    Fault(
        "program that inherits the variables of its rank",
        "rank 0 .process [0-9]+. started this process while its run is open, and this process inherited RANK=0 and "
        "WORLD_SIZE=2, so it would wait for other ranks: start it as a single process",
        ranks=2,
        script="""
            import subprocess, sys
            from samestep import Run
            with Run(global_batch=4, start_timeout=100) as run:
                if run.is_main:
                    sys.exit(subprocess.run([sys.executable, "train.py"]).returncode)
                run.barrier()
        """,
    ),
    Fault(
        "launcher that a rank starts",
        "rank 0 of 2 in a launch of rank 0",
        code=0,
        ranks=2,
        script="""
            import os, sys
            from pathlib import Path
            from samestep import Run
            from samestep.cli.main import main
            Path("inner.py").write_text('''if True:
                import os
                from samestep.environment.processes import find_parent_rank
                rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
                assert find_parent_rank(os.environ, rank, size, port) is None
                print("rank", rank, "of", size, "in a launch of rank", os.environ["OUTER"])
            ''')
            with Run(global_batch=4) as run:
                os.environ["OUTER"] = str(run.rank)
                code = main(["run", "--nproc-per-node", "2", "--folder", f"inner-{run.rank}", "inner.py"])
                run.barrier()
            sys.exit(code)
        """,
    ),
    *(
        Fault(
            f"forked child that leaves the run by {how!r}",
            "the parent has ended",
            code=0,
            ranks=2,
            script=f"""
                import os, sys
                from samestep import Run
                with Run(global_batch=4) as run:
                    child = os.fork()
                    if child:
                        os.waitpid(child, 0)
                        run.barrier()
                    else:
                        {how}
                if child:
                    print("the parent has ended")
            """,
        )
        for how in ("pass", "sys.exit(0)", "raise ValueError('in the child')")
    ),
    Fault(
        "KeyboardInterrupt in a dataset",
        "KeyboardInterrupt",
        script="""
            from samestep import Run
            class Data:
                def __len__(self): return 8
                def __getitem__(self, index): raise KeyboardInterrupt
            with Run(global_batch=4) as run:
                for epoch in run.shard(Data(), num_workers=0).epochs(1):
                    for step in epoch:
                        for rows in step:
                            pass
        """,
    ),
]


@cases(RANKS)
def test_a_rank_ends_with_its_sentence(fault, tmp_path):
    check(fault, tmp_path)


WITHOUT_TIMEOUT = dedent(RUN.replace(", start_timeout=2", ""))
HANGS = [
    Fault("a host name that does not resolve", "rank 1 cannot reach rank 0: the host name no-such-host.invalid cannot",
          script=WITHOUT_TIMEOUT,
          environment={**TWO, "MASTER_ADDR": "no-such-host.invalid", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}),
    Fault("no loopback network", "rank 1 cannot reach rank 0: this machine has no route to 127.0.0.1",
          script=f"import ctypes; assert ctypes.CDLL(None).unshare(0x40000000) == 0\n{WITHOUT_TIMEOUT}",
          environment=TWO),
    Fault("12 open files", "rank 1 cannot connect 2 ranks: this process may open 12 files",
          script=f"{OPEN_FILES}\n{WITHOUT_TIMEOUT}", environment=TWO),
    replace(command_line("an endpoint that does not resolve", "run", "--nnodes", "2", "--rdzv-endpoint",
                         "no-such-host.invalid:9", "x.py", says="or wait longer than 15 s for it with --rdzv-conf"),
            prepare=lambda folder: (folder / "x.py").touch()),
]  # fmt: skip


def wrong_endpoint(port: int, options: str) -> Fault:
    """A launcher that finds another service at the endpoint of its rendezvous."""
    says = f"the process that listens at 127.0.0.1:{port} is not a launcher, since it does not answer like a store"
    fault = command_line(
        options, "run", "--nnodes", "2", *options.replace("PORT", str(port)).split(), "x.py", says=says
    )
    return replace(fault, prepare=lambda folder: (folder / "x.py").touch())


def test_what_once_hung_and_a_wrong_service_are_noticed_with_the_default_timeouts(tmp_path):
    with service(stay_silent) as silent, service(answer_http) as http:
        says = f"the process that listens at 127.0.0.1:{silent} is not rank 0 of this job"
        environment = {**TWO, "MASTER_PORT": str(silent)}
        rank = Fault("a silent service at the port of rank 0", says, script=WITHOUT_TIMEOUT, environment=environment)
        launchers = [
            wrong_endpoint(port, options)
            for port in (silent, http)
            for options in ("--rdzv-conf is_host=0 --rdzv-endpoint 127.0.0.1:PORT",
                            "--node-rank 1 --master-addr 127.0.0.1 --master-port PORT")
        ]  # fmt: skip
        check_together([*privileged(HANGS), rank, *launchers], tmp_path)


@cases([
    Fault(f"{name} of {len(value)} characters", "trained on 1", code=0, script=RUN, environment={name: value})
    for name in ("SAMESTEP_LAUNCHER", "SAMESTEP_OPEN_RUN")
    for value in ("", "nobody", "-1 x", NUMBER, f"{NUMBER} pid:[1] 0/1/2")
])  # fmt: skip
def test_garbage_about_ancestors_means_that_there_is_none(fault, tmp_path):
    check(fault, tmp_path)

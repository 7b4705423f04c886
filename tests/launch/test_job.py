import re
import socket
from datetime import datetime
from pathlib import Path

import pytest

from samestep.environment.bf16_probe import Bf16Support
from samestep.errors import LaunchError
from samestep.launch.job import Job, choose_variables, count_processes, count_threads, find_place, folder_name
from samestep.launch.rendezvous import (
    Rendezvous,
    RendezvousOptions,
    choose_rendezvous,
    host_here,
    invitation,
    parse_nodes,
)

WORKS = Bf16Support("works", "fine")


def job(processes: int = 2, max_restarts: int = 0, module: bool = False, arguments: tuple[str, ...] = ()) -> Job:
    return Job(
        target="lab.train" if module else "train.py",
        module=module,
        arguments=arguments,
        processes=processes,
        rendezvous=choose_rendezvous(RendezvousOptions(), "fresh"),
        max_restarts=max_restarts,
        folder=Path("/runs/one"),
    )


@pytest.mark.parametrize(
    ("asked", "gpus", "cores", "processes"),
    [
        ("auto", 4, 64, 4),
        ("auto", 0, 8, 4),
        ("auto", 0, 3, 1),
        ("auto", 0, 1, 1),
        ("gpu", 2, 64, 2),
        ("cpu", 2, 6, 6),
        ("3", 2, 2, 3),
    ],
)
def test_processes_follow_from_gpus_and_cores(asked: str, gpus: int, cores: int, processes: int):
    assert count_processes(asked, gpus, cores) == processes


@pytest.mark.parametrize("asked", ["0", "-1", "banana", "2.5", "", "GPU"])
def test_an_impossible_number_of_processes_is_refused(asked: str):
    told = re.escape(f"--nproc-per-node {asked} is impossible: type auto, gpu, cpu or a number from 1 up")
    with pytest.raises(LaunchError, match=f"^{told}$"):
        count_processes(asked, 4, 4)


def test_gpu_without_a_gpu_is_refused():
    told = "--nproc-per-node gpu needs a GPU and torch sees none: type --nproc-per-node cpu, or a number"
    with pytest.raises(LaunchError, match=f"^{told}$"):
        count_processes("gpu", 0, 4)


def test_threads_share_the_cores():
    assert [count_threads(ranks, 10) for ranks in (1, 3, 10, 16)] == [10, 3, 1, 1]


def test_the_command_is_plain_python():
    assert job(arguments=("--lr", "0.1")).command == ("-u", "train.py", "--lr", "0.1")
    assert job(module=True, arguments=("--lr", "0.1")).command == ("-u", "-m", "lab.train", "--lr", "0.1")


@pytest.mark.parametrize(
    ("target", "name"),
    [("lab/train.py", "train"), ("lab.train", "lab.train"), ("train", "train"), ("/a/my.model.py", "my.model")],
)
def test_folders_are_named_after_script_and_time(target: str, name: str):
    assert folder_name(target, datetime(2026, 1, 31, 9, 30, 5)) == f"{name}-20260131-093005"


def test_ranks_get_threads_and_the_folder():
    chosen = choose_variables(job(processes=2), {}, cores=8, gpus=2, bf16=WORKS)
    assert chosen.values == {"OMP_NUM_THREADS": "4", "SAMESTEP_FOLDER": "/runs/one", "SAMESTEP_FOLDER_IS_EXPLICIT": "1"}
    assert chosen.reason == "OMP_NUM_THREADS=4 (8 cores for 2 ranks, 2 GPUs)"


def test_what_the_user_set_stays():
    chosen = choose_variables(job(processes=1), {"OMP_NUM_THREADS": "7"}, cores=8, gpus=0, bf16=WORKS)
    assert "OMP_NUM_THREADS" not in chosen.values
    assert chosen.reason == "OMP_NUM_THREADS=7 (as you set it)"


def test_a_job_that_may_restart_gets_a_store_of_its_own():
    chosen = choose_variables(job(max_restarts=1), {}, cores=8, gpus=0, bf16=WORKS)
    assert chosen.values["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert "keeps dead addresses over a restart" in chosen.reason


def test_a_cpu_that_dies_of_bfloat16_gets_the_cure():
    chosen = choose_variables(job(), {}, cores=2, gpus=0, bf16=Bf16Support("workaround", "bfloat16 kills here"))
    assert chosen.values["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    assert chosen.reason.endswith("; ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 (bfloat16 kills here)")


@pytest.mark.parametrize(("text", "nodes"), [("1", (1, 1)), ("4", (4, 4)), ("1:4", (1, 4)), ("2:2", (2, 2))])
def test_nodes_are_a_number_or_a_range(text: str, nodes: tuple[int, int]):
    assert parse_nodes(text) == nodes


@pytest.mark.parametrize("text", ["0", "3:1", "0:2", "-1", "two", "1:", ":2", "1:2:3", ""])
def test_impossible_numbers_of_nodes_are_refused(text: str):
    told = (
        f"--nnodes {text} is not a number of nodes: type one number from 1 up, or MIN:MAX with MIN not above MAX, as in"
    )
    with pytest.raises(LaunchError, match=f"^{re.escape(told)} --nnodes 1:4$"):
        parse_nodes(text)


# What is typed, and the backend, endpoint, settings and port that must be free here.
MEETINGS: list[tuple[RendezvousOptions, str, str, dict[str, str | int], int | None]] = [
    (RendezvousOptions(), "c10d", "localhost:0", {}, None),
    (RendezvousOptions(standalone=True), "c10d", "localhost:0", {}, None),
    (RendezvousOptions(backend="c10d"), "c10d", "localhost:0", {}, None),
    (RendezvousOptions(port=1234), "static", "127.0.0.1:1234", {"rank": 0}, 1234),
    (RendezvousOptions(address="node1"), "static", "node1:29500", {"rank": 0}, 29500),
    (RendezvousOptions(endpoint="node1:77"), "c10d", "node1:77", {}, 77),
    (RendezvousOptions(nodes="1:4", endpoint="node1:77"), "c10d", "node1:77", {}, None),
    (RendezvousOptions(nodes="2", endpoint="node1:77", settings="is_host=1"), "c10d", "node1:77", {"is_host": "1"}, 77),
    (RendezvousOptions(nodes="2", endpoint="node1"), "c10d", "node1", {}, None),
    (RendezvousOptions(nodes="2", endpoint="node1:77", node_rank=0), "static", "node1:77", {"rank": 0}, 77),
    (RendezvousOptions(nodes="2", endpoint="node1", node_rank=1), "static", "node1:29500", {"rank": 1}, None),
    (RendezvousOptions(nodes="2", address="[::1]", port=77, node_rank=1), "static", "[::1]:77", {"rank": 1}, None),
    (
        RendezvousOptions(nodes="2", backend="etcd", endpoint="e:1", settings="a=b, c=d"),
        "etcd",
        "e:1",
        {"a": "b", "c": "d"},
        None,
    ),
]


@pytest.mark.parametrize(("asked", "backend", "endpoint", "settings", "port"), MEETINGS)
def test_the_meeting_place_follows_from_what_is_typed(
    asked: RendezvousOptions, backend: str, endpoint: str, settings: dict[str, str | int], port: int | None
):
    chosen = choose_rendezvous(asked, fresh_id="fresh")
    assert (chosen.backend, chosen.endpoint, chosen.settings, chosen.hosted_port) == (backend, endpoint, settings, port)


def test_a_job_on_one_machine_has_a_name_of_its_own():
    assert choose_rendezvous(RendezvousOptions(), "fresh").id == "fresh"
    assert choose_rendezvous(RendezvousOptions(nodes="2", endpoint="a:1"), "fresh").id == "samestep"
    assert choose_rendezvous(RendezvousOptions(nodes="2", endpoint="a:1", id="mine"), "fresh").id == "mine"


def nowhere() -> str:
    raise AssertionError("a place was looked for")


def test_a_node_that_may_begin_alone_hosts_the_meeting_where_no_place_was_named():
    hosting = host_here(
        RendezvousOptions(nodes="1:4", settings="last_call_timeout=1"), "0123456789ab", lambda: "node1:29401"
    )
    assert invitation(hosting) == "samestep run --nnodes 1:4 --rdzv-endpoint node1:29401 --rdzv-id 01234567 ..."
    chosen = choose_rendezvous(hosting, "0123456789ab")
    settings = {"is_host": "1", "last_call_timeout": "1"}
    assert chosen == Rendezvous("c10d", "node1:29401", "01234567", settings, 1, 4, None)
    assert chosen.hosted_port == 29401
    named = host_here(RendezvousOptions(nodes="1:4", backend="c10d", id="it's"), "0123456789ab", lambda: "node1:29401")
    assert invitation(named).endswith("""--rdzv-id 'it'"'"'s' ...""")


@pytest.mark.parametrize(
    "asked",
    [
        RendezvousOptions(),
        RendezvousOptions(nodes="2"),
        RendezvousOptions(nodes="2:4"),
        RendezvousOptions(nodes="1:4", standalone=True),
        RendezvousOptions(nodes="1:4", endpoint="node1:77"),
        RendezvousOptions(nodes="1:4", address="node1"),
        RendezvousOptions(nodes="1:4", port=77),
        RendezvousOptions(nodes="1:4", node_rank=0),
        RendezvousOptions(nodes="1:4", backend="etcd"),
        RendezvousOptions(nodes="1:4", settings="is_host=0"),
    ],
)
def test_a_node_that_was_told_where_to_meet_or_needs_others_hosts_nothing_unasked(asked: RendezvousOptions):
    assert host_here(asked, "fresh", nowhere) == asked


def test_the_place_is_this_machine_by_name_or_by_the_address_it_was_given(monkeypatch: pytest.MonkeyPatch):
    host, _, port = find_place(None).rpartition(":")
    assert host == socket.gethostname()
    assert 29400 <= int(port) < 29500
    assert find_place("127.0.0.1").startswith("127.0.0.1:")
    with socket.create_server(("", int(port))):
        assert int(find_place(None).rpartition(":")[2]) > int(port)
        monkeypatch.setattr("samestep.launch.job._MEETING_PORTS", range(int(port), int(port) + 1))
        told = f"the nodes would meet on this machine, and none of its ports {port} to {port} is free: type --rdzv-endp"
        with pytest.raises(LaunchError, match=f"^{told}"):
            find_place(None)


def test_a_machine_whose_own_name_leads_nowhere_is_told_to_give_an_address(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    told = r"the nodes would meet on this machine, and its name no-such-host\.invalid leads nowhere \(.+\): type --l"
    with pytest.raises(LaunchError, match=f"^{told}"):
        find_place(None)


WRONG = [
    (
        RendezvousOptions(nodes="2"),
        "--nnodes 2 needs a place where the nodes meet: type the same --rdzv-endpoint FIRST_NODE:29400 on",
    ),
    (
        RendezvousOptions(nodes="1:4", settings="is_host=0"),
        "--nnodes 1:4 needs a place where the nodes meet: type the same --rdzv-endpoint FIRST_NODE:29400 on",
    ),
    (
        RendezvousOptions(nodes="2", port=77),
        "--nnodes 2 needs a place where the nodes meet: type the same --rdzv-endpoint FIRST_NODE",
    ),
    (
        RendezvousOptions(nodes="2", backend="c10d"),
        "--rdzv-backend c10d with --nnodes 2 needs a place where the nodes meet: type the",
    ),
    (RendezvousOptions(backend="zeus"), "--rdzv-backend zeus is unknown: use one of c10d, static, etcd, etcd-v2"),
    (
        RendezvousOptions(standalone=True, nodes="2"),
        "--standalone is for this machine alone, and --nnodes 2 asks for more: leave one",
    ),
    (
        RendezvousOptions(standalone=True, endpoint="a:1", port=2),
        "--standalone finds a free port by itself: leave out --rdzv-endpoint and",
    ),
    (
        RendezvousOptions(endpoint="a:b"),
        "a:b is not a meeting place: type HOST:PORT with a port up to 65535, as in node1:29400",
    ),
    (
        RendezvousOptions(endpoint="a:70000"),
        "a:70000 is not a meeting place: type HOST:PORT with a port up to 65535, as in node1",
    ),
    (RendezvousOptions(port=0), "--master-port 0 is not a port: type a number from 1 to 65535"),
    (
        RendezvousOptions(nodes="1:2", address="a"),
        "--nnodes 1:2 may change, and a static rendezvous cannot: use --rdzv-endpoint HOST:",
    ),
    (
        RendezvousOptions(nodes="2", address="a"),
        "--master-addr on 2 nodes needs --node-rank 0 to 1, another on each node",
    ),
    (
        RendezvousOptions(nodes="2", address="a", node_rank=2),
        "--node-rank 2 is not one of the 2 node(s): type a number from 0 to 1",
    ),
    (
        RendezvousOptions(nodes="2", address="a", node_rank=-1),
        "--node-rank -1 is not one of the 2 node(s): type a number from 0 to 1",
    ),
    (RendezvousOptions(settings="a"), "--rdzv-conf a is not a list of settings: type KEY=VALUE,KEY=VALUE"),
]


@pytest.mark.parametrize(("asked", "complaint"), WRONG, ids=[complaint[:40] for _, complaint in WRONG])
def test_an_impossible_meeting_place_is_refused(asked: RendezvousOptions, complaint: str):
    with pytest.raises(LaunchError, match=f"^{re.escape(complaint)}"):
        choose_rendezvous(asked, "fresh")


def test_a_static_meeting_has_a_fixed_number_of_nodes():
    chosen = choose_rendezvous(RendezvousOptions(nodes="3", address="a", node_rank=1), "fresh")
    assert chosen == Rendezvous("static", "a:29500", "samestep", {"rank": 1}, 3, 3, None)

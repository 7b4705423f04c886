"""Decisions before a launch: number of ranks, folder, variables, and how the launchers find each other."""

import re
import socket
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch.distributed as dist

from samestep.environment.hardware import Bf16Support
from samestep.errors import LaunchError
from samestep.launch import agent
from samestep.launch.job import Job, choose_variables, count_processes, folder_name
from samestep.launch.rendezvous import (
    Rendezvous,
    RendezvousOptions,
    check_route,
    choose_rendezvous,
    find_endpoint,
    host_on_this_node,
    join_command,
    parse_nodes,
)

WORKS = Bf16Support("works", "fine")


def job(processes: int = 2, max_restarts: int = 0, module: bool = False, arguments: tuple[str, ...] = ()) -> Job:
    return Job(
        target="lab.train" if module else "train.py",
        module=module,
        arguments=arguments,
        processes=processes,
        rendezvous=choose_rendezvous(RendezvousOptions(), "generated"),
        max_restarts=max_restarts,
        folder=Path("/runs/one"),
    )


@pytest.mark.parametrize(
    ("option", "gpus", "cores", "processes"),
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
def test_the_number_of_ranks_follows_from_gpus_and_cores(option: str, gpus: int, cores: int, processes: int):
    assert count_processes(option, gpus, cores) == processes


@pytest.mark.parametrize("option", ["0", "-1", "banana", "2.5", "", "GPU"])
def test_an_invalid_number_of_ranks_is_rejected(option: str):
    message = re.escape(f"--nproc-per-node must be auto, gpu, cpu or a number of at least 1, got {option}")
    with pytest.raises(LaunchError, match=f"^{message}$"):
        count_processes(option, 4, 4)


def test_gpu_without_a_gpu_is_rejected():
    message = "--nproc-per-node gpu needs a GPU, but torch finds none: use cpu, or a number"
    with pytest.raises(LaunchError, match=f"^{message}$"):
        count_processes("gpu", 0, 4)


def test_the_ranks_share_the_cores_as_threads():
    chosen = [choose_variables(job(ranks), {}, cores=10, gpus=0, bf16=WORKS)[0] for ranks in (1, 3, 10, 16)]
    assert [variables["OMP_NUM_THREADS"] for variables in chosen] == ["10", "3", "1", "1"]


def test_the_command_is_a_plain_python_call():
    assert job(arguments=("--lr", "0.1")).command == ("-u", "train.py", "--lr", "0.1")
    assert job(module=True, arguments=("--lr", "0.1")).command == ("-u", "-m", "lab.train", "--lr", "0.1")


@pytest.mark.parametrize(
    ("target", "name"),
    [("lab/train.py", "train"), ("lab.train", "lab.train"), ("train", "train"), ("/a/my.model.py", "my.model")],
)
def test_the_default_folder_is_named_after_script_and_time(target: str, name: str):
    assert folder_name(target, datetime(2026, 1, 31, 9, 30, 5)) == f"{name}-20260131-093005"


def test_the_ranks_get_threads_and_the_folder():
    variables, explanation = choose_variables(job(processes=2), {}, cores=8, gpus=0, bf16=WORKS)
    assert variables == {"OMP_NUM_THREADS": "4", "SAMESTEP_FOLDER": "/runs/one", "SAMESTEP_FOLDER_IS_EXPLICIT": "1"}
    assert explanation == "OMP_NUM_THREADS=4 (8 cores for 2 ranks, no GPU)"


def test_variables_that_the_user_set_are_kept():
    variables, explanation = choose_variables(job(processes=1), {"OMP_NUM_THREADS": "7"}, cores=8, gpus=0, bf16=WORKS)
    assert "OMP_NUM_THREADS" not in variables
    assert explanation == "OMP_NUM_THREADS=7 (set by you)"


def test_ranks_that_may_restart_get_their_own_store():
    variables, explanation = choose_variables(job(max_restarts=1), {}, cores=8, gpus=0, bf16=WORKS)
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert "keeps outdated addresses after a restart" in explanation


def test_nccl_ends_ranks_soon_after_a_timeout():
    name = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
    assert choose_variables(job(), {}, cores=8, gpus=2, bf16=WORKS)[0][name] == "3000"
    values, explanation = choose_variables(job(), {name: "60000"}, cores=8, gpus=2, bf16=WORKS)
    assert name not in values
    assert f"{name}=60000 (set by you)" in explanation
    assert name not in choose_variables(job(), {}, cores=8, gpus=0, bf16=WORKS)[0]


def test_a_cpu_that_crashes_with_bfloat16_gets_the_workaround():
    variables, explanation = choose_variables(
        job(), {}, cores=2, gpus=0, bf16=Bf16Support("workaround", "bfloat16 crashes")
    )
    assert variables["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    assert explanation.endswith("; ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 (bfloat16 crashes)")


@pytest.mark.parametrize(("text", "nodes"), [("1", (1, 1)), ("4", (4, 4)), ("1:4", (1, 4)), ("2:2", (2, 2))])
def test_nodes_are_a_number_or_a_range(text: str, nodes: tuple[int, int]):
    assert parse_nodes(text) == nodes


@pytest.mark.parametrize("text", ["0", "3:1", "0:2", "-1", "two", "1:", ":2", "1:2:3", ""])
def test_invalid_numbers_of_nodes_are_rejected(text: str):
    message = f"--nnodes {text} is not a number of nodes: pass a number of at least 1, or MIN:MAX as in --nnodes 1:4"
    with pytest.raises(LaunchError, match=f"^{re.escape(message)}$"):
        parse_nodes(text)


# The options, and the backend, endpoint, settings and the port that must be free on this node.
RENDEZVOUS: list[tuple[RendezvousOptions, str, str, dict[str, str | int], int | None]] = [
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


@pytest.mark.parametrize(("options", "backend", "endpoint", "settings", "port"), RENDEZVOUS)
def test_the_rendezvous_follows_from_the_options(
    options: RendezvousOptions, backend: str, endpoint: str, settings: dict[str, str | int], port: int | None
):
    chosen = choose_rendezvous(options, generated_id="generated")
    assert (chosen.backend, chosen.endpoint, chosen.settings, chosen.hosted_port) == (backend, endpoint, settings, port)


def test_a_job_on_one_machine_gets_a_generated_id():
    assert choose_rendezvous(RendezvousOptions(), "generated").id == "generated"
    assert choose_rendezvous(RendezvousOptions(nodes="2", endpoint="a:1"), "generated").id == "samestep"
    assert choose_rendezvous(RendezvousOptions(nodes="2", endpoint="a:1", id="mine"), "generated").id == "mine"


def no_endpoint() -> str:
    raise AssertionError("an endpoint was searched")


def test_a_node_hosts_the_rendezvous_if_it_may_start_alone_and_no_endpoint_was_given():
    hosting = host_on_this_node(
        RendezvousOptions(nodes="1:4", settings="last_call_timeout=1"), "0123456789ab", lambda: "node1:29401"
    )
    assert join_command(hosting) == "samestep run --nnodes 1:4 --rdzv-endpoint node1:29401 --rdzv-id 01234567 ..."
    chosen = choose_rendezvous(hosting, "0123456789ab")
    settings = {"is_host": "1", "last_call_timeout": "1"}
    assert chosen == Rendezvous("c10d", "node1:29401", "01234567", settings, 1, 4, None)
    assert chosen.hosted_port == 29401
    named = host_on_this_node(
        RendezvousOptions(nodes="1:4", backend="c10d", id="it's"), "0123456789ab", lambda: "node1:29401"
    )
    assert join_command(named).endswith("""--rdzv-id 'it'"'"'s' ...""")


@pytest.mark.parametrize(
    "options",
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
def test_a_node_with_an_endpoint_or_a_minimum_of_several_nodes_hosts_nothing(options: RendezvousOptions):
    assert host_on_this_node(options, "generated", no_endpoint) == options


def test_the_endpoint_is_the_host_name_or_the_given_address(monkeypatch: pytest.MonkeyPatch):
    host, _, port = find_endpoint(None).rpartition(":")
    assert host == socket.gethostname()
    assert 29400 <= int(port) < 29500
    assert find_endpoint("127.0.0.1").startswith("127.0.0.1:")
    with socket.create_server(("", int(port))):
        assert int(find_endpoint(None).rpartition(":")[2]) > int(port)
        monkeypatch.setattr("samestep.launch.rendezvous._DYNAMIC_PORTS", range(int(port), int(port) + 1))
        message = f"this machine would host the rendezvous, but its ports {port} to {port} are all in use: pass --rdzv"
        with pytest.raises(LaunchError, match=f"^{message}"):
            find_endpoint(None)


def test_a_host_name_that_cannot_be_resolved_needs_an_address(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    message = r"this machine would host the rendezvous, but its name no-such-host\.invalid cannot be resolved \(.+\): "
    with pytest.raises(LaunchError, match=f"^{message}pass --local-addr"):
        find_endpoint(None)


REJECTED = [
    (
        RendezvousOptions(nodes="2"),
        "--nnodes 2 needs an endpoint for the rendezvous: pass the same --rdzv-endpoint NODE_0:29400 on",
    ),
    (
        RendezvousOptions(nodes="1:4", settings="is_host=0"),
        "--nnodes 1:4 needs an endpoint for the rendezvous: pass the same --rdzv-endpoint NODE_0:29400 on",
    ),
    (
        RendezvousOptions(nodes="2", port=77),
        "--nnodes 2 needs an endpoint for the rendezvous: pass the same --rdzv-endpoint NODE_0",
    ),
    (
        RendezvousOptions(nodes="2", backend="c10d"),
        "--rdzv-backend c10d with --nnodes 2 needs an endpoint: pass the same --rdzv-endpoint NODE_0",
    ),
    (RendezvousOptions(backend="zeus"), "--rdzv-backend zeus is unknown: use one of c10d, static, etcd, etcd-v2"),
    (
        RendezvousOptions(standalone=True, nodes="2"),
        "--standalone uses this machine only, but --nnodes is 2: leave out one of the two",
    ),
    (
        RendezvousOptions(standalone=True, endpoint="a:1", port=2),
        "--standalone chooses a free port itself: leave out --rdzv-endpoint and",
    ),
    (
        RendezvousOptions(endpoint="a:b"),
        "a:b is not an endpoint: pass HOST:PORT with a port up to 65535, as in node1:29400",
    ),
    (
        RendezvousOptions(endpoint="a:70000"),
        "a:70000 is not an endpoint: pass HOST:PORT with a port up to 65535, as in node1",
    ),
    (RendezvousOptions(port=0), "--master-port 0 is not a port: pass a number from 1 to 65535"),
    (
        RendezvousOptions(nodes="1:2", address="a"),
        "--nnodes 1:2 is elastic, which a static rendezvous does not support: use --rdzv-endpoint HOST:",
    ),
    (
        RendezvousOptions(nodes="2", address="a"),
        "--master-addr with 2 nodes needs --node-rank: pass a different number from 0 to 1 on each node",
    ),
    (
        RendezvousOptions(nodes="2", address="a", node_rank=2),
        "--node-rank 2 is out of range for 2 node(s): pass a number from 0 to 1",
    ),
    (
        RendezvousOptions(nodes="2", address="a", node_rank=-1),
        "--node-rank -1 is out of range for 2 node(s): pass a number from 0 to 1",
    ),
    (RendezvousOptions(settings="a"), "--rdzv-conf a is not a list of settings: pass KEY=VALUE,KEY=VALUE"),
]


@pytest.mark.parametrize(("options", "message"), REJECTED, ids=[message[:40] for _, message in REJECTED])
def test_invalid_rendezvous_options_are_rejected(options: RendezvousOptions, message: str):
    with pytest.raises(LaunchError, match=f"^{re.escape(message)}"):
        choose_rendezvous(options, "generated")


def test_launches_without_an_id_agree_on_a_run_id_of_their_own():
    one, other = (dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2))
    name = agent.agree_on_run_id(dist.PrefixStore("torch.rendezvous.samestep.0", one))
    assert agent.agree_on_run_id(dist.PrefixStore("torch.rendezvous.samestep.1", one)) == name  # after a restart
    assert agent.agree_on_run_id(dist.PrefixStore("torch.rendezvous.samestep.0", other)) not in (name, "samestep")
    assert agent.agree_on_run_id(dist.HashStore()) == "none"  # as with etcd, whose keys outlive a launch


def test_only_launches_of_several_nodes_without_an_id_are_unnamed():
    nodes = RendezvousOptions(nodes="2", endpoint="node1:29400")
    assert choose_rendezvous(nodes, "3f1c").is_unnamed
    assert replace(choose_rendezvous(nodes, "3f1c"), id="samestep-half1").is_unnamed
    for name in ("job7", "samestep", "samestep-half1"):
        assert not choose_rendezvous(replace(nodes, id=name), "3f1c").is_unnamed
    assert not choose_rendezvous(RendezvousOptions(), "3f1c").is_unnamed


def test_a_static_rendezvous_has_a_fixed_number_of_nodes():
    chosen = choose_rendezvous(RendezvousOptions(nodes="3", address="a", node_rank=1), "generated")
    assert chosen == Rendezvous("static", "a:29500", "samestep", {"rank": 1}, 3, 3, None, is_unnamed=True)


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_a_service_that_is_not_etcd_is_named(backend: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agent, "connect_unless_silent", lambda *_: None)  # the client of etcd is not installed
    options = RendezvousOptions(nodes="2", backend=backend, endpoint="127.0.0.1:2379")
    with pytest.raises(LaunchError) as caught:
        agent._worker_spec(replace(job(), rendezvous=choose_rendezvous(options, "generated")))
    assert str(caught.value) == (
        "the process that listens at 127.0.0.1:2379 does not answer like etcd: pass the address and the client port of "
        "the etcd server to --rdzv-endpoint, or use --rdzv-backend c10d"
    )


@pytest.mark.slow
def test_a_join_timeout_is_also_the_time_to_wait_for_the_name_of_the_host(monkeypatch: pytest.MonkeyPatch):
    resolve, attempts = socket.getaddrinfo, []

    def resolve_late(host: str, *arguments: object, **options: object) -> object:
        attempts.append(host)
        return resolve("127.0.0.1" if len(attempts) > 3 else host, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(socket, "getaddrinfo", resolve_late)
    options = RendezvousOptions(nodes="2", endpoint="pod-0.invalid:29400", settings="read_timeout=1,join_timeout=600")
    check_route(choose_rendezvous(options, "generated"))
    assert attempts == ["pod-0.invalid"] * 4

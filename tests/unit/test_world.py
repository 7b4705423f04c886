"""Which rank a process is, from the variables of torchrun, of srun, or set by hand; and samestep's own variables."""

import re
from pathlib import Path

import pytest

from samestep.environment.world import (
    World,
    expand_nodes,
    expand_tasks,
    export,
    in_step,
    launch_name,
    port_of,
    read_environ,
    read_world,
    run_folder,
    run_folder_is_explicit,
)
from samestep.errors import WorldError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "node[03-05],gpu9",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def test_an_empty_environment_is_a_single_rank():
    world = read_world({})
    assert world == World()
    assert (world.rank, world.size, world.launcher, world.is_main, world.is_node_main) == (0, 1, "none", True, True)


def test_all_values_are_read_from_torchrun():
    assert read_world(TORCHRUN) == World(
        rank=5,
        size=8,
        local_rank=1,
        local_size=4,
        node=1,
        nodes=2,
        address="node1",
        port=29500,
        launcher="torchrun",
        restart=2,
        job="job7",
        agent_store=True,
    )


def test_the_first_rank_of_the_second_node_is_node_main_but_not_main():
    world = read_world(TORCHRUN | {"RANK": "4", "LOCAL_RANK": "0"})
    assert (world.is_main, world.is_node_main) == (False, True)


def test_variables_set_by_hand_on_one_machine_need_no_local_rank():
    world = read_world(BY_HAND)
    assert (world.local_rank, world.local_size, world.node, world.nodes) == (1, 2, 0, 1)
    assert not world.agent_store


def test_one_rank_set_by_hand_needs_no_address():
    assert read_world({"RANK": "0", "WORLD_SIZE": "1"}).size == 1


def test_the_node_follows_from_variables_set_by_hand():
    world = read_world(without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID"))
    assert (world.node, world.nodes, world.job) == (1, 2, "")


def test_all_values_are_read_from_srun():
    assert read_world(SRUN) == World(
        rank=5,
        size=7,
        local_rank=1,
        local_size=2,
        node=2,
        nodes=4,
        address="node03",
        port=port_of(4242, 1),
        launcher="slurm",
        restart=0,
        job="4242",
        agent_store=False,
    )


def test_srun_counts_the_ranks_of_a_smaller_last_node():
    assert read_world(SRUN | {"SLURM_PROCID": "6", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"}).local_size == 1


def test_srun_on_one_node_uses_the_loopback_address():
    one_node = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0"}
    assert read_world(SRUN | one_node).address == "127.0.0.1"


def test_srun_without_variables_of_the_step_uses_those_of_the_job():
    job = without(
        SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"
    )
    job |= {"SLURM_NNODES": "4", "SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_JOB_NODELIST": "node[03-05],gpu9"}
    assert read_world(job) == read_world(SRUN)


def test_an_address_set_by_hand_overrides_srun():
    world = read_world(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert (world.address, world.port, world.launcher) == ("10.0.0.1", 1234, "slurm")


def test_variables_set_by_hand_that_agree_with_srun_are_accepted():
    assert read_world(SRUN | {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1"}) == read_world(SRUN)


def test_a_requeued_job_counts_its_restarts():
    assert read_world(SRUN | {"SLURM_RESTART_COUNT": "3"}).restart == 3


def test_torchrun_inside_srun_counts_as_torchrun():
    assert read_world(SRUN | TORCHRUN) == read_world(TORCHRUN)


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967291"}, {"SLURM_STEP_ID": "4294967290"}])
def test_a_python_process_in_the_batch_script_is_a_single_rank(step: dict[str, str]):
    batch = {"SLURM_JOB_ID": "4242", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"} | step
    assert not in_step(batch)
    assert read_world(batch) == World()


def test_an_allocation_without_a_task_is_a_single_rank():
    assert read_world({"SLURM_JOB_ID": "4242", "SLURM_NTASKS": "4"}) == World()


START = (
    "To fix it: start all ranks with `samestep run train.py` or `torchrun --nproc-per-node={ranks} train.py`, "
    "or run `unset RANK WORLD_SIZE LOCAL_RANK` for a single process"
)
LET_SRUN = "let srun number the ranks: `srun --ntasks=4 python train.py`, or `srun samestep run train.py`"

# The variables, the error, and a part of the remedy.
INVALID = [
    (
        {"WORLD_SIZE": "4"},
        "WORLD_SIZE=4 is set, but RANK is missing. Set: WORLD_SIZE=4. "
        "Not set: RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR, MASTER_PORT.",
        START.format(ranks=4),
    ),
    (
        {"RANK": "1"},
        "RANK=1 is set, but WORLD_SIZE is missing. Set: RANK=1.",
        START.format(ranks=4),
    ),
    (
        {"LOCAL_RANK": "1"},
        "LOCAL_RANK is set, but RANK and WORLD_SIZE are missing. Set: LOCAL_RANK=1.",
        START.format(ranks=4),
    ),
    (
        BY_HAND | {"RANK": "2"},
        "RANK=2 is out of range for WORLD_SIZE=2. Set: RANK=2, WORLD_SIZE=2, MASTER_ADDR=127.0.0.1, MASTER_PORT=29500.",
        START.format(ranks=4),
    ),
    (
        BY_HAND | {"WORLD_SIZE": "0"},
        "WORLD_SIZE must be at least 1, got 0. Set: RANK=1, WORLD_SIZE=0",
        "samestep run",
    ),
    (
        BY_HAND | {"RANK": "one"},
        "RANK=one is not a non-negative integer. Set: RANK=one, ",
        "run `unset RANK`, or start",
    ),
    (
        BY_HAND | {"RANK": "-1"},
        "RANK=-1 is not a non-negative integer. Set: RANK=-1, ",
        "run `unset RANK`, or start",
    ),
    (BY_HAND | {"WORLD_SIZE": ""}, "WORLD_SIZE='' is not a non-negative integer. ", "run `unset WORLD_SIZE`"),
    (BY_HAND | {"WORLD_SIZE": "2.0"}, "WORLD_SIZE=2.0 is not a non-negative integer. ", "run `unset WORLD_SIZE`"),
    (
        without(BY_HAND, "MASTER_ADDR"),
        "MASTER_ADDR is missing, so 2 ranks cannot reach each other. Set: RANK=1, WORLD_SIZE=2, MASTER_PORT=29500. ",
        "run `export MASTER_ADDR=HOST MASTER_PORT=29500` with the host of rank 0 (127.0.0.1 if all",
    ),
    (
        without(BY_HAND, "MASTER_ADDR", "MASTER_PORT"),
        "MASTER_ADDR and MASTER_PORT are missing, so 2 ranks cannot reach each other. Set: RANK=1, WORLD_SIZE=2. ",
        "run `export MASTER_ADDR=HOST MASTER_PORT=29500`",
    ),
    (BY_HAND | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port from 1 to 65535. ", START.format(ranks=2)),
    (
        BY_HAND | {"MASTER_ADDR": "node1"},
        "LOCAL_RANK and LOCAL_WORLD_SIZE are both needed with several nodes. ",
        "run `export LOCAL_RANK=... LOCAL_WORLD_SIZE=...` with this rank's number on its node",
    ),
    (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 is larger than WORLD_SIZE=8. ", START.format(ranks=8)),
    (
        TORCHRUN | {"LOCAL_RANK": "4"},
        "LOCAL_RANK=4 is out of range for 4 rank(s) on this node. ",
        START.format(ranks=8),
    ),
    (TORCHRUN | {"LOCAL_RANK": "2", "RANK": "1"}, "LOCAL_RANK=2 is larger than RANK=1. ", START.format(ranks=8)),
    (TORCHRUN | {"GROUP_RANK": "2"}, "GROUP_RANK=2 is out of range for 2 node(s). ", START.format(ranks=8)),
    (
        TORCHRUN | {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"},
        "the only node has 4 rank(s), but WORLD_SIZE=8. ",
        "torchrun",
    ),
    (
        SRUN | {"RANK": "0"},
        "RANK=0 contradicts SLURM_PROCID=5. Set: SLURM_JOB_ID=4242, SLURM_STEP_ID=1, SLURM_PROCID=5, ",
        f"run `unset RANK`, and {LET_SRUN}",
    ),
    (
        SRUN | {"WORLD_SIZE": "8"},
        "WORLD_SIZE=8 contradicts SLURM_STEP_NUM_TASKS=7. ",
        "run `unset WORLD_SIZE`, and let srun",
    ),
    (SRUN | {"LOCAL_RANK": "0"}, "LOCAL_RANK=0 contradicts SLURM_LOCALID=1. ", "run `unset LOCAL_RANK`, and let srun"),
    (
        without(SRUN, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
        "srun started this process, but SLURM_STEP_NUM_TASKS, the number of tasks, is missing. ",
        LET_SRUN,
    ),
    (SRUN | {"SLURM_PROCID": "7"}, "SLURM_PROCID=7 is out of range for 7 task(s). ", LET_SRUN),
    (without(SRUN, "SLURM_LOCALID"), "SLURM_LOCALID is missing, but there are 7 ranks. ", LET_SRUN),
    (without(SRUN, "SLURM_NODEID"), "SLURM_NODEID is missing, but there are 4 nodes. ", LET_SRUN),
    (
        without(SRUN, "SLURM_STEP_TASKS_PER_NODE"),
        "SLURM_STEP_TASKS_PER_NODE is missing, so the ranks of this node cannot be",
        LET_SRUN,
    ),
    (
        SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(y3)"},
        "SLURM_STEP_TASKS_PER_NODE: '2(y3)' is not a list of tasks such as 2(x3),1. ",
        "",
    ),
    (
        SRUN | {"SLURM_NODEID": "4"},
        "SLURM_NODEID=4 is out of range for the 4 node(s) of SLURM_STEP_TASKS_PER_NODE. ",
        LET_SRUN,
    ),
    (
        without(SRUN, "SLURM_STEP_NODELIST"),
        "SLURM_STEP_NODELIST is missing, so 7 ranks cannot reach each other. ",
        "run `export MASTER_ADDR=HOST` with the name of node 0 before srun",
    ),
    (
        SRUN | {"SLURM_STEP_NODELIST": "node[1-"},
        "SLURM_STEP_NODELIST: 'node[1-' is not a SLURM node list such as node[01",
        "",
    ),
    (
        without(SRUN, "SLURM_JOB_ID"),
        "SLURM_JOB_ID is missing, from which the ranks derive their port. ",
        "run `export MASTER_PORT=29500` before srun",
    ),
    (
        SRUN | {"SLURM_JOB_ID": "a"},
        "SLURM_JOB_ID=a is not a non-negative integer. ",
        "run `unset SLURM_JOB_ID`, or let srun",
    ),
    (SRUN | {"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port from 1 to 65535. ", LET_SRUN),
]


@pytest.mark.parametrize(("environ", "problem", "remedy"), INVALID, ids=[problem[:48] for _, problem, _ in INVALID])
def test_contradictory_variables_are_reported_with_their_values(environ: dict[str, str], problem: str, remedy: str):
    with pytest.raises(WorldError, match=f"^{re.escape(problem)}") as caught:
        read_world(environ)
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[01-03,07],gpu3", ["node01", "node02", "node03", "node07", "gpu3"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("rack[1-2]n[1-2]-ib", ["rack1n1-ib", "rack1n2-ib", "rack2n1-ib", "rack2n2-ib"]),
        ("a,b[1],c", ["a", "b1", "c"]),
    ],
)
def test_node_lists_are_expanded_in_order(text: str, hosts: list[str]):
    assert expand_nodes(text) == hosts


@pytest.mark.parametrize("text", ["", "node[", "node]1[", "a,,b", "n[1-x]", "n[]"])
def test_an_invalid_node_list_is_rejected(text: str):
    with pytest.raises(ValueError, match="is not a"):
        expand_nodes(text)


def test_tasks_per_node_are_expanded():
    assert expand_tasks("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks("4") == [4]


def test_ports_of_consecutive_jobs_and_steps_differ_and_stay_below_the_ephemeral_range():
    ports = [port_of(job, step) for job in range(100_000, 100_150) for step in range(3)]
    assert len(set(ports)) == len(ports)
    assert min(ports) >= 10_000
    assert max(ports) < 29_400


def test_export_sets_variables_of_this_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SAMESTEP_FOLDER", "/before")
    export({"SAMESTEP_FOLDER": "/after"})
    assert read_environ()["SAMESTEP_FOLDER"] == "/after"
    assert run_folder() == Path("/after")


def test_changing_the_copy_does_not_change_the_environment():
    read_environ()["SAMESTEP_TEST"] = "1"
    assert "SAMESTEP_TEST" not in read_environ()


def test_a_folder_with_a_generated_name_is_not_explicit():
    assert not run_folder_is_explicit({"SAMESTEP_FOLDER": "/a", "SAMESTEP_FOLDER_IS_EXPLICIT": "0"})
    assert run_folder_is_explicit({"SAMESTEP_FOLDER": "/a", "SAMESTEP_FOLDER_IS_EXPLICIT": "1"})
    assert run_folder_is_explicit({"SAMESTEP_FOLDER": "/a"})  # set by hand


def test_the_name_of_a_launch_is_the_run_id_of_the_agent():
    assert launch_name({"TORCHELASTIC_RUN_ID": "3f1c"}) == "3f1c"
    assert launch_name({"TORCHELASTIC_RUN_ID": "none"}) == launch_name({}) == ""


def test_without_a_launcher_there_is_no_run_folder():
    assert run_folder({}) is None
    assert run_folder({"SAMESTEP_FOLDER": ""}) is None

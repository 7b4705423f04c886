import re
from pathlib import Path

import pytest

from samestep.environment.slurm_variables import expand_nodes, expand_tasks, in_step, port_of
from samestep.environment.world import (
    World,
    export,
    launch_name,
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


def test_an_empty_environment_is_one_rank():
    world = read_world({})
    assert world == World()
    assert (world.rank, world.size, world.launcher, world.is_main, world.is_node_main) == (0, 1, "none", True, True)


def test_torchrun_tells_everything():
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


def test_first_and_node_first_differ_on_the_second_node():
    world = read_world(TORCHRUN | {"RANK": "4", "LOCAL_RANK": "0"})
    assert (world.is_main, world.is_node_main) == (False, True)


def test_variables_set_by_hand_on_one_machine_need_no_local_rank():
    world = read_world(BY_HAND)
    assert (world.local_rank, world.local_size, world.node, world.nodes) == (1, 2, 0, 1)
    assert not world.agent_store


def test_one_rank_set_by_hand_needs_no_meeting_place():
    assert read_world({"RANK": "0", "WORLD_SIZE": "1"}).size == 1


def test_variables_set_by_hand_on_two_nodes_give_the_node():
    world = read_world(without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID"))
    assert (world.node, world.nodes, world.job) == (1, 2, "")


def test_srun_tells_everything():
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


def test_srun_on_the_last_smaller_node_counts_its_own_ranks():
    assert read_world(SRUN | {"SLURM_PROCID": "6", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"}).local_size == 1


def test_srun_on_one_node_meets_on_the_loopback_address():
    one_node = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0"}
    assert read_world(SRUN | one_node).address == "127.0.0.1"


def test_srun_without_the_steps_own_variables_uses_those_of_the_job():
    job = without(
        SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"
    )
    job |= {"SLURM_NNODES": "4", "SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_JOB_NODELIST": "node[03-05],gpu9"}
    assert read_world(job) == read_world(SRUN)


def test_a_meeting_place_set_by_hand_wins_beside_srun():
    world = read_world(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert (world.address, world.port, world.launcher) == ("10.0.0.1", 1234, "slurm")


def test_variables_set_by_hand_that_agree_with_srun_are_accepted():
    assert read_world(SRUN | {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1"}) == read_world(SRUN)


def test_a_requeued_job_has_restarted():
    assert read_world(SRUN | {"SLURM_RESTART_COUNT": "3"}).restart == 3


def test_torchrun_inside_srun_counts_as_torchrun():
    assert read_world(SRUN | TORCHRUN) == read_world(TORCHRUN)


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967291"}, {"SLURM_STEP_ID": "4294967290"}])
def test_a_python_in_the_batch_script_is_one_rank(step: dict[str, str]):
    batch = {"SLURM_JOB_ID": "4242", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"} | step
    assert not in_step(batch)
    assert read_world(batch) == World()


def test_an_allocation_without_a_task_is_one_rank():
    assert read_world({"SLURM_JOB_ID": "4242", "SLURM_NTASKS": "4"}) == World()


START = (
    "To repair it: start all ranks with `samestep run train.py` or `torchrun --nproc-per-node={ranks} train.py`, "
    "or type `unset RANK WORLD_SIZE LOCAL_RANK` for one process alone"
)
LET_SRUN = "let srun number the ranks: `srun --ntasks=4 python train.py`, or `srun samestep run train.py`"

# What is set, the complaint, and a part of what to type instead.
WRONG = [
    (
        {"WORLD_SIZE": "4"},
        "WORLD_SIZE=4 without RANK does not say which of the 4 rank(s) this process is. Set: WORLD_SIZE=4. "
        "Not set: RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR, MASTER_PORT.",
        START.format(ranks=4),
    ),
    (
        {"RANK": "1"},
        "RANK=1 without WORLD_SIZE does not say how many ranks there are. Set: RANK=1.",
        START.format(ranks=4),
    ),
    (
        {"LOCAL_RANK": "1"},
        "LOCAL_RANK without RANK and WORLD_SIZE gives a place on a node, none among all. Set: LOCAL_RANK=1.",
        START.format(ranks=4),
    ),
    (
        BY_HAND | {"RANK": "2"},
        "RANK=2 is not one of the ranks 0 to 1 of WORLD_SIZE=2. "
        "Set: RANK=2, WORLD_SIZE=2, MASTER_ADDR=127.0.0.1, MASTER_PORT=29500.",
        START.format(ranks=4),
    ),
    (
        BY_HAND | {"WORLD_SIZE": "0"},
        "WORLD_SIZE=0 leaves no rank, not even this one. Set: RANK=1, WORLD_SIZE=0",
        "samestep run",
    ),
    (
        BY_HAND | {"RANK": "one"},
        "RANK=one is not a whole number from 0 up. Set: RANK=one, ",
        "type `unset RANK`, or start",
    ),
    (
        BY_HAND | {"RANK": "-1"},
        "RANK=-1 is not a whole number from 0 up. Set: RANK=-1, ",
        "type `unset RANK`, or start",
    ),
    (BY_HAND | {"WORLD_SIZE": ""}, "WORLD_SIZE='' is not a whole number from 0 up. ", "type `unset WORLD_SIZE`"),
    (BY_HAND | {"WORLD_SIZE": "2.0"}, "WORLD_SIZE=2.0 is not a whole number from 0 up. ", "type `unset WORLD_SIZE`"),
    (
        without(BY_HAND, "MASTER_ADDR"),
        "MASTER_ADDR missing: 2 ranks do not know where to meet. Set: RANK=1, WORLD_SIZE=2, MASTER_PORT=29500. ",
        "type `export MASTER_ADDR=HOST MASTER_PORT=29500` with the first rank's host (127.0.0.1 where all",
    ),
    (
        without(BY_HAND, "MASTER_ADDR", "MASTER_PORT"),
        "MASTER_ADDR and MASTER_PORT missing: 2 ranks do not know where to meet. Set: RANK=1, WORLD_SIZE=2. ",
        "type `export MASTER_ADDR=HOST MASTER_PORT=29500`",
    ),
    (BY_HAND | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port from 1 to 65535. ", START.format(ranks=2)),
    (
        BY_HAND | {"MASTER_ADDR": "node1"},
        "LOCAL_RANK and LOCAL_WORLD_SIZE are both needed: they follow from RANK and WORLD_SIZE on one node only. ",
        "type `export LOCAL_RANK=... LOCAL_WORLD_SIZE=...` with this rank's number on its node",
    ),
    (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 is more than WORLD_SIZE=8. ", START.format(ranks=8)),
    (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK=4 is not one of the 4 rank(s) of this node. ", START.format(ranks=8)),
    (TORCHRUN | {"LOCAL_RANK": "2", "RANK": "1"}, "LOCAL_RANK=2 is more than RANK=1. ", START.format(ranks=8)),
    (TORCHRUN | {"GROUP_RANK": "2"}, "GROUP_RANK=2 is not one of the 2 node(s). ", START.format(ranks=8)),
    (
        TORCHRUN | {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"},
        "4 rank(s) on the only node do not make WORLD_SIZE=8. ",
        "torchrun",
    ),
    (
        SRUN | {"RANK": "0"},
        "RANK=0 contradicts SLURM_PROCID=5. Set: SLURM_JOB_ID=4242, SLURM_STEP_ID=1, SLURM_PROCID=5, ",
        f"type `unset RANK`, and {LET_SRUN}",
    ),
    (
        SRUN | {"WORLD_SIZE": "8"},
        "WORLD_SIZE=8 contradicts SLURM_STEP_NUM_TASKS=7. ",
        "type `unset WORLD_SIZE`, and let srun",
    ),
    (SRUN | {"LOCAL_RANK": "0"}, "LOCAL_RANK=0 contradicts SLURM_LOCALID=1. ", "type `unset LOCAL_RANK`, and let srun"),
    (
        without(SRUN, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
        "srun started this process, but SLURM_STEP_NUM_TASKS does not say how many there are. ",
        LET_SRUN,
    ),
    (SRUN | {"SLURM_PROCID": "7"}, "SLURM_PROCID=7 is not one of the tasks 0 to 6. ", LET_SRUN),
    (without(SRUN, "SLURM_LOCALID"), "SLURM_LOCALID is missing for one of 7 ranks. ", LET_SRUN),
    (without(SRUN, "SLURM_NODEID"), "SLURM_NODEID is missing on one of 4 nodes. ", LET_SRUN),
    (
        without(SRUN, "SLURM_STEP_TASKS_PER_NODE"),
        "SLURM_STEP_TASKS_PER_NODE is missing: the ranks of this node cannot be",
        LET_SRUN,
    ),
    (
        SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(y3)"},
        "SLURM_STEP_TASKS_PER_NODE: '2(y3)' is not a list of tasks such as 2(x3),1. ",
        "",
    ),
    (
        SRUN | {"SLURM_NODEID": "4"},
        "SLURM_NODEID=4 is not one of the 4 node(s) of SLURM_STEP_TASKS_PER_NODE. ",
        LET_SRUN,
    ),
    (
        without(SRUN, "SLURM_STEP_NODELIST"),
        "SLURM_STEP_NODELIST is missing: 7 ranks do not know where to meet. ",
        "type `export MASTER_ADDR=HOST` with the first node's name before srun",
    ),
    (
        SRUN | {"SLURM_STEP_NODELIST": "node[1-"},
        "SLURM_STEP_NODELIST: 'node[1-' is not a SLURM node list such as node[01",
        "",
    ),
    (
        without(SRUN, "SLURM_JOB_ID"),
        "SLURM_JOB_ID is missing, from which the ranks derive their port. ",
        "type `export MASTER_PORT=29500` before srun",
    ),
    (
        SRUN | {"SLURM_JOB_ID": "a"},
        "SLURM_JOB_ID=a is not a whole number from 0 up. ",
        "type `unset SLURM_JOB_ID`, or let srun",
    ),
    (SRUN | {"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port from 1 to 65535. ", LET_SRUN),
]


@pytest.mark.parametrize(("environ", "problem", "remedy"), WRONG, ids=[problem[:48] for _, problem, _ in WRONG])
def test_what_makes_no_world_is_told_with_its_variables(environ: dict[str, str], problem: str, remedy: str):
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
def test_a_broken_node_list_is_refused(text: str):
    with pytest.raises(ValueError, match="is not a"):
        expand_nodes(text)


def test_tasks_per_node_are_expanded():
    assert expand_tasks("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks("4") == [4]


def test_ports_of_neighbouring_jobs_and_steps_differ_and_stay_below_the_ephemeral_range():
    ports = [port_of(job, step) for job in range(100_000, 100_150) for step in range(3)]
    assert len(set(ports)) == len(ports)
    assert min(ports) >= 10_000
    assert max(ports) < 29_400


def test_export_reaches_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SAMESTEP_FOLDER", "/before")
    export({"SAMESTEP_FOLDER": "/after"})
    assert read_environ()["SAMESTEP_FOLDER"] == "/after"
    assert run_folder() == Path("/after")


def test_changing_the_copy_does_not_change_the_environment():
    read_environ()["SAMESTEP_TEST"] = "1"
    assert "SAMESTEP_TEST" not in read_environ()


def test_a_folder_that_the_launcher_made_up_is_no_wish():
    assert not run_folder_is_explicit({"SAMESTEP_FOLDER": "/a", "SAMESTEP_FOLDER_IS_EXPLICIT": "0"})
    assert run_folder_is_explicit({"SAMESTEP_FOLDER": "/a", "SAMESTEP_FOLDER_IS_EXPLICIT": "1"})
    assert run_folder_is_explicit({"SAMESTEP_FOLDER": "/a"})  # set by hand


def test_a_launch_has_the_name_that_its_agent_gave_it():
    assert launch_name({"TORCHELASTIC_RUN_ID": "3f1c"}) == "3f1c"
    assert launch_name({"TORCHELASTIC_RUN_ID": "none"}) == launch_name({}) == ""


def test_there_is_no_run_folder_without_a_launcher():
    assert run_folder({}) is None
    assert run_folder({"SAMESTEP_FOLDER": ""}) is None

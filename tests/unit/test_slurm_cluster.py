"""The cluster of a SLURM job, seen from its nodes and from a login node."""

import pytest

from samestep.errors import PlanError
from samestep.planner.cluster_discovery import local_cluster, read_allocation, slurm_job_cluster, slurm_nodes
from tests.unit.test_cluster_spec import GIB, gpu, hardware

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}
INSIDE = {**JOB, "SLURMD_NODENAME": "node01"}
CPU = local_cluster(hardware())


def one_gpu(name="NVIDIA A100-SXM4-80GB"):
    return local_cluster(hardware([gpu(name=name, free=60)]))


def test_on_a_login_node_the_requested_gpus_of_all_nodes_count():
    job = {**JOB, "SLURM_GPUS_PER_NODE": "a100:4", "SLURM_MEM_PER_NODE": "1024", "SLURM_CPUS_ON_NODE": "24"}
    found = slurm_job_cluster(CPU, job, 3)
    assert (found.device.name, found.devices_per_node, found.nodes, found.cores) == ("a100", 4, 3, 24)
    assert found.host_memory == GIB
    assert found.source == "SLURM job 7: 4 GPU(s) on each of 3 node(s)"


def test_a_gpu_of_the_login_node_does_not_belong_to_the_job():
    found = slurm_job_cluster(one_gpu("Tesla T4"), {**JOB, "SLURM_GPUS_PER_NODE": "h100:8"}, 3)
    assert (found.device.name, found.devices_per_node, found.nodes) == ("h100", 8, 3)


def test_inside_a_job_all_its_gpus_count_with_the_memory_of_this_node():
    found = slurm_job_cluster(one_gpu(), {**INSIDE, "SLURM_GPUS_ON_NODE": "4"}, 3)
    assert (found.device.name, found.devices_per_node, found.nodes) == ("a100", 4, 3)
    assert found.device.memory_free == 60 * GIB
    assert found.intra_node_bandwidth == 300e9  # a single visible GPU has no connection: from the table
    assert found.source.startswith("SLURM job 7: 4 GPU(s) on each of 3 node(s); this machine: 1 x NVIDIA A100")


def test_on_a_login_node_gpus_without_a_name_are_assumed_to_be_like_the_local_ones():
    found = slurm_job_cluster(one_gpu(), {**JOB, "SLURM_GPUS_PER_NODE": "2"}, 3)
    assert (found.device.name, found.devices_per_node, found.nodes) == ("a100", 2, 3)
    assert "assumed to be like those of this machine" in found.source


def test_gpus_without_a_known_name_must_be_given_with_the_gpus_option():
    message = (
        "SLURM job 7: 4 GPU(s) on each of 3 node(s), but the job does not name a known device. Pass --gpus NAME:4 "
        "--nodes 3, for example --gpus a100:4 --nodes 3."
    )
    for requested in ("4", "x1:4"):
        with pytest.raises(PlanError) as error:
            slurm_job_cluster(CPU, {**JOB, "SLURM_GPUS_PER_NODE": requested}, 3)
        assert str(error.value) == message


@pytest.mark.parametrize("environ", [{}, JOB, {"SLURM_GPUS_PER_NODE": "a100:4"}])
def test_without_a_job_or_without_gpus_in_it_the_local_cluster_is_used(environ):
    assert slurm_job_cluster(CPU, environ, 1) is CPU


@pytest.mark.parametrize(
    ("variables", "gpus", "name"),
    [
        ({"SLURM_GPUS_PER_NODE": "4"}, 4, None),
        ({"SLURM_GPUS": "h100:12"}, 4, "h100"),
        ({"SLURM_GPUS": "7"}, 3, None),
        ({"SLURM_GPUS_PER_TASK": "v100:1", "SLURM_NTASKS": "12"}, 4, "v100"),
        ({"SLURM_GPUS_PER_TASK": "2"}, 2, None),
        ({"SLURM_GPUS_PER_NODE": "a100:2,v100:1"}, 3, None),
        ({"SLURM_GPUS_ON_NODE": "8"}, 8, None),
        ({"SLURM_JOB_GPUS": "0,1,5"}, 3, None),
        ({}, 0, None),
    ],
)
def test_gpus_per_node_are_counted_for_every_way_to_request_them(variables, gpus, name):
    found = read_allocation({**JOB, **variables})
    assert (found.gpus, found.name, found.inside) == (gpus, name, False)


def test_outside_of_a_job_there_is_one_node():
    assert [slurm_nodes(each) for each in ({}, JOB, {"SLURM_NNODES": "2"})] == [1, 3, 2]

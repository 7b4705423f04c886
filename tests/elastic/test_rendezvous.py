"""Rendezvous of ranks in a store that outlives them, and of nodes at one of their own addresses."""

import re
import socket
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist

from samestep.distributed.process_group import connect_store, rendezvous
from samestep.environment.world import World, read_world
from samestep.errors import WorldError
from samestep.launch.rendezvous import RendezvousOptions, can_listen, choose_rendezvous, serve_own_endpoint
from tests.warm import free_port


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def connect(store: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)


def run_concurrently(*functions: Callable[[], str]) -> list[str]:
    """The results of functions that run at the same time, one per rank."""
    results = [""] * len(functions)

    def run(index: int) -> None:
        results[index] = functions[index]()

    threads = [threading.Thread(target=run, args=[index]) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_ranks_that_use_one_store_again_agree_on_a_new_name_each_time(store: dist.TCPStore):
    stores = [store, connect(store), connect(store)]
    ranks = [lambda rank=rank: rendezvous(stores[rank], rank, 3, 20.0) for rank in range(3)]
    generations = [run_concurrently(*ranks) for _ in range(3)]
    assert all(len(set(names)) == 1 and names[0] for names in generations)
    assert len({names[0] for names in generations}) == 3


def test_what_a_killed_rank_left_in_the_store_does_not_block_its_successor(store: dist.TCPStore):
    # The killed rank posted a token, but never confirmed the membership.
    with pytest.raises(WorldError):
        rendezvous(connect(store), 1, 2, 0.05)

    def join_late() -> str:
        threading.Event().wait(0.3)
        return rendezvous(connect(store), 1, 2, 20.0)

    names = run_concurrently(lambda: rendezvous(store, 0, 2, 20.0), join_late)
    assert names[0] == names[1] != ""


def test_ranks_that_do_not_connect_are_listed(store: dist.TCPStore):
    with pytest.raises(WorldError) as caught:
        rendezvous(store, 0, 4, 0.2)
    assert str(caught.value) == (
        "rank 0 waited 0.2 s for 4 ranks, and rank(s) 1, 2, 3 did not connect: look for their last lines, check that "
        "WORLD_SIZE processes were started, or raise the timeout with Run(start_timeout=...)"
    )


def test_a_rank_that_connected_and_was_killed_is_reported(store: dist.TCPStore):
    for rank in (1, 0):
        with pytest.raises(
            WorldError, match="for 2 ranks, and" if rank else "one of them connected and has exited: look"
        ):
            rendezvous(connect(store), rank, 2, 0.1)


def second_of_two(port: int) -> World:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    return read_world({**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})


def test_a_rank_waits_until_rank_0_listens():
    port = free_port()
    served: list[dist.TCPStore] = []

    def listen_late() -> str:
        threading.Event().wait(0.3)
        served.append(dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
        served[0].set("key", "value")
        return ""

    results = run_concurrently(lambda: connect_store(second_of_two(port), 30.0).get("key").decode(), listen_late)
    assert results[0] == "value"


@pytest.mark.slow
def test_a_rank_0_that_never_listens_is_reported_with_its_address():
    port = free_port()
    message = f"rank 1 cannot connect to rank 0 at 127.0.0.1:{port} within 0.2 s: check that rank 0 has started, that"
    with pytest.raises(WorldError, match=f"^{re.escape(message)}"):
        connect_store(second_of_two(port), 0.2)


def test_the_node_whose_address_is_the_endpoint_serves_the_rendezvous():
    options = RendezvousOptions(nodes="1:2", endpoint="192.0.2.1:29400")
    chosen = choose_rendezvous(options, "generated")
    served = serve_own_endpoint(chosen, lambda host, port: (host, port) == ("192.0.2.1", 29400))
    assert served.settings == {"is_host": "1"}
    assert serve_own_endpoint(chosen, lambda host, port: False) == chosen
    not_host = choose_rendezvous(replace(options, settings="is_host=0"), "generated")
    assert serve_own_endpoint(not_host, lambda host, port: True) == not_host


def test_a_machine_can_listen_only_at_its_own_free_addresses():
    own = next((each for each in socket.getaddrinfo(socket.gethostname(), 0, socket.AF_INET)), None)
    assert not can_listen("127.0.0.1", 29400)  # every machine has it
    assert not can_listen("192.0.2.77", 29400)  # a documentation address belongs to no machine
    assert not can_listen("no-such-host.invalid", 29400)
    if own is not None and not own[4][0].startswith("127."):
        with socket.socket() as server:
            server.bind((own[4][0], 0))
            server.listen(1)
            assert not can_listen(own[4][0], server.getsockname()[1])
        assert can_listen(own[4][0], 0)

"""A coordinator that runs in the launcher: ranks only connect, and rank 0 starts no process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from allhands.control.coordinator import Coordinator
from allhands.control.rendezvous import random_socket_name
from ranks import harness

pytestmark = pytest.mark.usefixtures("fork_server")

SCRIPT = """
import torch
import allhands as dist
from allhands.groups import session

with dist.process_group("gloo", timeout=10):
    x = torch.ones(2)
    dist.all_reduce(x)
    say(value=x.tolist(), beside=session.current().coordinator_process is not None, rank=dist.get_rank())
"""


@contextmanager
def launcher(token: bytes = b"", *, tcp: bool = False) -> Iterator[str]:
    """Run a coordinator in a thread of this process, as a launcher does; yield the value of ALLHANDS_COORDINATOR."""
    loop = asyncio.new_event_loop()
    made: list[Coordinator] = []

    async def begin() -> str:
        coordinator = Coordinator(token=token)
        made.append(coordinator)
        if tcp:
            host, port = await coordinator.listen_tcp("127.0.0.1", 0)
            place = f"tcp://{host}:{port}"
        else:
            name = random_socket_name()
            await coordinator.listen_unix(name)
            place = f"unix:{name}"
        coordinator.start()
        return place

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(made[0].close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def environment(place: str) -> tuple[dict[str, str], dict[int, dict[str, str]]]:
    """Return the variables that a launcher sets for all ranks, and for each."""
    shared = {"ALLHANDS_COORDINATOR": place, "ALLHANDS_WORLD_SIZE": "2", "ALLHANDS_LOCAL_WORLD_SIZE": "2"}
    return shared, {rank: {"ALLHANDS_RANK": str(rank), "ALLHANDS_LOCAL_RANK": str(rank)} for rank in range(2)}


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_ranks_join_the_launchers_coordinator(tcp: bool) -> None:
    """With ALLHANDS_COORDINATOR set, the group forms on it and rank 0 starts no coordinator of its own."""
    with launcher(tcp=tcp) as place:
        env, each = environment(place)
        results = harness.launch(SCRIPT, 2, {**env, "ALLHANDS_NODE_RANK": "0"}, each=each)
    for result in results:
        assert result.returncode == 0, result.stderr
        assert result["value"] == [2.0, 2.0]
        assert result["beside"] is False


def test_the_launchers_token_is_needed() -> None:
    """A rank without the launcher's token is turned away by name."""
    with launcher(token=b"secret") as place:
        env, each = environment(place)
        shared = {**env, "ALLHANDS_NODE_RANK": "0"}
        good = harness.launch(SCRIPT, 2, {**shared, "ALLHANDS_TOKEN": "secret"}, each=each)
    assert [result.returncode for result in good] == [0, 0]
    with launcher(token=b"secret") as place:
        env, each = environment(place)
        bad = harness.launch(SCRIPT, 2, {**env, "ALLHANDS_NODE_RANK": "0", "ALLHANDS_TOKEN": "guess"}, each=each)
    for result in bad:
        assert result.returncode == 1
        assert "[not-authorised]" in result.stderr
        assert "guess" not in result.stderr

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from allhands.environments import gce
from allhands.environments.identify import identify
from allhands.environments.world import Address
from allhands.errors import AllhandsError

Refuse = Callable[..., AllhandsError]
Serve = Callable[..., dict[str, str]]

HOSTS = {"allhands-hosts": "vm-a,vm-b,vm-c"}


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that starts a metadata server and returns the environment that leads to it."""
    servers: list[ThreadingHTTPServer] = []

    def start(
        attributes: dict[str, str], *, name: str = "vm-b", flavour: str = "Google", status: int = 200
    ) -> dict[str, str]:
        instance = {"attributes": attributes, "hostname": f"{name}.zone-1.c.project.internal"}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = self.headers.get("Metadata-Flavor") == "Google"
                right = self.path == "/computeMetadata/v1/instance/?recursive=true"
                self.send_response(status if asked and right else 403)
                self.send_header("Metadata-Flavor", flavour)
                self.end_headers()
                self.wfile.write(json.dumps(instance).encode())

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return {"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}"}

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_order_of_instances(serve: Serve) -> None:
    """The place in the list that all instances share is the rank; the address is the first one's internal name."""
    world = identify(serve(HOSTS))
    assert (world.rank, world.world_size, world.node_rank, world.source) == (1, 3, 1, "compute")
    assert world.coordinator == Address("vm-a.zone-1.c.project.internal", 29500)
    assert world.late_names


def test_given_numbers(serve: Serve) -> None:
    """Rank, size and address can be given to each instance."""
    told = {"allhands-rank": "2", "allhands-world-size": "4", "allhands-coordinator": "10.0.0.2:4000"}
    world = identify(serve(told))
    assert (world.rank, world.world_size, world.coordinator) == (2, 4, Address("10.0.0.2", 4000))


def test_half(refuse: Refuse, serve: Serve) -> None:
    """A rank without a size names the missing key."""
    told = refuse("incomplete-environment", serve({"allhands-rank": "2"})).diagnosis
    assert told.what == "allhands-world-size is missing: only allhands-rank=2 is there"


def test_instance_that_is_not_listed(refuse: Refuse, serve: Serve) -> None:
    """The error for an instance outside the list has its own name."""
    assert "vm-x" in refuse("incomplete-environment", serve(HOSTS, name="vm-x")).diagnosis.why


@pytest.mark.parametrize(
    "answer",
    [
        {"attributes": {"other": "1"}},
        {"attributes": HOSTS, "flavour": "Other"},
        {"attributes": HOSTS, "status": 404},
    ],
)
def test_metadata_without_our_keys(serve: Serve, answer: dict[str, Any]) -> None:
    """A machine without our keys, or a server that is not Google's, leaves the process alone."""
    assert identify(serve(**answer)).source == "alone"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"attributes": 3}', "null"])
def test_strange_answer(text: str) -> None:
    """An answer that is not metadata is ignored."""
    assert gce.detect({"GCE_METADATA_HOST": "x"}, ask=lambda _server, _path: text) is None


def test_asked_only_with_local_evidence() -> None:
    """The server is asked only on a Google machine, outside Kubernetes, and where RANK is not set."""
    asked: list[str] = []

    def ask(server: str, _path: str) -> None:
        asked.append(server)

    for env, product in (
        ({}, "Virtual Machine"),
        ({}, ""),
        ({"RANK": "0"}, "Google Compute Engine"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Google Compute Engine"),
    ):
        assert gce.detect(env, ask=ask, product=product.__str__) is None
    assert asked == []
    gce.detect({}, ask=ask, product=lambda: "Google Compute Engine\n")
    assert asked == [""]


def test_silent_server_costs_no_minute() -> None:
    """A server that accepts and sends nothing costs no more than the deadline."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        start = time.monotonic()
        assert gce.ask_metadata_server(f"127.0.0.1:{server.getsockname()[1]}", "instance/", deadline_s=0.05) is None
        assert time.monotonic() - start < 10
    assert gce.DEADLINE_S < 1


def test_slow_server_costs_no_minute() -> None:
    """The deadline applies to the whole answer: single bytes do not extend it."""
    done = threading.Event()

    def dribble(server: socket.socket) -> None:
        link, _ = server.accept()
        with link:
            link.settimeout(10)
            while not done.wait(0.01):
                try:
                    link.send(b"x")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=dribble, args=(server,))
        thread.start()
        start = time.monotonic()
        assert gce.ask_metadata_server(f"127.0.0.1:{server.getsockname()[1]}", "instance/", deadline_s=0.1) is None
        assert time.monotonic() - start < 10
        done.set()
        thread.join()


def test_names_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are not resolved, because a resolver has no deadline."""

    def never(*_: object, **__: object) -> None:
        pytest.fail("a connection was tried")

    monkeypatch.setattr(socket, "create_connection", never)
    for server in ("metadata.example", "::1", "127.0.0.1:x", "127.0.0.1:1:2"):
        assert gce.ask_metadata_server(server, "instance/") is None

"""Shared by the tests of a group that cannot form: time limits, rendezvous, and other services on the port."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from ranks.harness import free_port, launch

__all__ = [
    "AT_ONCE_S",
    "GRACE_S",
    "JOB",
    "PATIENT_S",
    "PLACES",
    "SCRIPT",
    "TIMEOUT_S",
    "alone",
    "connected",
    "place",
    "service",
]

# What ranks wait for each other where the cause shows only by waiting: all that come must have come by then, on a
# loaded machine; and for causes that show at once, so that no rank reports them by waiting.
TIMEOUT_S, PATIENT_S = 6.0, 20.0

# Time within which a certain cause is reported, measured around init_process_group: some 0.2 s.
AT_ONCE_S = 3.0

# The deadline is never exceeded by more; the rest of the work takes some 50 ms.
GRACE_S = 1.0

SCRIPT = """
import allhands as dist, json, os, torch
first, then = json.loads(os.environ["FIRST"]), json.loads(os.environ["THEN"])
exec(os.environ.get("BEFORE", ""))
gate("begin")
say(failed=attempt(dist.init_process_group, **first), initialised=dist.is_initialized())
exec(os.environ.get("BETWEEN", ""))
gate("again")
if then:
    say(again=attempt(dist.init_process_group, **then))
    x = torch.ones(1)
    dist.all_reduce(x)
    say(x=x.item())
    dist.destroy_process_group()
say(interface=os.environ.get("GLOO_SOCKET_IFNAME", ""))
"""

# Where ranks meet. {} means nothing at all: by the process that started them.
PLACES = ["tcp", "file", "nothing"]


def place(kind: str, folder: Path) -> dict[str, str]:
    """Return the arguments of the rendezvous."""
    match kind:
        case "tcp":
            return {"init_method": f"tcp://127.0.0.1:{free_port()}"}
        case "file":
            return {"init_method": f"file://{folder}/meeting"}
        case _:
            return {}


def alone(first: Mapping[str, Any], **kw: Any) -> dict[str, Any]:
    """Return the error of a single rank."""
    result = launch(SCRIPT, 1, {"FIRST": json.dumps(first), "THEN": "{}"}, **kw)[0]
    assert result.returncode == 0
    found: dict[str, Any] = result["failed"]
    return found


SERVICES = {
    "http": """
import http.server, socket, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
""",
    "silent": """
import socket, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
time.sleep(60)
""",
    "tcpstore": """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
time.sleep(60)
""",
}


@contextmanager
def service(name: str) -> Iterator[tuple[int, int]]:
    """Run something that is not allhands on a port; yield the port and its pid."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", SERVICES[name], str(port)])
    try:
        deadline = time.monotonic() + 30
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline, "the service did not start"
            time.sleep(0.02)
        yield port, process.pid
    finally:
        process.kill()
        process.wait()


JOB = """
import allhands as dist, os, torch
dist.init_process_group("gloo", os.environ["WHERE"], rank=rank, world_size=size, timeout=15)
say(formed=dist.groups.session.current().coordinator_process.pid if rank == 0 else 0)
x = torch.ones(1)
while x.item() < 1000 and not os.path.exists(os.environ["STOP"]):
    x.fill_(0 if not os.path.exists(os.environ["STOP"] + ".soon") else 1000)
    dist.all_reduce(x)
say(unharmed=True)
dist.destroy_process_group()
"""


def connected(pid: int, port: int) -> None:
    """Wait until ``pid`` has a connection to ``port``."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if any(entry.raddr and entry.raddr.port == port for entry in psutil.Process(pid).net_connections("tcp")):
            return
        time.sleep(0.01)
    raise AssertionError("no connection")

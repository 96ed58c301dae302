"""Google Compute Engine: custom metadata of the instances, since there is no convention.

Set on the instance template (`gcloud … --metadata`): `allhands-hosts=a,b,c`, the instances in order, the same for
all; or per instance `allhands-rank`, `allhands-world-size` and `allhands-coordinator` (HOST:PORT).
"""

from __future__ import annotations

import ipaddress
import json
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import fail
from .base import DEFAULT_PORT, Detection, check_one_process, me, parse_address, text

__all__ = ["DEADLINE_S", "ask_metadata_server", "detect"]

_PRODUCT = Path("/sys/class/dmi/id/product_name")

_Ask = Callable[[str, str], str | None]


# The server is on the machine itself and answers in milliseconds; a filtered one costs this much.
DEADLINE_S = 0.5
# The metadata of an instance is about ten kilobytes; more comes from another service.
_MOST = 1 << 20
# Names are not looked up, because a resolver has no deadline.
_KNOWN = {"": "169.254.169.254", "metadata.google.internal": "169.254.169.254", "localhost": "127.0.0.1"}


def ask_metadata_server(server: str, path: str, deadline_s: float = DEADLINE_S) -> str | None:
    """Return the metadata at ``path``; None if the server gives no valid answer within the deadline."""
    host, _, number = server.partition(":")
    host = _KNOWN.get(host, host)
    try:
        ipaddress.IPv4Address(host)
        where = (host, int(number or 80))
    except ValueError:
        return None
    end = time.monotonic() + deadline_s
    # HTTP/1.0, so that the end of the answer is the end of the connection.
    request = f"GET /computeMetadata/v1/{path} HTTP/1.0\r\nHost: {host}\r\nMetadata-Flavor: Google\r\n\r\n"
    answer = b""
    try:
        with socket.create_connection(where, timeout=deadline_s) as link:
            link.sendall(request.encode())
            while len(answer) <= _MOST:
                # A socket's timeout applies to one call; a slow sender would renew it again and again.
                left = end - time.monotonic()
                if left <= 0:
                    return None
                link.settimeout(left)
                chunk = link.recv(65536)
                if not chunk:
                    break
                answer += chunk
    except (OSError, OverflowError):
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *fields = head.decode("latin-1").lower().split("\r\n")
    # Another service at this address does not send the flavour.
    if first.split()[1:2] != ["200"] or "metadata-flavor: google" not in fields:
        return None
    return body.decode("utf-8", "replace")


def _product() -> str:
    try:
        return _PRODUCT.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def detect(
    env: Mapping[str, str],
    ask: _Ask = ask_metadata_server,
    product: Callable[[], str] = _product,
) -> Detection | None:
    """Recognise an instance that its metadata numbers. Asks the metadata server only on a Google machine."""
    server = text(env, "GCE_METADATA_HOST")
    # A pod on such a machine is not the machine; Kubernetes has files of its own here.
    if text(env, "RANK") or text(env, "KUBERNETES_SERVICE_HOST") or not (server or "Google" in product()):
        return None
    answer = ask(server, "instance/?recursive=true")
    try:
        instance = json.loads(answer or "{}")
        attributes, host = instance.get("attributes", {}), str(instance.get("hostname", ""))
        attributes = dict(attributes)
    except (ValueError, AttributeError, TypeError):
        return None
    keys = {str(name): str(value) for name, value in attributes.items() if str(name).startswith("allhands-")}
    if not {"allhands-hosts", "allhands-rank"} & keys.keys():
        return None
    check_one_process(env, "the metadata", "on Compute Engine, instances are numbered")
    found = Detection("compute", "the instance's metadata has keys of allhands", {**env, **keys}, late_names=True)
    return _hosts(found, keys, host) if "allhands-hosts" in keys else _numbers(found, keys)


def _hosts(found: Detection, keys: Mapping[str, str], host: str) -> Detection:
    names = keys["allhands-hosts"].replace(",", " ").split()
    mine, _, domain = host.partition(".")
    short = [name.partition(".")[0] for name in names]
    if mine not in short:
        raise fail(
            "incomplete-environment",
            f"this instance is not in its metadata's allhands-hosts={keys['allhands-hosts']}",
            who=me(),
            why=f"its own name is {mine or 'unknown'}",
            fix="give every instance the same allhands-hosts, with all their names in order",
        )
    node = short.index(mine)
    found.set("this instance's place in allhands-hosts (metadata)", rank=node, node_rank=node)
    found.set("allhands-hosts (metadata)", world_size=len(names), job=f"compute-{keys['allhands-hosts']}")
    # Internal DNS names are NAME.ZONE.c.PROJECT.internal; a bare name is in this instance's own zone.
    first = names[0] if "." in names[0] or not domain else f"{names[0]}.{domain}"
    return found.locate(lambda: (first, "allhands-hosts (metadata)"), DEFAULT_PORT, "the default")


def _numbers(found: Detection, keys: Mapping[str, str]) -> Detection:
    found.read(rank="allhands-rank", node_rank="allhands-rank", world_size=("allhands-world-size", "WORLD_SIZE"))
    found.remedy = "set allhands-rank and allhands-world-size, or allhands-hosts, in the instances' metadata"
    where = keys.get("allhands-coordinator", "")
    if not where:
        return found.locate()
    why = f"allhands-coordinator={where} (metadata)"
    address = parse_address(where, why)
    return found.set(why, job=f"compute-{address}").locate(lambda: (address.host, "metadata"), address.port, why)

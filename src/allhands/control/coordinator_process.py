"""The coordinator's own process beside rank 0: how it is started, and what it does until it ends.

The parent writes one `Order` to the child's standard input (never to argv: it holds the token) and reads
one `Opened` or a diagnosis from its standard output. The child ends with its parent, however that ends:
the kernel signals it (PR_SET_PDEATHSIG) and it watches the parent's pidfd, because the kernel's signal
comes at the death of the thread that started it, which need not be the process's.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..diagnosis import Diagnosis
from ..environments.world import Address
from ..errors import error, fail
from .frames import HEADER, pack
from .port_owner import Holder, holder

if TYPE_CHECKING:
    from .coordinator import Coordinator

__all__ = ["Beside", "Opened", "Order", "main", "start"]

# How long the child may take to say that it listens: an interpreter start on a loaded machine.
_START_S = 30.0

# A coordinator that only lingers to tell late ranks of a refusal frees its port within this; a port that nobody
# listens on any more is free at once, or will never be ours.
_FREE_S, _FREE_NOW_S = 2.5, 0.5

# How rank 0 asks it to close although members are still there, and how long that may take. (SIGTERM is no use:
# whoever ends a whole process group sends it to rank 0 too, and rank 0's end should be told as what it is.)
_CLOSE, _CLOSE_S = signal.SIGUSR1, 1.0

# The package must be found where this process found it, but after everything else (-P and append), so
# that nothing beside the user's script or in a site directory shadows a module of the standard library.
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); from allhands.control.coordinator_process import main; sys.exit(main())"
)


class Order(msgspec.Struct, frozen=True):
    """What the child is to do. ``host`` "" means no TCP; ``path`` is a meeting file to remove at the end.

    ``derived`` says that ranks find ``unix`` by themselves, without having been told.
    """

    unix: str
    host: str = ""
    port: int = 0
    token: bytes = b""
    world_size: int = 0
    tls_cert: str = ""
    tls_key: str = ""
    path: str = ""
    parent: int = 0
    derived: bool = False


class Opened(msgspec.Struct, frozen=True):
    """Where the child listens; or ``trouble``, why it does not."""

    host: str = ""
    port: int = 0
    trouble: Diagnosis | None = None


class Beside:
    """A coordinator's process, seen from rank 0."""

    def __init__(self, process: subprocess.Popen[bytes], order: Order, opened: Opened) -> None:
        self.process = process
        self.unix = order.unix
        self.host = opened.host
        self.port = opened.port

    @property
    def pid(self) -> int:
        """The coordinator's process id."""
        return self.process.pid

    def end(self, within_s: float) -> None:
        """Wait until the coordinator has ended by itself, at most ``within_s``, then end it. Never raises."""
        for last_word in (_CLOSE, signal.SIGKILL):
            if self.process.poll() is not None or _ended_within(self.process.pid, within_s):
                break
            # Those who are still busy are told that it closes in good order, which is no failure of theirs.
            self.process.send_signal(last_word)
            within_s = _CLOSE_S
        self.process.wait()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()

    def forget(self) -> None:
        """Let it run on until it has told late ranks; it ends by itself within seconds, and is then reaped."""
        threading.Thread(target=self.process.wait, name="allhands-reaper", daemon=True).start()


def _ended_within(pid: int, seconds: float) -> bool:
    """Wait for the end of our own child ``pid``; tell whether it came. Popen.wait would look every 50 ms."""
    pidfd = os.pidfd_open(pid)
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return bool(poller.poll(seconds * 1000))
    finally:
        os.close(pidfd)


def start(order: Order, deadline: float, ask: Callable[[], None] | None = None) -> Beside:
    """Start a coordinator beside this process; raise the diagnosis of why it cannot listen.

    Waits for a place that a lingering coordinator of an earlier attempt is about to free. ``ask`` is called while
    another coordinator has the place, and raises if that one says why it will not be free.
    """
    order = msgspec.structs.replace(order, parent=os.getpid())
    started = time.monotonic()
    while True:
        process = subprocess.Popen(  # our own interpreter and module
            [sys.executable, "-P", "-c", _PROGRAM, str(Path(__file__).resolve().parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        opened = _exchange(process, order)
        if opened.trouble is None:
            return Beside(process, order, opened)
        process.wait()
        # A local name is only ever held by a coordinator of the same job; a port may be anyone's.
        held = holder(order.port) if order.host else None
        coordinator = held.ours if held is not None else not order.host
        stranger = held is not None and not coordinator
        patience = min(started + (_FREE_S if coordinator else _FREE_NOW_S), deadline)
        if opened.trouble.slug != "port-in-use" or stranger or time.monotonic() >= patience:
            raise error(opened.trouble)
        if coordinator and ask is not None:
            ask()
        time.sleep(0.05)


def _exchange(process: subprocess.Popen[bytes], order: Order) -> Opened:
    if process.stdin is None or process.stdout is None:
        raise ValueError("the coordinator's process needs pipes")
    # The child says its one sentence or dies, which closes the pipe; the timer is for a machine so loaded
    # that it does neither.
    timer = threading.Timer(_START_S, process.kill)
    timer.daemon = True
    timer.start()
    try:
        with suppress(BrokenPipeError):
            process.stdin.write(pack(msgspec.msgpack.encode(order)))
            process.stdin.close()
        head = process.stdout.read(HEADER.size)
        body = process.stdout.read(HEADER.unpack(head)[0]) if len(head) == HEADER.size else b""
    finally:
        timer.cancel()
        process.stdout.close()
    if not body:
        status = process.wait()
        trouble = fail(
            "coordinator-lost",
            "the coordinator's process ended before it listened",
            who=f"rank 0 (pid {os.getpid()}) started it as pid {process.pid}",
            why=f"it exited with status {status} (observed); its own words, if any, are on standard error",
            fix=f"run `{sys.executable} -m allhands.control < /dev/null` to see whether the package can be imported",
            ranks=(0,),
        )
        return Opened(trouble=trouble.diagnosis)
    return msgspec.msgpack.decode(body, type=Opened)


# In the child ------------------------------------------------------------------------------------------------


def main() -> int:
    """Run a coordinator until nobody needs it. The order comes on standard input."""
    head = sys.stdin.buffer.read(HEADER.size)
    if len(head) < HEADER.size:
        sys.stderr.write("allhands.control is started by rank 0; it is not meant to be run by hand\n")
        return 2
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(HEADER.unpack(head)[0]), type=Order)
    # Ctrl-C goes to every process of the terminal; the ranks decide what it means, not this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return asyncio.run(_serve(order))


async def _serve(order: Order) -> int:
    loop = asyncio.get_running_loop()
    # Here, because rank 0 itself, which starts this process, needs no coordinator.
    from .coordinator import Coordinator

    coordinator = Coordinator(token=order.token)
    orphaned = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, orphaned.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)
    loop.add_signal_handler(_CLOSE, coordinator.finished.set)
    _follow(order.parent, loop, orphaned)
    try:
        opened = await _open(order, coordinator)
    except OSError as problem:
        opened = Opened(trouble=_trouble(order, problem))
    os.write(sys.stdout.fileno(), pack(msgspec.msgpack.encode(opened)))
    # Someone may wait for the end of rank 0's output; this process must not hold it open.
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    loop.set_exception_handler(lambda _, context: coordinator.remark(context))
    if opened.trouble is not None:
        return 1
    coordinator.start()
    watcher = loop.create_task(_abandon(orphaned, order.parent, coordinator))
    await coordinator.finished.wait()
    watcher.cancel()
    await coordinator.close()
    if order.path:
        _remove_notice(Path(order.path), order.unix)
    return 0


def _remove_notice(path: Path, unix: str) -> None:
    """Remove the meeting file where rank 0 died before it could, unless another job has taken it over."""
    with suppress(OSError):
        if unix.encode() in path.read_bytes():
            path.unlink()


async def _open(order: Order, coordinator: Coordinator) -> Opened:
    _raise_descriptor_limit(order.world_size)
    await coordinator.listen_unix(order.unix)
    if not order.host:
        coordinator.roll.listening = "the coordinator"
        coordinator.roll.nameless = order.derived
        return Opened()
    tls = None
    if order.tls_cert:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(order.tls_cert, order.tls_key or None)
    host, port = await coordinator.listen_tcp(order.host, order.port, tls)
    coordinator.roll.listening = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    coordinator.roll.only_loopback = host == "::1" or host.startswith("127.")
    return Opened(host, port)


def _follow(parent: int, loop: asyncio.AbstractEventLoop, orphaned: asyncio.Event) -> None:
    from .. import _core  # keeps this module importable where the extension is not built

    _core.set_parent_death_signal(signal.SIGTERM)
    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        orphaned.set()
        return

    def ended() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        orphaned.set()

    loop.add_reader(pidfd, ended)


async def _abandon(orphaned: asyncio.Event, parent: int, coordinator: Coordinator) -> None:
    while True:
        await orphaned.wait()
        if os.getppid() != parent:
            coordinator.abandon("its process ended")
            return
        # The thread that started us ended, or someone sent SIGTERM to the whole process group; the parent
        # is still there and decides.
        orphaned.clear()


def _raise_descriptor_limit(world_size: int) -> None:
    import resource

    # Two per local rank (socket and pidfd), and a few of our own.
    need = 2 * world_size + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if need > hard != resource.RLIM_INFINITY:
        raise OSError(errno.EMFILE, f"{world_size} ranks need {need} file descriptors, the limit is {hard}")
    if need > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


def _free(held: Holder | None, host: str) -> str:
    """Say how the place can be had, or another one."""
    if not host:
        return "end that process, or give this job a name of its own (ALLHANDS_JOB)"
    another = "or choose another port (MASTER_PORT, tcp://HOST:PORT)"
    if held is None or not held.pid:
        return f"end that process, {another}"
    if held.ours:
        # A coordinator lives and dies with its rank 0.
        return f"end that job: its rank 0 is the parent of that process (ps -o ppid= -p {held.pid}), {another}"
    return f"end that process (kill {held.pid}), {another}"


def _trouble(order: Order, problem: OSError) -> Diagnosis:
    """Say why the coordinator cannot listen."""
    place = str(Address(order.host, order.port)) if order.host else f"the local socket {order.unix}"
    who = f"rank 0 (pid {order.parent}) wants to listen on {place}"
    match problem.errno:
        case errno.EADDRINUSE:
            held = holder(order.port) if order.host else None
            return Diagnosis(
                "port-in-use",
                f"{place} is already in use",
                who=who,
                why=f"it is held by {held}" if held else "another process holds it",
                fix=_free(held, order.host),
                ranks=(0,),
            )
        case errno.EADDRNOTAVAIL:
            return Diagnosis(
                "address-not-local",
                f"rank 0 cannot listen on {order.host}: no interface of this machine has that address",
                who=who,
                why="rank 0 must run on the machine that the address names (observed: EADDRNOTAVAIL)",
                fix="start rank 0 there, or give an address of this machine (`ip -br addr`) as MASTER_ADDR or "
                "init_method; set ALLHANDS_BIND where peers come through NAT or a service address",
                ranks=(0,),
            )
        case errno.EMFILE | errno.ENFILE:
            return Diagnosis(
                "fd-limit",
                f"too few file descriptors for {order.world_size} ranks",
                who=who,
                why=problem.strerror or str(problem),
                fix="raise the limit before the job starts: ulimit -n 65536 (and LimitNOFILE= in a service)",
                ranks=(0,),
            )
        case errno.EACCES:
            return Diagnosis(
                "port-in-use",
                f"{place} is not open to ordinary users",
                who=who,
                why=f"the kernel keeps this port for privileged processes ({problem.strerror})",
                fix="choose a port above 1023",
                ranks=(0,),
            )
        case _:
            return Diagnosis(
                "address-not-local",
                f"rank 0 cannot listen on {place}: {problem.strerror or problem}",
                who=who,
                why="the system refused the address (observed)",
                fix="check MASTER_ADDR and ALLHANDS_BIND, or the certificate files where TLS is configured",
                ranks=(0,),
            )

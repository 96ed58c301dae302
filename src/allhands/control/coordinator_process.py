"""The coordinator in a process of its own: how rank 0 starts and ends it, and what that process runs.

Rank 0 writes one `Options` to the child's standard input (not to argv: it contains the token) and reads one
`Listening` from its standard output. The child ends with rank 0: it watches rank 0's pidfd. The kernel's parent death
signal alone is not enough, because it follows the thread that started the child, not the process.
"""

from __future__ import annotations

import asyncio
import errno
import os
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
from ..errors import error
from .bind import is_loopback
from .process_identity import PortOwner, port_owner

if TYPE_CHECKING:
    from .coordinator import Coordinator

__all__ = ["CoordinatorProcess", "Listening", "Options", "main", "start"]

# How long the child may take until it listens: the start of an interpreter on a loaded machine.
_START_S = 30.0

# A coordinator that continues after a refusal frees its port within the first limit. A port whose owner is unknown may
# be closing, or belong to another user: it gets the second.
_FREE_S, _FREE_UNKNOWN_S = 2.5, 0.5

# Ask a coordinator that still has members to exit, and how long that may take. Not SIGTERM: it may be sent to the whole
# process group, and then the end of rank 0 must be reported as such.
_CLOSE, _CLOSE_S = signal.SIGUSR1, 1.0

# The package's path is appended and -P is given, so that no module beside the user's script or in a site directory
# shadows one of the standard library.
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); from allhands.control.coordinator_process import main; sys.exit(main())"
)


class Options(msgspec.Struct, frozen=True):
    """What the child must do. ``host`` "" means no TCP; ``path`` is a rendezvous file to remove at the end.

    ``derived``: ranks derive the name ``unix`` instead of receiving it.
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


class Listening(msgspec.Struct, frozen=True):
    """The child's address; or ``trouble``, the reason why it cannot listen."""

    host: str = ""
    port: int = 0
    trouble: Diagnosis | None = None


class CoordinatorProcess:
    """A running coordinator process, as rank 0 controls it."""

    def __init__(self, process: subprocess.Popen[bytes], options: Options, listening: Listening) -> None:
        self.process = process
        self.pid = process.pid
        self.unix = options.unix
        self.host = listening.host
        self.port = listening.port

    def end(self, within_s: float) -> None:
        """Wait at most ``within_s`` until the coordinator exits by itself, then end it. Never raises."""
        for final in (_CLOSE, signal.SIGKILL):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(within_s)
                return
            # Remaining members receive Closing, which is no failure.
            self.process.send_signal(final)
            within_s = _CLOSE_S
        self.process.wait()

    def kill(self) -> None:
        """Kill it at once."""
        self.process.kill()
        self.process.wait()

    def detach(self) -> None:
        """Let it inform late ranks and exit by itself, within seconds; a thread reaps it."""
        threading.Thread(target=self.process.wait, name="allhands-reaper", daemon=True).start()


def start(options: Options, deadline: float, ask: Callable[[], None] | None = None) -> CoordinatorProcess:
    """Start a coordinator as a child of this process; raise the diagnosis if it cannot listen.

    Retries while a coordinator of an earlier attempt still has the address. ``ask`` is called then, and raises if that
    coordinator reports why the address will not become free.
    """
    options = msgspec.structs.replace(options, parent=os.getpid())
    started = time.monotonic()
    while True:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(Path(__file__).resolve().parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        listening = _exchange(process, options)
        if listening.trouble is None:
            return CoordinatorProcess(process, options, listening)
        process.wait()
        # Only a coordinator of the same job has the Unix name; any process may have the port.
        owner = port_owner(options.port) if options.host else None
        coordinator = owner.ours if owner is not None else not options.host
        if listening.trouble.slug == "port-in-use" and coordinator and ask is not None:
            ask()
        # A port without an owner may be free by now.
        limit_s = _FREE_S if coordinator else _FREE_UNKNOWN_S if owner is None else 0.0
        if listening.trouble.slug != "port-in-use" or time.monotonic() >= min(started + limit_s, deadline):
            raise error(listening.trouble)
        time.sleep(0.05)


def _exchange(process: subprocess.Popen[bytes], options: Options) -> Listening:
    if process.stdin is None or process.stdout is None:
        raise ValueError("the coordinator's process needs pipes")
    timer = threading.Timer(_START_S, process.kill)
    timer.daemon = True
    timer.start()
    try:
        with suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(options) + b"\n")
            process.stdin.close()
        line = process.stdout.readline()
    finally:
        timer.cancel()
        process.stdout.close()
    if not line.endswith(b"\n"):
        status = process.wait()
        trouble = Diagnosis(
            "coordinator-lost",
            "the coordinator's process exited before it listened",
            who=f"rank 0 (pid {os.getpid()}) started it as pid {process.pid}",
            why=f"it exited with status {status} (observed); its own message, if any, is on standard error",
            fix=f"run `{sys.executable} -m allhands.control.coordinator_process < /dev/null` to check that the package "
            "can be imported",
            ranks=(0,),
        )
        return Listening(trouble=trouble)
    return msgspec.json.decode(line, type=Listening)


# In the child ----------------------------------------------------------------------------------------------------


def main() -> int:
    """Run a coordinator until no rank needs it. Reads its options from standard input."""
    line = sys.stdin.buffer.readline()
    if not line:
        sys.stderr.write("allhands.control is started by rank 0; it is not meant to be run by hand\n")
        return 2
    options = msgspec.json.decode(line, type=Options)
    # The terminal sends Ctrl-C to every process; the ranks handle it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = asyncio.run(_serve(options))
    if options.path and not status:
        # Rank 0 may have died before it could remove the rendezvous file; another job may have replaced the file.
        path = Path(options.path)
        with suppress(OSError):
            if options.unix.encode() in path.read_bytes():
                path.unlink()
    return status


async def _serve(options: Options) -> int:
    loop = asyncio.get_running_loop()
    from .coordinator import Coordinator  # not at the top: rank 0, which imports this module, does not need it

    coordinator = Coordinator(token=options.token)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)
    loop.add_signal_handler(_CLOSE, coordinator.finished.set)
    _watch_parent(options.parent, coordinator)
    try:
        listening = await _listen(options, coordinator)
    except OSError as problem:
        listening = Listening(trouble=_cannot_listen(options, problem))
    os.write(sys.stdout.fileno(), msgspec.json.encode(listening) + b"\n")
    # Release rank 0's output: another process may wait for its end.
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    loop.set_exception_handler(lambda _, context: coordinator.log(context))
    if listening.trouble is not None:
        return 1
    coordinator.start()
    await coordinator.finished.wait()
    await coordinator.close()
    return 0


async def _listen(options: Options, coordinator: Coordinator) -> Listening:
    _raise_descriptor_limit(options.world_size)
    await coordinator.listen_unix(options.unix)
    if not options.host:
        coordinator.roll.listening = "the coordinator"
        coordinator.roll.derived_name = options.derived
        return Listening()
    tls = None
    if options.tls_cert:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(options.tls_cert, options.tls_key or None)
    host, port = await coordinator.listen_tcp(options.host, options.port, tls)
    coordinator.roll.listening = str(Address(host, port))
    coordinator.roll.only_loopback = is_loopback(host)
    return Listening(host, port)


def _watch_parent(parent: int, coordinator: Coordinator) -> None:
    """Abandon the coordinator when rank 0's process ends."""
    from .. import _core  # not at the top: this module can be imported without the extension

    loop = asyncio.get_running_loop()

    def ended() -> None:
        coordinator.abandon("its process ended")

    def terminated() -> None:
        # Not if only the thread that started this process has ended, or the whole process group received SIGTERM.
        if os.getppid() != parent:
            ended()

    def watch_ended() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        ended()

    loop.add_signal_handler(signal.SIGTERM, terminated)
    _core.set_parent_death_signal(signal.SIGTERM)
    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        ended()
    else:
        loop.add_reader(pidfd, watch_ended)


def _raise_descriptor_limit(world_size: int) -> None:
    import resource

    # Two per local rank (socket and pidfd), and some of this process.
    need = 2 * world_size + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if need > hard != resource.RLIM_INFINITY:
        raise OSError(errno.EMFILE, f"{world_size} ranks need {need} file descriptors, the limit is {hard}")
    if need > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


# Diagnoses -------------------------------------------------------------------------------------------------------


def _cannot_listen(options: Options, problem: OSError) -> Diagnosis:
    place = str(Address(options.host, options.port)) if options.host else f"the local socket {options.unix}"
    slug, fix = "address-not-local", ""
    match problem.errno:
        case errno.EADDRINUSE:
            owner = port_owner(options.port) if options.host else None
            slug = "port-in-use"
            what = f"{place} is already in use"
            why = f"it is held by {owner}" if owner else "another process holds it"
            if not options.host:
                fix = "end that process, or give this job a name of its own (ALLHANDS_JOB)"
            else:
                fix = f"{_how_to_end(owner)}, or choose another port (MASTER_PORT, tcp://HOST:PORT)"
        case errno.EADDRNOTAVAIL:
            what = f"rank 0 cannot listen on {options.host}: no interface of this machine has that address"
            why = "rank 0 must run on the machine that the address names (observed: EADDRNOTAVAIL)"
            fix = (
                "start rank 0 there, or give an address of this machine (`ip -br addr`) as MASTER_ADDR or "
                "init_method; set ALLHANDS_BIND where peers come through NAT or a service address"
            )
        case errno.EMFILE | errno.ENFILE:
            slug = "fd-limit"
            what = f"too few file descriptors for {options.world_size} ranks"
            why = problem.strerror or str(problem)
            fix = "raise the limit before the job starts: ulimit -n 65536 (and LimitNOFILE= in a service)"
        case errno.EACCES:
            slug = "port-in-use"
            what = f"{place} is not open to ordinary users"
            why = f"the kernel keeps this port for privileged processes ({problem.strerror})"
            fix = "choose a port above 1023"
        case _:
            what = f"rank 0 cannot listen on {place}: {problem.strerror or problem}"
            why = "the system refused the address (observed)"
            fix = "check MASTER_ADDR and ALLHANDS_BIND, or the certificate files where TLS is configured"
    who = f"rank 0 (pid {options.parent}) wants to listen on {place}"
    return Diagnosis(slug, what, who=who, why=why, fix=fix, ranks=(0,))


def _how_to_end(owner: PortOwner | None) -> str:
    if owner is None or not owner.pid:
        return "end that process"
    if owner.ours:
        # A coordinator ends with its rank 0.
        return f"end that job: its rank 0 is the parent of that process (ps -o ppid= -p {owner.pid})"
    return f"end that process (kill {owner.pid})"


if __name__ == "__main__":
    sys.exit(main())

"""`allhands doctor` on one machine, with real limits, real strangers on the port and real leftovers."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from allhands import cli
from allhands.doctor import Finding, make_request, ports, run_checks
from allhands.doctor.peer import PeerServer, Report
from allhands.environments.world import Address
from ranks import harness

pytestmark = pytest.mark.usefixtures("fork_server")

DOCTOR = [sys.executable, "-m", "allhands", "doctor"]
MEMORY = Path("/sys/fs/cgroup/memory")
PIDS = Path("/sys/fs/cgroup/pids")


def typed(*words: str, before: tuple[str, ...] = (), **env: str) -> dict[str, Any]:
    """Run `allhands doctor` with these arguments and --json; its exit status must be the one that it reports."""
    done = subprocess.run(
        [*before, *DOCTOR, *words, "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=harness.environment(env),
    )
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == report["exit_code"], done.stderr
    return report


def of(report: dict[str, Any], check: str) -> dict[str, Any]:
    """Return the finding of ``check``."""
    found: dict[str, Any] = next(each for each in report["findings"] if each["check"] == check)
    return found


# No fault -----------------------------------------------------------------------------------------------------


def test_healthy_machine_is_green() -> None:
    """This machine as it is: nothing is red, a screen of few lines, and torch is not imported."""
    probe = "import sys; from allhands.cli import main\n"
    probe += "try:\n main()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", probe, "doctor"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=harness.environment({}),
    )
    assert done.stdout.splitlines()[-1] == "0 False", done.stdout
    assert len(done.stdout.splitlines()) < 40
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--once"], 2, "--once belongs to --listen"),
        (["--pid", "1", "--job"], 2, "Use one"),
        (["--pid", "1", "host:1"], 2, "Use one"),
        (["--pid", "0"], 2, "Invalid value"),
        (["nonsense"], 2, "is not an address"),
        (["host:99999"], 2, "port"),
        (["--pid", "4194305"], 2, "there is no process"),
        (["--listen", "192.0.2.77:29500"], 1, "cannot listen"),
    ],
)
def test_usage_errors(words: list[str], code: int, said: str) -> None:
    """A usage error exits with 2 at once; a request that cannot be fulfilled exits with 1."""
    done = CliRunner().invoke(cli.main, ["doctor", *words], prog_name="allhands")
    assert (done.exit_code, said in done.output) == (code, True), done.output


# The port -----------------------------------------------------------------------------------------------------


def check_port(port: int, **env: str) -> Finding:
    """Return the finding of the check of a port of this machine."""
    return next(ports.check(make_request(Address("127.0.0.1", port), env=env)))


@contextlib.contextmanager
def answering(words: bytes) -> Iterator[int]:
    """Send ``words`` on every connection, and nothing else."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    link, _ = listener.accept()
                except OSError:
                    return
                with link, contextlib.suppress(OSError):
                    link.sendall(words)
                    link.settimeout(1.0)
                    link.recv(100)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            # A pending accept is woken by shutdown of its socket, not by close.
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


class Quiet(http.server.BaseHTTPRequestHandler):
    """A web server that does not write on the test's screen."""

    def do_HEAD(self) -> None:
        """Answer."""
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def test_other_services_on_the_port() -> None:
    """SSH and a web server are distinguished from a coordinator, and the owner of the port is named."""
    with answering(b"SSH-2.0-OpenSSH_9.2\r\n") as port:
        found = check_port(port)
        assert (found.level, found.slug) == ("red", "port-in-use")
        assert "an SSH server" in found.what
        assert f"pid {os.getpid()}" in found.why
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        found = check_port(server.server_address[1])
        server.shutdown()
        thread.join()
    assert (found.level, "a web server" in found.what) == ("red", True)


def test_torchs_store_on_the_port() -> None:
    """Torch's own TCPStore is recognised: right for torch's jobs, wrong for ours. The store itself is not disturbed."""
    source = """
    from datetime import timedelta
    from torch.distributed import TCPStore
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    say(port=store.port)
    gate("looked", 2)
    store.set("key", "value")
    say(got=store.get("key").decode())
    """
    with harness.running(source, 1) as job:
        found = check_port(job.wait_for("port")[0])
        (job.folder / "gates" / "looked.test").touch()
        assert harness.well(job.results())[0]["got"] == "value"
    assert (found.level, found.slug) == ("yellow", "wrong-service")
    assert "TCPStore" in found.what


def test_a_free_port() -> None:
    """An unused port of this machine is free for rank 0."""
    assert check_port(harness.free_port()).level == "green"


@pytest.mark.soak
def test_silent_service() -> None:
    """A service that accepts connections and sends nothing is yellow: it may be a stopped process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = check_port(listener.getsockname()[1])
        assert (found.level, found.slug, found.certain) == ("yellow", "wrong-service", False)


def test_doctor_does_not_disturb_a_roll_call() -> None:
    """A coordinator that waits for its ranks is recognised, the token is checked, and the group forms all the same."""
    port = harness.free_port()
    source = """
    import allhands as dist
    if rank == 1:
        gate("visited", 1)
        import os, time
        while not os.path.exists(os.path.join(os.environ["GATES"], "go")):
            time.sleep(0.01)
    say(coming=True)
    dist.init_process_group("allhands", f"tcp://127.0.0.1:{os.environ['PORT']}", 30, size, rank)
    say(sum=dist.get_world_size())
    dist.destroy_process_group()
    """
    source = "import os\n" + source.replace("\n    ", "\n")
    with harness.running(source, 2, {"PORT": str(port), "ALLHANDS_TOKEN": "secret"}) as job:
        job.wait_for("coming", [0])
        deadline = time.monotonic() + 20
        while (found := check_port(port, ALLHANDS_TOKEN="secret")).what.startswith("port"):
            assert time.monotonic() < deadline
        assert (found.level, "a coordinator of allhands listens" in found.what) == ("green", True), found
        wrong = check_port(port)
        assert (wrong.level, wrong.slug) == ("red", "not-authorised")
        (job.folder / "gates" / "go").touch()
        assert [result["sum"] for result in harness.well(job.results())] == [2, 2]


# Limits -------------------------------------------------------------------------------------------------------


def test_few_descriptors_and_their_fix() -> None:
    """A low soft limit is yellow, and --fix raises it for the calling shell, which reports it."""
    script = f"ulimit -Sn 100; {' '.join(DOCTOR)} --fix; ulimit -Sn"
    done = subprocess.run(
        ["bash", "-c", script],  # noqa: S607  # the shell that people type into
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=harness.environment({}),
    )
    *screen, limit = done.stdout.splitlines()
    assert any("[fd-limit]" in line for line in screen)
    assert any("did   raised the limit of bash" in line for line in screen)
    assert int(limit) > 100


def test_many_ranks_against_a_hard_limit() -> None:
    """Ranks that need more descriptors than may be had are red, and more ranks than cores yellow."""
    report = typed("-n", "4000", before=("prlimit", "--nofile=512:512"))
    assert (of(report, "descriptors")["level"], report["exit_code"]) == ("red", 1)
    assert of(report, "cores")["slug"] == "too-few-cores"


@contextlib.contextmanager
def group(controller: Path, **limits: str) -> Iterator[tuple[str, ...]]:
    """Make a control group with these limits; yield the command prefix that runs a command in it."""
    folder = controller / f"allhands-test-{os.getpid()}"
    try:
        folder.mkdir()
        for name, value in limits.items():
            (folder / name.replace("_dot_", ".")).write_text(value)
    except OSError as problem:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"control groups cannot be made here: {problem}")
    try:
        yield ("sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh")
    finally:
        # The kernel lets a group go a moment after its last process.
        deadline = time.monotonic() + 10
        while folder.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.05)


def test_limits_of_a_control_group() -> None:
    """A container's limits on memory and on processes are what counts, and are named."""
    with group(MEMORY, memory_dot_limit_in_bytes=str(400 << 20)) as inside:
        found = of(typed("-n", "2", before=inside), "memory")
    assert (found["level"], found["slug"]) == ("red", "memory-low")
    assert "allhands-test-" in found["why"]
    with group(PIDS, pids_dot_max="60") as inside:
        found = of(typed(before=inside), "processes")
    assert (found["level"], found["slug"]) == ("yellow", "process-limit")
    assert "allhands-test-" in found["why"]


@pytest.mark.parametrize(("most", "level"), [("1", "red"), ("4", "yellow")])
def test_no_more_threads(most: str, level: str) -> None:
    """The doctor does all its checks with what threads there are, none included, and names the limit."""
    with group(PIDS, pids_dot_max=most) as inside:
        report = typed("-n", "2", "localhost:9", before=inside)
    found = of(report, "processes")
    assert (found["level"], found["slug"]) == (level, "process-limit")
    assert of(report, "port")["level"] == "green"
    assert not [each for each in report["findings"] if each["check"].startswith("doctor-")]


def test_full_shared_memory() -> None:
    """A container's 64 MiB is yellow; full, it is red. Seen in a mount namespace of its own."""
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    script = f'{mount} || exit 77; "$@"; dd if=/dev/zero of=/dev/shm/full bs=1M count=60 2>&-; "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", *DOCTOR, "--json"],  # noqa: S607  # of util-linux
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=harness.environment({}),
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no mount namespace can be made: {done.stderr.strip()}")
    decoder = json.JSONDecoder()
    first, end = decoder.raw_decode(done.stdout)
    read = [first, decoder.raw_decode(done.stdout[end:].lstrip())[0]]
    assert [of(report, "shm")["level"] for report in read] == ["yellow", "red"]
    assert of(read[1], "shm")["slug"] == "shm-too-small"


# Leftovers ----------------------------------------------------------------------------------------------------

STALE = """
import os, socket
if os.fork():
    os._exit(0)  # the launcher, which is gone
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(os.getpid(), listener.getsockname()[1], flush=True)
    while True:
        listener.accept()[0].close()
"""


def test_a_stale_worker_is_named_with_its_port() -> None:
    """In a pid namespace: a worker that process 1 has adopted is named by pid, and red where it holds our port."""
    words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
    script = (
        f"TORCHELASTIC_RUN_ID=x {sys.executable} -c '{STALE}' > $1; "
        "until [ -s $1 ]; do sleep 0.05; done; read pid port < $1; cat $1; "
        'sleep 2.2; shift; "$@" "127.0.0.1:$port" --json'
    )
    place = Path(f"/tmp/allhands-stale-{os.getpid()}")
    try:
        done = subprocess.run(
            [*words, script, "sh", str(place), *DOCTOR],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env=harness.environment({}),
        )
    finally:
        place.unlink(missing_ok=True)
    if "unshare" in done.stderr:
        pytest.skip(f"no pid namespace can be made: {done.stderr.strip()}")
    head, _, text = done.stdout.partition("\n")
    pid, port = map(int, head.split())
    found = of(json.loads(text), "leftovers")
    assert (found["level"], found["slug"]) == ("red", "stale-worker")
    assert found["details"]["pids"] == [pid]
    assert f"pid {pid} holds port {port}" in found["what"]
    assert found["commands"] == [f"kill {pid}"]


# A rank of torch's own, which offers no stacks: only py-spy can read them.
ALONE = """
import threading, time
def step():
    time.sleep(600)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("ready", flush=True)
step()
"""

# What py-spy 0.4.3 prints for it (`py-spy dump --json`), with FILE and PID for what differs.
SPIED = Path(__file__).with_name("py_spy.json")


@pytest.mark.parametrize("spy", ["recorded", "real"])
def test_a_rank_that_only_py_spy_can_read(tmp_path: Path, spy: str) -> None:
    """`doctor --pid` of a rank without a handler of ours names its line, where py-spy is installed."""
    if spy == "real" and shutil.which("py-spy") is None:
        pytest.skip("py-spy is not installed")
    script, tools = tmp_path / "train.py", tmp_path / "tools"
    script.write_text(ALONE)
    env = harness.environment({"RANK": "0", "WORLD_SIZE": "2"})
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            if spy == "recorded":
                tools.mkdir()
                said = SPIED.read_text().replace("FILE", str(script)).replace('"PID"', str(process.pid))
                (tools / "said").write_text(said)
                (tools / "py-spy").write_text(
                    f'#!/bin/sh\n[ "$*" = "dump --json --pid {process.pid}" ] && cat {tools}/said\n'
                )
                (tools / "py-spy").chmod(0o755)
            report = typed("--pid", str(process.pid), PATH=f"{tools}:{os.environ['PATH']}")
        finally:
            process.kill()
    found = of(report, "unknown")
    assert f"rank 0 (pid {process.pid}) is at train.py:4 in step: time.sleep(600), sleeping" in found["what"]


def test_a_failing_check_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that raises is reported in yellow, with the other findings."""
    from allhands.doctor import hostnames

    def broken(_: object) -> list[Finding]:
        raise OSError("no")

    monkeypatch.setattr(hostnames, "check", broken)
    found = run_checks(make_request(env={}))
    fault = next(each for each in found if each.check == "doctor-names")
    assert (fault.level, "OSError: no" in fault.what) == ("yellow", True)
    assert len({each.section for each in found}) >= 4


@pytest.mark.parametrize("token", ["", "secret", "wrong"])
def test_two_doctors_and_their_token(token: str) -> None:
    """A listener with a token accepts only clients that have it; their report includes that versions differ."""
    reports: list[Report | None] = []
    listener = PeerServer(Address("127.0.0.1", 0), b"secret", lambda _, report: reports.append(report))
    listener._torch = "2.0.0"
    thread = threading.Thread(target=listener.serve)
    thread.start()
    try:
        case = make_request(Address("127.0.0.1", listener.port), env={"ALLHANDS_TOKEN": token})
        found = run_checks(case)
    finally:
        listener.stop()
        thread.join()
        listener.close()
    slugs = {each.slug for each in found if each.level == "red"}
    assert slugs == (set() if token == "secret" else {"not-authorised"})
    assert [each.slug for each in found if each.check == "versions"] == ["version-mismatch"] * (token == "secret")
    assert len(reports) == (token == "secret")


def test_invalid_settings_are_red(tmp_path: Path) -> None:
    """A token file that others can read is reported with its slug, not as a fault of the doctor."""
    secret = tmp_path / "token"
    secret.write_text("x")
    secret.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as server:
        case = make_request(Address("127.0.0.1", server.getsockname()[1]), env={"ALLHANDS_TOKEN_FILE": str(secret)})
        found = run_checks(case)
    assert {each.slug for each in found if each.level == "red"} == {"not-authorised"}


def test_listener_ends_on_ctrl_c() -> None:
    """Ctrl-C ends it with 0 if no client connected; its port is free again."""
    port = harness.free_port()
    with subprocess.Popen(
        [*DOCTOR, "--listen", f"127.0.0.1:{port}"], stderr=subprocess.PIPE, text=True, env=harness.environment({})
    ) as process:
        assert process.stderr is not None
        assert "listening on" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    socket.create_server(("127.0.0.1", port)).close()

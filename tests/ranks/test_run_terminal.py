"""`allhands run` on a terminal, and the signals that it receives."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ranks import harness
from ranks.runner import run, running


@contextmanager
def terminal(source: str, *options: str, ranks: int = 1) -> Iterator[tuple[int, subprocess.Popen[bytes], Path]]:
    """Run ``source`` on a new pseudo-terminal; yield its master end, the process, and the folder."""
    with running("", ranks=1) as job:
        job.result()
        (job.folder / "train.py").write_text(textwrap.dedent(source))
        master, slave = pty.openpty()
        command = [sys.executable, "-m", "allhands", "run", "-n", str(ranks), *options, str(job.folder / "train.py")]
        # The terminal is that of a session, and the launcher is in its foreground.
        with subprocess.Popen(
            ["/usr/bin/setsid", "--ctty", "--wait", *command],
            cwd=job.folder,
            env=harness.environment({}),
            stdin=slave,
            stdout=slave,
            stderr=slave,
        ) as process:
            os.close(slave)
            try:
                yield master, process, job.folder
            finally:
                process.kill()


def seen(master: int, *texts: bytes) -> bytes:
    """Read from a terminal until all ``texts`` were printed."""
    found = b""
    deadline = time.monotonic() + 60
    while not all(text in found for text in texts):
        ready, _, _ = select.select([master], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        found += os.read(master, 1000)
    return found


def test_terminal() -> None:
    """On a terminal prefixes are coloured, a prompt is printed before its line ends, and rank 0 reads the answer."""
    source = "import os\nif os.environ['RANK'] == '0': print('hello', input('name? '))"
    with terminal(source) as (master, process, _):
        assert b"\x1b[36m[0]\x1b[0m name? " in seen(master, b"name? ")
        os.write(master, b"Ada\n")
        seen(master, b"hello Ada")
        assert process.wait(60) == 0
        os.close(master)


def test_ctrl_c_on_a_terminal() -> None:
    """Ctrl-C reaches every worker as KeyboardInterrupt, and the exit status is 130."""
    with terminal("import time\nprint('ready')\ntime.sleep(100)", ranks=2) as (master, process, _):
        seen(master, b"ready")
        os.write(master, b"\x03")
        assert b"stopped by Ctrl-C" in seen(master, b"exit status 130")
        assert process.wait(60) == 130
        os.close(master)


def test_closing_the_terminal() -> None:
    """A closed terminal ends the job with SIGHUP, and workers have --grace to save their work."""
    source = """
    import os, signal, sys, time
    def save(*_):
        time.sleep(0.5)
        open("saved" + os.environ["RANK"], "w").close()
        sys.exit()
    signal.signal(signal.SIGHUP, save)
    while True:
        print("line")
        time.sleep(0.01)
    """
    with terminal(source, ranks=2) as (master, process, folder):
        seen(master, b"[0]", b"[1]")
        os.close(master)
        process.wait(60)
        deadline = time.monotonic() + 60
        while not all((folder / f"saved{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_sigusr1() -> None:
    """SIGUSR1 to the agent prints every rank's stack, and the job continues."""
    source = """
    import os, time
    def wait_here():
        while not os.path.exists("go"):
            time.sleep(0.02)
    print("ready")
    wait_here()
    """
    with running(source) as job:
        job.wait_for("ready", 2)
        job.send(signal.SIGUSR1)
        job.wait_for("in wait_here")
        (job.folder / "go").touch()
        ran = job.result()
    assert ran.code == 0
    assert "stack of ranks 0 and 1" in ran.err


def test_sigusr1_with_a_program() -> None:
    """A program that does not know the signal for stacks is not sent it."""
    line = ("sh", "-c", "echo ready; while [ ! -e go ]; do sleep 0.05; done; echo done")
    with running("", "--no-python", ranks=1, script=False, arguments=line) as job:
        job.wait_for("ready")
        job.send(signal.SIGUSR1)
        job.wait_for("no stack: the process is")
        (job.folder / "go").touch()
        ran = job.result()
    assert (ran.code, ran.lines(0)) == (0, ["ready", "done"]), ran.err


def test_children_of_the_shell_are_left_alone() -> None:
    """Children of a shell that the launcher replaced (`daemon & exec allhands run`) are not ended."""
    before = ("sh", "-c", 'sleep 100 & echo "daemon $!"; exec "$@"', "sh")
    ran = run("print('hello')", ranks=1, before=before)
    daemon = int(ran.out.split()[1])
    assert (ran.code, ran.lines(0)) == (0, ["hello"])
    assert psutil.Process(daemon).status() != "zombie"
    os.kill(daemon, signal.SIGKILL)


def test_ctrl_z() -> None:
    """SIGTSTP stops every worker; SIGCONT lets them go on, and the time in between is no hang."""
    source = """
    import os, time
    print("ready")
    while not os.path.exists("go"):
        time.sleep(0.02)
    """
    with running(source, "--hang-timeout", "0.5") as job:
        job.wait_for("ready", 2)
        job.send(signal.SIGTSTP)
        deadline = time.monotonic() + 20
        workers = [child.pid for child in psutil.Process(job.process.pid).children() if "-u" in child.cmdline()]
        assert len(workers) == 2
        while {psutil.Process(pid).status() for pid in (job.process.pid, *workers)} != {"stopped"}:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(1)  # longer than the timeout
        job.send(signal.SIGCONT)
        (job.folder / "go").touch()
        assert job.result().code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_at_start(number: int) -> None:
    """A signal that arrives after the workers were started and before the event loop runs ends the job."""
    with running("import time; time.sleep(600)", "--grace", "2") as job:
        children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children")
        # The guard, which is a fork of the agent, and a worker.
        deadline = time.monotonic() + 60
        while len(workers := children.read_text().split()) < 2:
            assert job.process.poll() is None
            assert time.monotonic() < deadline
        job.send(number)
        ran = job.result()
    assert ran.code == 128 + number, ran.err
    assert "the job was stopped by" in ran.verdict
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)

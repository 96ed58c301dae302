from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from ranks import harness
from ranks.runner import Running, run, running

SHOW = """
import json, os, sys
print(json.dumps({"env": dict(os.environ), "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__}))
"""

GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(2) * (dist.get_rank() + 1)
dist.all_reduce(x)
print("sum", x.tolist())
dist.destroy_process_group()
"""

# Two groups, one after the other: the launcher's coordinator must be there for both.
OURS = """
import torch, allhands as dist
for _ in range(2):
    dist.init_process_group()
    x = torch.ones(2) * (dist.get_rank() + 1)
    dist.all_reduce(x)
    print("sum", x.tolist(), dist.get_world_size())
    dist.destroy_process_group()
"""


def test_environment() -> None:
    """Workers find what torchrun sets and what allhands reads, and see themselves as a script that was run."""
    ran = run(
        SHOW, arguments=("--lr", "1", "-x"), ranks=2, env={"PET_RDZV_ID": "night", "TORCHELASTIC_USE_AGENT_STORE": "1"}
    )
    assert ran.code == 0, ran.err
    for rank in range(2):
        said = json.loads(ran.lines(rank)[0])
        env = said["env"]
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RUN_ID": "night",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "OMP_NUM_THREADS": "1",
            "ALLHANDS_RANK": str(rank),
            "ALLHANDS_LOCAL_RANK": str(rank),
            "ALLHANDS_WORLD_SIZE": "2",
            "ALLHANDS_NODE_RANK": "0",
            "ALLHANDS_JOB": "night",
            "ALLHANDS_ATTEMPT": "0",
            "ALLHANDS_RESTART": "0",
        }
        assert {name: env.get(name) for name in expected} == expected
        assert int(env["MASTER_PORT"]) > 0
        assert env["ALLHANDS_COORDINATOR"].startswith("unix:allhands-")
        assert len(env["ALLHANDS_TOKEN"]) >= 32
        assert "TORCHELASTIC_USE_AGENT_STORE" not in env
        script = said["file"]
        assert said["argv"] == [script, "--lr", "1", "-x"]
        assert said["path"] == str(Path(script).parent)
        assert said["name"] == "__main__"


def test_a_torchrun_line_works_with_the_name_changed() -> None:
    """Torchrun's spellings, older ones too, start a script that knows only torch, with rank 0's own store."""
    ran = run(
        GLOO,
        "--nproc_per_node=2",
        "--standalone",
        "--rdzv-backend",
        "c10d",
        "--rdzv_id=7",
        "--max_restarts=0",
        "--monitor-interval",
        "1",
    )
    assert ran.code == 0, ran.err
    assert [ran.lines(rank) for rank in range(2)] == [["sum [3.0, 3.0]"]] * 2


def test_a_script_of_ours() -> None:
    """A bare init_process_group() meets at the launcher, again and again."""
    ran = run(OURS)
    assert ran.code == 0, ran.err
    assert [ran.lines(rank) for rank in range(2)] == [["sum [3.0, 3.0] 2"] * 2] * 2
    assert ran.report["ranks"][0]["last_call"] == "all_reduce SUM of float32[2] at train.py:5: done"


def test_init_forms_the_group_before_the_script() -> None:
    """With --init the script only asks for its rank; the group is ended after it."""
    ran = run(
        "import torch, torch.distributed as d; x = torch.ones(1); d.all_reduce(x); print(d.get_rank(), x.item())",
        "--init",
    )
    assert ran.code == 0, ran.err
    assert [ran.lines(rank) for rank in range(2)] == [["0 2.0"], ["1 2.0"]]


def test_module_and_program() -> None:
    """-m runs a module as python -m does, --no-python a program; both see their arguments."""
    ran = run(SHOW, "-m", ranks=1, script=False, arguments=("train", "a"))
    assert ran.code == 0, ran.err
    said = json.loads(ran.lines(0)[0])
    assert said["argv"] == [said["file"], "a"]
    assert Path(said["path"]) == Path(said["file"]).parent
    assert said["name"] == "__main__"
    ran = run("", "--no-python", script=False, arguments=("sh", "-c", "echo $RANK of $WORLD_SIZE; exit $((RANK * 5))"))
    assert (ran.code, ran.lines(0), ran.lines(1)) == (5, ["0 of 2"], ["1 of 2"])


def test_a_folder_with_a_main() -> None:
    """A folder (or an archive) with a __main__.py is run as python runs it."""
    with running("", ranks=1) as job:
        job.result()
        folder = job.folder / "app"
        folder.mkdir()
        (folder / "part.py").write_text("word = 'part'")
        (folder / "__main__.py").write_text("import part, sys; print(part.word, sys.argv[1:], __name__)")
        ran = run("", ranks=1, script=False, arguments=(str(folder), "x"))
    assert (ran.code, ran.lines(0)) == (0, ["part ['x'] __main__"]), ran.err


def test_hooks_of_the_script_are_its_own() -> None:
    """An excepthook that the script set is called with its exception, then exit handlers, then the exit status is 1."""
    source = """
    import atexit, sys
    atexit.register(print, "at exit")
    sys.excepthook = lambda kind, problem, trace: print("hook", kind.__name__, trace.tb_frame.f_code.co_name)
    raise ValueError
    """
    ran = run(source, ranks=1)
    assert (ran.code, ran.lines(0)) == (1, ["hook ValueError <module>", "at exit"]), ran.err


def test_spawn_and_pickle_inside() -> None:
    """Classes and functions of the script can be pickled, and multiprocessing's spawn finds them in a child."""
    source = """
    import multiprocessing, pickle

    class Thing:
        pass

    def double(x):
        return 2 * x

    if __name__ == "__main__":
        assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(double, [1, 2]))
    """
    ran = run(source, ranks=1)
    assert (ran.code, ran.lines(0)) == (0, ["[2, 4]"]), ran.err


def test_a_child_of_a_worker_has_a_board_of_its_own() -> None:
    """What a worker forks or starts does not write on the board that the launcher reads for the worker."""
    source = """
    import os, subprocess, sys
    from allhands import notes
    print("given", notes._mine().descriptor == int(os.environ["ALLHANDS_BOARD_FD"].split(":")[0]), flush=True)
    if os.fork() == 0:
        print("fork", notes._given(), flush=True)
        os._exit(0)
    os.wait()
    subprocess.run([sys.executable, "-c", "from allhands import notes; print('exec', notes._given())"], check=True)
    """
    ran = run(source, ranks=1)
    assert sorted(ran.lines(0)) == ["exec None", "fork None", "given True"], ran.err


# Output -----------------------------------------------------------------------------------------------------------

FLOOD = """
import os, sys
rank, lines = os.environ["RANK"], int(sys.argv[1])
for first in range(0, lines, 100):
    sys.stdout.write("".join(f"{rank} {number} {'x' * (number % 60)}\\n" for number in range(first, first + 100)))
print("last", end="")
"""


def check_flood(out: str, lines: int) -> None:
    """Fail unless every line of four ranks is there, whole, and in order."""
    found: dict[int, list[str]] = {rank: [] for rank in range(4)}
    for line in out.splitlines():
        found[int(line[1])].append(line[4:])
    for rank, said in found.items():
        assert said == [*(f"{rank} {number} {'x' * (number % 60)}" for number in range(lines)), "last"]


def test_many_lines() -> None:
    """Nothing is lost, torn or out of order; the last line needs no newline."""
    ran = run(FLOOD, ranks=4, arguments=("10000",))
    assert ran.code == 0, ran.err
    check_flood(ran.out, 10_000)


@pytest.mark.soak
def test_a_million_lines() -> None:
    """The same with 4 x 250,000 lines."""
    ran = run(FLOOD, ranks=4, arguments=("250000",))
    assert ran.code == 0, ran.err
    check_flood(ran.out, 250_000)


def test_a_slow_reader_holds_the_workers_back() -> None:
    """Where nobody reads, the launcher's memory stays bounded and the workers wait; then nothing is missing."""
    source = r"""
import sys
for n in range(300):
    sys.stdout.write(f"{n} " + "y" * 100_000 + "\n")
print("all", file=sys.stderr)
"""
    command = [sys.executable, "-m", "allhands", "run", "-n", "1", "-m", "slow"]
    with running(source, ranks=1) as job:
        (job.folder / "slow.py").write_text(source)
        job.result()
        with subprocess.Popen(
            command, cwd=job.folder, env=harness.environment({}), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            time.sleep(3)
            status = Path(f"/proc/{process.pid}/status").read_text()
            used = int(status.partition("VmRSS:")[2].split()[0])
            out, err = process.communicate(timeout=60)
    assert used < 120_000, f"{used} KiB"
    assert b"all" in err
    assert [line.split()[1] for line in out.splitlines()] == [str(n).encode() for n in range(300)]


def ranks_of(line: str) -> list[int]:
    """Return the ranks in the prefix of a line: ``[0-2,5] …``."""
    found = []
    for part in line[1 : line.index("]")].split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def test_equal_lines_are_folded() -> None:
    """With --fold a line that all ranks print is shown once, with their ranks; lines of a rank stay in order."""
    source = """
    import os
    print("same")
    print("mine", os.environ["RANK"])
    print("same")
    """
    ran = run(source, "--fold", ranks=4)
    lines = ran.out.splitlines()
    assert sorted(line for line in lines if "mine" in line) == [f"[{rank}] mine {rank}" for rank in range(4)]
    # A rank that is late on a busy machine is not waited for, so its line may come by itself.
    shown = [ranks_of(line) for line in lines if line.endswith("] same")]
    assert sorted(rank for ranks in shown for rank in ranks) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert max(map(len, shown)) > 1
    for rank in range(4):
        mine = [line.partition("] ")[2] for line in lines if rank in ranks_of(line)]
        assert mine == ["same", f"mine {rank}", "same"]


def test_no_prefix() -> None:
    """--no-prefix passes lines on as they are."""
    assert run("print('a'); print('b')", "--no-prefix", ranks=1).out == "a\nb\n"


def test_progress_bars_and_binary() -> None:
    """Carriage returns and bytes that are no text disturb nobody: a bar shows its last state on its line."""
    source = r"""
    import os, sys, time
    if os.environ["RANK"] == "0":
        for n in range(5):
            sys.stdout.write(f"\r{n * 25}%")
            time.sleep(0.01)
        sys.stdout.write("\n")
        sys.stdout.buffer.write(b"\xff\x00\xfe\n")
    else:
        print("plain")
    """
    ran = run(source)
    assert "[0] 100%\n" in ran.out
    assert "[1] plain\n" in ran.out
    assert "\r" not in ran.out
    assert ran.out.count("100%") == 1
    assert len(ran.out.splitlines()) <= 4  # a state in between may have been shown


def test_logs(tmp_path: Path) -> None:
    """--log-dir keeps each stream; --redirects takes it off the screen, per rank and stream; --tee does not."""
    source = "import os, sys; print('out', os.environ['RANK']); print('err', os.environ['RANK'], file=sys.stderr)"
    ran = run(source, "--log-dir", str(tmp_path / "all"))
    assert ran.out.count("out") == 2
    (folder,) = (tmp_path / "all").iterdir()
    assert (folder / "attempt_0" / "1" / "stderr.log").read_text() == "err 1\n"
    ran = run(source, "--log-dir", str(tmp_path / "some"), "--redirects", "0:3", "--tee", "1:2")
    assert (ran.lines(0), ran.lines(1)) == ([], ["out 1"])
    (folder,) = (tmp_path / "some").iterdir()
    found = {str(path.relative_to(folder / "attempt_0")): path.read_text() for path in folder.rglob("*.log")}
    assert found == {"0/stdout.log": "out 0\n", "0/stderr.log": "err 0\n", "1/stderr.log": "err 1\n"}
    assert "[1] err 1" in ran.err
    assert "[0] err 0" not in ran.err


def test_logs_without_a_folder(tmp_path: Path) -> None:
    """--redirects alone keeps logs in a folder for temporary files, and says where; a filter hides ranks."""
    source = "import os; print('out', os.environ['RANK'])"
    ran = run(source, "--redirects", "0:1", "--local-ranks-filter", "0", env={"TMPDIR": str(tmp_path)})
    assert ran.out == ""
    (log,) = tmp_path.rglob("stdout.log")
    assert log.read_text() == "out 0\n"
    assert f"the ranks' logs are in {log.parents[2]}" in ran.err


def test_a_folder_for_logs_that_is_a_file(tmp_path: Path) -> None:
    """A folder that cannot be made is a mistake in the command, said before any rank starts."""
    (tmp_path / "file").touch()
    ran = run("print('started')", "--log-dir", str(tmp_path / "file"))
    assert (ran.code, ran.out) == (2, "")
    assert "[invalid-argument]" in ran.err
    assert "Traceback" not in ran.err


def test_stdin_goes_to_rank_0() -> None:
    """Rank 0 reads what the launcher is given; the others read nothing."""
    ran = run("import sys; print(repr(sys.stdin.read()))", stdin=b"hello\nyou\n")
    assert (ran.lines(0), ran.lines(1)) == ([repr("hello\nyou\n")], ["''"])


@contextmanager
def terminal(source: str, *options: str, ranks: int = 1) -> Iterator[tuple[int, subprocess.Popen[bytes], Path]]:
    """Run ``source`` on a terminal of its own; yield its other end, the process, and the folder."""
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
    """Read from a terminal until all ``texts`` are on it."""
    found = b""
    deadline = time.monotonic() + 60
    while not all(text in found for text in texts) and time.monotonic() < deadline:
        found += os.read(master, 1000)
    return found


def test_a_terminal() -> None:
    """On a terminal prefixes are coloured, a question is shown before its line ends, and rank 0 hears the answer."""
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
    """A terminal that is closed ends the job with SIGHUP, and workers have the grace to save what they did."""
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


# Signals and restarts ---------------------------------------------------------------------------------------------


def test_sigusr1_shows_what_everyone_does() -> None:
    """SIGUSR1 to the agent prints every rank's stack, and the job goes on."""
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


def test_asking_a_program_does_not_end_it() -> None:
    """A program that does not know the signal for stacks is not sent it."""
    line = ("sh", "-c", "echo ready; while [ ! -e go ]; do sleep 0.05; done; echo done")
    with running("", "--no-python", ranks=1, script=False, arguments=line) as job:
        job.wait_for("ready")
        job.send(signal.SIGUSR1)
        job.wait_for("no stack: the process is")
        (job.folder / "go").touch()
        ran = job.result()
    assert (ran.code, ran.lines(0)) == (0, ["ready", "done"]), ran.err


def test_children_of_the_shell_are_not_the_jobs() -> None:
    """What ran below the launcher before it was the launcher (`daemon & exec allhands run`) is left alone."""
    before = ("sh", "-c", 'sleep 100 & echo "daemon $!"; exec "$@"', "sh")
    ran = run("print('hello')", ranks=1, before=before)
    daemon = int(ran.out.split()[1])
    assert (ran.code, ran.lines(0)) == (0, ["hello"])
    assert psutil.Process(daemon).status() != "zombie"
    os.kill(daemon, signal.SIGKILL)


def test_ctrl_z_stops_the_workers_too() -> None:
    """SIGTSTP stops every worker; SIGCONT lets them go on, and the time in between is no hang."""
    with running("import time\nprint('ready')\ntime.sleep(1)\n", "--hang-timeout", "0.5") as job:
        job.wait_for("ready", 2)
        job.send(signal.SIGTSTP)
        deadline = time.monotonic() + 20
        workers = [child.pid for child in psutil.Process(job.process.pid).children() if "-u" in child.cmdline()]
        assert len(workers) == 2
        while {psutil.Process(pid).status() for pid in (job.process.pid, *workers)} != {"stopped"}:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        job.send(signal.SIGCONT)
        assert job.result().code == 0


def test_a_port_that_is_taken() -> None:
    """Where node 0 cannot listen, that is said by name, and no worker stays."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        ran = run(SHOW, "--nnodes", "2", "--node-rank", "0", "--coordinator", place, ranks=1)
    assert ran.code == 1
    assert "[port-in-use]" in ran.err
    assert "Traceback" not in ran.err


def test_restart() -> None:
    """--max-restarts starts all ranks again with a new number, until it goes well."""
    source = """
    import os, sys
    print("attempt", os.environ["ALLHANDS_RESTART"], os.environ["TORCHELASTIC_RESTART_COUNT"])
    if os.environ["ALLHANDS_RESTART"] == "0" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    """
    ran = run(source, "--max-restarts", "2", "--restart-if", "signal,lost")
    assert ran.code == 0, ran.err
    assert "allhands: restart 1 of 2" in ran.err
    assert [ran.lines(rank)[-1] for rank in range(2)] == ["attempt 1 1"] * 2
    assert ran.report["attempt"] == 1


def test_code_errors_burn_no_restarts() -> None:
    """With --restart-if signal an exception ends the job at once."""
    ran = run("raise ValueError('no')", "--max-restarts", "3", "--restart-if", "signal", ranks=1)
    assert (ran.code, ran.err.count("restart"), ran.report["attempt"]) == (1, 0, 0)


def test_restarts_are_used_up() -> None:
    """A job that fails every time fails with the last verdict."""
    ran = run("import sys; sys.exit(7)", "--max-restarts", "1", ranks=1)
    assert (ran.code, ran.report["attempt"]) == (7, 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_two_agents_on_one_host(host: str) -> None:
    """Two agents that are given the same coordinator make one job of both nodes' ranks, over IPv6 too."""
    if host == "[::1]" and not harness.ipv6():
        pytest.skip("there is no IPv6 here")
    port = harness.free_port()
    options = ("--nnodes", "2", "--coordinator", f"{host}:{port}")
    env = {"ALLHANDS_TOKEN": "secret"}
    with (
        running(OURS, *options, "--node-rank", "0", ranks=1, env=env) as first,
        running(OURS, *options, "--node-rank", "1", ranks=1, env=env) as second,
    ):
        one, two = first.result(), second.result()
    assert (one.code, two.code) == (0, 0), one.err + two.err
    assert (one.lines(0), two.lines(1)) == (["sum [3.0, 3.0] 2"] * 2, ["sum [3.0, 3.0] 2"] * 2)


def agents(stack: ExitStack, source: str, *options: str, nodes: int) -> list[Running]:
    """Start the agents of ``nodes`` nodes, all on this host and with one rank each."""
    line = ("--nnodes", str(nodes), "--coordinator", f"127.0.0.1:{harness.free_port()}", "--grace", "1", *options)
    env = {"ALLHANDS_TOKEN": "secret"}
    return [
        stack.enter_context(running(source, *line, "--node-rank", str(node), ranks=1, env=env)) for node in range(nodes)
    ]


def test_four_agents() -> None:
    """Four nodes are one job: every rank has its place, and the one that fails is named on each of them."""
    source = """
    import os, sys, time
    print("here", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["GROUP_RANK"])
    time.sleep(0.3 if os.environ["RANK"] == "2" else 600)
    sys.exit(7)
    """
    with ExitStack() as stack:
        ran = [job.result() for job in agents(stack, source, nodes=4)]
    assert [each.code for each in ran] == [7] * 4, "".join(each.err for each in ran)
    for node, each in enumerate(ran):
        assert each.lines(node) == [f"here {node} 4 {node}"]
        assert "allhands: rank 2 called sys.exit(7)\n  who:   rank 2 (node 2, " in each.verdict
        assert each.report == ran[0].report


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_an_agent_that_is_stopped(victim: int) -> None:
    """The other agent says that it does not answer, and where a rank fails it ends without it and names it."""
    source = """
    import os, pathlib, sys, time
    print("here", os.environ["RANK"], flush=True)
    while not (go := pathlib.Path("go")).exists():
        time.sleep(0.05)
    sys.exit(int(go.read_text()))
    """
    with ExitStack() as stack:
        jobs = agents(stack, source, nodes=2)
        for job in jobs:
            job.wait_for("here")
        other = jobs[1 - victim]
        jobs[victim].send(signal.SIGSTOP)
        (other.folder / "go").write_text("3")
        ran = other.result()
        # Its connection closes, which is an end that it sees: nobody is left behind.
        jobs[victim].send(signal.SIGCONT)
        late = jobs[victim].result()
    assert ran.code == 1, ran.err
    assert f"allhands: node {victim} (" in ran.verdict
    assert "does not answer" in ran.verdict
    assert "inferred from silence: it may live" in ran.verdict
    assert f"waiting for node {victim} (" in ran.err
    assert "its agent has not answered for" in ran.err
    assert late.code != 0


@pytest.mark.soak
def test_an_agent_that_is_stopped_for_a_while() -> None:
    """Nothing failed: whoever waits says for whom, and the job ends well once the agent goes on."""
    source = """
    import os, pathlib, time
    print("here", flush=True)
    while not pathlib.Path("go").exists():
        time.sleep(0.05)
    """
    with ExitStack() as stack:
        jobs = agents(stack, source, nodes=2)
        for job in jobs:
            job.wait_for("here")
        jobs[1].send(signal.SIGSTOP)
        for job in jobs:
            (job.folder / "go").touch()
        jobs[0].wait_for("its agent has not answered for")
        jobs[1].send(signal.SIGCONT)
        assert [job.result().code for job in jobs] == [0, 0]


def test_spawn_under_the_launcher() -> None:
    """A rank that spawns ranks of its own has a group with them that is not the job's; then it takes part in that."""
    source = """
    import os
    import torch
    import allhands as dist

    def child(rank, parent):
        assert os.environ["WORLD_SIZE"] == "2"
        with dist.process_group(timeout=60):
            x = torch.tensor([parent + rank])
            dist.all_reduce(x)
            return int(x)

    if __name__ == "__main__":
        rank = int(os.environ["RANK"])
        print("spawned", dist.spawn(child, (10 * rank,), nprocs=2, start_method="fork", results=True))
        with dist.process_group(timeout=60):
            x = torch.tensor([rank + 1])
            dist.all_reduce(x)
            print("sum", int(x))
    """
    ran = run(source)
    assert ran.code == 0, ran.err
    assert [ran.lines(rank) for rank in range(2)] == [["spawned [1, 1]", "sum 3"], ["spawned [21, 21]", "sum 3"]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_at_once(number: int) -> None:
    """One that comes when workers have just been started, before the agent is ready, ends the job as any does."""
    with running("import time; time.sleep(600)", "--grace", "2") as job:
        children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children")
        # The guard, which is a fork of the agent, and a worker.
        while len(workers := children.read_text().split()) < 2:
            assert job.process.poll() is None
        job.send(number)
        ran = job.result()
    assert ran.code == 128 + number, ran.err
    assert "the job was stopped by" in ran.verdict
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)

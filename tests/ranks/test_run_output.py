"""The output and input of workers under `allhands run`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ranks import harness
from ranks.runner import run, running

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
def test_million_lines() -> None:
    """The same with 4 x 250,000 lines."""
    ran = run(FLOOD, ranks=4, arguments=("250000",))
    assert ran.code == 0, ran.err
    check_flood(ran.out, 250_000)


def test_back_pressure() -> None:
    """With a slow reader, the launcher's memory stays bounded and the workers block; no line is lost."""
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


def test_fold() -> None:
    """With --fold a line that all ranks print is shown once, with their ranks; lines of a rank stay in order."""
    source = """
    import os, time
    open("here" + os.environ["RANK"], "w").close()
    while not all(os.path.exists(f"here{rank}") for rank in range(4)):
        time.sleep(0.01)
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
    """Carriage returns and binary output are handled: a progress bar is printed in its last state."""
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
    """--log-dir writes each stream to a file; --redirects removes it from the output, per rank and stream."""
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


def test_logs_without_log_dir(tmp_path: Path) -> None:
    """--redirects alone writes logs to a temporary directory, which is printed; a filter hides ranks."""
    source = "import os; print('out', os.environ['RANK'])"
    ran = run(source, "--redirects", "0:1", "--local-ranks-filter", "0", env={"TMPDIR": str(tmp_path)})
    assert ran.out == ""
    (log,) = tmp_path.rglob("stdout.log")
    assert log.read_text() == "out 0\n"
    assert f"the ranks' logs are in {log.parents[2]}" in ran.err


def test_log_dir_is_a_file(tmp_path: Path) -> None:
    """A folder that cannot be created is a usage error, reported before any rank starts."""
    (tmp_path / "file").touch()
    ran = run("print('started')", "--log-dir", str(tmp_path / "file"))
    assert (ran.code, ran.out) == (2, "")
    assert "[invalid-argument]" in ran.err
    assert "Traceback" not in ran.err


def test_stdin_goes_to_rank_0() -> None:
    """Rank 0 reads the launcher's standard input; the others read an empty file."""
    ran = run("import sys; print(repr(sys.stdin.read()))", stdin=b"hello\nyou\n")
    assert (ran.lines(0), ran.lines(1)) == ([repr("hello\nyou\n")], ["''"])

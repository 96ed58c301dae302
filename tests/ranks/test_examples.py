from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ranks import harness

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = Path(sys.executable).with_name("torchrun")
# Each takes a few seconds, most of them for importing torch; this only ends a hang on a loaded machine.
DEADLINE_S = 100
# Rank 0 has the coordinator process; its death is tested in tests/faults too.
CULPRITS = [pytest.param(0, marks=pytest.mark.soak), 2]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run ``command`` to its end, with its output in a file."""
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the demo. On a loaded machine rank 0 logs which ranks it waits for; those lines are dropped."""
    done = run(sys.executable, "-W", "error::ResourceWarning", EXAMPLES / "demo.py", *options)
    done.stderr = harness.complaints(done.stderr)
    return done


def test_demo() -> None:
    """The demo trains on four ranks and reports loss, accuracy and each rank's throughput."""
    done = demo("--epochs", "2")
    assert (done.returncode, done.stderr) == (0, "")
    last, closing = done.stdout.splitlines()[-2:]
    found = re.fullmatch(
        r"epoch   2/2  loss (\S+)  accuracy +(\S+)%  " + "  ".join(rf"rank {rank}: ([\d,]+)/s" for rank in range(4)),
        last,
    )
    assert found is not None, last
    loss, accuracy, *speeds = (float(text.replace(",", "")) for text in found.groups())
    # By chance: 33 % and a loss of log 3. Two epochs reach slightly more.
    assert 0 < loss < math.log(3)
    assert 34 < accuracy < 100
    assert min(speeds) > 0
    assert closing.startswith(f"accuracy {accuracy}% on points that were not trained on")


@pytest.mark.soak
def test_demo_learns() -> None:
    """The whole demo, as in `make demo`, reaches its required accuracy."""
    done = demo()
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.mark.parametrize("culprit", CULPRITS)
def test_demo_with_a_rank_that_raises(culprit: int) -> None:
    """Every other rank raises PeerFailed with the traceback of the failed rank, and the demo ends."""
    done = demo("--epochs", "1", "--break", str(culprit))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    what = rf"PeerFailed: rank {culprit} raised ShardError: shard {culprit} holds 7 points, not 1500   \[peer-failed\]"
    told = re.findall(rf"^rank (\d), (\S+) s later: {what}$", done.stdout, flags=re.MULTILINE)
    assert [int(rank) for rank, _ in told] == [rank for rank in range(4) if rank != culprit]
    assert all(float(seconds) < 5 for _, seconds in told)
    assert f"\n  who:  rank {culprit} (" in done.stdout
    assert re.search(
        r'    \|   File ".*demo\.py", line \d+, in fail_if_selected\n    \|     raise ShardError\(', done.stdout
    )
    assert "3 of 3 other ranks raised within" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("culprit", CULPRITS)
def test_demo_with_a_rank_that_is_killed(culprit: int) -> None:
    """Every other rank raises PeerLost, which names the killed rank, and the demo ends."""
    done = demo("--epochs", "1", "--kill", str(culprit))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    told = re.findall(
        rf"^rank (\d), (\S+) s later: PeerLost: rank {culprit} is gone   \[peer-lost\]$",
        done.stdout,
        flags=re.MULTILINE,
    )
    assert [int(rank) for rank, _ in told] == [rank for rank in range(4) if rank != culprit]
    assert all(float(seconds) < 5 for _, seconds in told)
    assert "3 of 3 other ranks raised within" in done.stdout.splitlines()[-1]


def test_demo_interrupted() -> None:
    """Ctrl-C during training ends every rank without a traceback and leaves nothing behind."""
    with subprocess.Popen(
        [sys.executable, EXAMPLES / "demo.py", "--epochs", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            # The first line is printed before the imports, the second during training.
            process.stdout.readline()
            assert process.stdout.readline().startswith("epoch  10/")
            asked = time.monotonic()
            # A terminal sends it to the foreground process group.
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=DEADLINE_S)
            assert time.monotonic() - asked < 20
        finally:
            process.kill()
    assert (process.returncode, harness.complaints(err)) == (130, "")
    assert out.endswith("interrupted; every rank has ended\n")


def test_ten_lines_alone() -> None:
    """Without a launcher the script of the README runs with a world size of one."""
    done = run(sys.executable, EXAMPLES / "ten_lines.py")
    assert (done.returncode, done.stderr) == (0, "")
    pi, size = estimate(done.stdout)
    assert (round(pi, 1), size) == (3.1, 1)


def test_ten_lines_under_torchrun() -> None:
    """The same script under torchrun has as many ranks as torchrun starts, of which one prints."""
    done = run(TORCHRUN, "--standalone", "--nproc-per-node", "2", EXAMPLES / "ten_lines.py")
    assert done.returncode == 0, done.stderr
    pi, size = estimate(done.stdout)
    assert (round(pi, 1), size) == (3.1, 2)


def estimate(output: str) -> tuple[float, int]:
    """Return pi and the world size from the output of the script."""
    found = re.fullmatch(r"pi is about (\d\.\d{4}); world size (\d+)\n", output)
    assert found is not None, output
    return float(found[1]), int(found[2])


def test_digits_against_gloo(tmp_path: Path) -> None:
    """The comparison of `make demo`: both jobs train, and both curves are plotted."""
    pytest.importorskip("sklearn", reason="the digits example needs the extra 'examples'")
    pytest.importorskip("matplotlib", reason="the digits example needs the extra 'examples'")
    picture = tmp_path / "digits.png"
    done = run(
        *(sys.executable, "-m", "allhands", "run", "-n", "2", "--no-prefix", EXAMPLES / "digits.py"),
        *("--epochs", "1", "--against-gloo", "--plot", str(picture)),
    )
    assert done.returncode == 0, done.stderr
    first, told, ours, theirs = done.stdout.splitlines()
    assert first.startswith("epoch  1/1  loss ")
    assert told == f"the curves are in {picture}"
    assert picture.read_bytes().startswith(b"\x89PNG")
    # The same samples in the same order: the models agree but for the rounding of their normalisation.
    found = [float(text) for line in (ours, theirs) for text in re.findall(r"accuracy (\S+)%", line)]
    assert len(found) == 2
    assert abs(found[0] - found[1]) < 10
    assert re.search(r"which is \d+\.\d\d times as long$", theirs)

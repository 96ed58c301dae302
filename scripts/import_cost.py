"""Measure what allhands adds to `import torch` through its `torch.backends` entry point.

Each round starts two fresh interpreters, one where torch finds the entry point and one where it does not, in
alternating order so that a machine that slows down or speeds up favours neither. Torch looks for entry points
in both, because it does so without allhands too.

The difference of two imports of a second each varies by far more than what is looked for, so the time inside the
entry point (loading it and calling it) is measured as well, by a clock around it. That one is judged: exits 1 where
its median is above the limit. The difference is printed with the interval that its median lies in, so that nobody
takes noise for a finding.

    python scripts/import_cost.py --rounds 20
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

__all__ = ["LIMIT_MS", "interval", "main", "measure"]

# More than this would be felt in programs that import torch and never use allhands.
LIMIT_MS = 5.0

# Runs in the fresh interpreter: prints the milliseconds of `import torch` and those of our entry point in it.
_PROBE = """
import sys, time
import importlib.metadata as metadata

spent = 0.0
found = metadata.entry_points

class Timed:
    def __init__(self, entry):
        self.name, self.entry = entry.name, entry

    def load(self):
        global spent
        start = time.perf_counter()
        function = self.entry.load()
        spent += time.perf_counter() - start

        def call():
            global spent
            start = time.perf_counter()
            function()
            spent += time.perf_counter() - start

        return call

def entry_points(**which):
    entries = found(**which)
    if which.get("group") != "torch.backends":
        return entries
    ours = [Timed(entry) for entry in entries if entry.name == "allhands"]
    others = [entry for entry in entries if entry.name != "allhands"]
    return others + (ours if sys.argv[1] == "with" else [])

metadata.entry_points = entry_points
start = time.perf_counter()
import torch
total = time.perf_counter() - start
known = "allhands" in torch.distributed.Backend.backend_list
if known != (sys.argv[1] == "with"):
    sys.exit("torch %s the backend allhands" % ("knows" if known else "does not know"))
print(total * 1e3, spent * 1e3)
"""


def measure(which: str) -> tuple[float, float]:
    """Import torch in a fresh interpreter, ``which`` = "with" or "without" the entry point; return milliseconds.

    The first number is the whole import, the second the part that the entry point took.
    """
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, which], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode != 0:
        sys.exit(f"import torch {which} the entry point failed: {done.stderr.strip()}")
    total, spent = done.stdout.split()
    return float(total), float(spent)


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median of ``values``, from their order alone."""
    ordered = sorted(values)
    # Normal approximation of the binomial: the median lies between these ranks in 95 of 100 repetitions.
    reach = max(0, int(len(ordered) / 2 - 0.98 * len(ordered) ** 0.5))
    return ordered[reach], ordered[-1 - reach]


def main() -> int:
    """Run the rounds, print the medians, and return the exit status."""
    parser = argparse.ArgumentParser(description="Measure what allhands adds to `import torch`.")
    parser.add_argument("--rounds", type=int, default=20, help="pairs of interpreters to start (default 20)")
    rounds: int = parser.parse_args().rounds

    measure("with"), measure("without")  # fills the file cache and writes the bytecode
    differences: list[float] = []
    plain: list[float] = []
    own: list[float] = []
    for number in range(rounds):
        order = ("with", "without") if number % 2 else ("without", "with")
        taken = {which: measure(which) for which in order}
        differences.append(taken["with"][0] - taken["without"][0])
        plain.append(taken["without"][0])
        own.append(taken["with"][1])
    low, high = interval(differences)
    print(f"import torch without allhands:  {statistics.median(plain):8.1f} ms (median of {rounds})")
    print(
        f"difference with allhands:       {statistics.median(differences):+8.1f} ms "
        f"(median; 95 % interval {low:+.1f} to {high:+.1f})"
    )
    if high - low > LIMIT_MS:
        print("  wider than the limit: on this machine the difference shows nothing either way")
    print(
        f"inside the entry point:         {statistics.median(own):8.2f} ms "
        f"(median, at most {max(own):.2f}; limit {LIMIT_MS:g})"
    )
    return int(statistics.median(own) > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())

"""Collectives, ours and torch's Gloo in the same processes, round by round: so that both meet the same neighbours."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from ..errors import fail

__all__ = ["OPERATIONS", "measure", "sizes", "table", "work"]

OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

# One measurement of one size takes about this long, so that small sizes are repeated often and large ones seldom.
_SPELL_S = 0.15
_MOST_REPEATS = 2000

# A run that takes longer has hung; the largest size is a quarter of a GiB and a few rounds.
_DEADLINE_S = 600.0


def sizes(text: str) -> list[int]:
    """Read ``4:64M`` (each four times the one before) or ``4,1K,1M``, in bytes."""
    try:
        if ":" not in text:
            return [_bytes(part) for part in text.split(",")]
        first, last = (_bytes(part) for part in text.split(":"))
        found = [first]
        while found[-1] * 4 <= last:
            found.append(found[-1] * 4)
    except (ValueError, KeyError):
        raise fail(
            "invalid-argument",
            f"--sizes {text!r} is not a range of sizes",
            who="allhands bench",
            fix="write 4:64M, or 4,1K,1M",
        ) from None
    return found if found[-1] == last else [*found, last]


def _bytes(text: str) -> int:
    number = text.strip().rstrip("KMGkmg")
    value = int(number) * _UNITS[text.strip()[len(number) :].upper()]
    if value < 4:
        raise ValueError(text)
    return value // 4 * 4


def measure(operation: str, ranks: int, wanted: list[int], rounds: int) -> list[dict[str, Any]]:
    """Run the ranks, and return a row for each size: median and least seconds of each engine, and their ratio."""
    order = json.dumps({"operation": operation, "sizes": wanted, "rounds": rounds})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ALLHANDS_JOB": f"bench-{os.getpid()}"}
    code = (
        "import sys; from allhands.bench.collective import work; work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(ranks), order],
            env=environment,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        output, _ = processes[0].communicate(timeout=_DEADLINE_S)
    finally:
        for process in processes:
            process.terminate()
            process.wait()
    rows: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if len(rows) != len(wanted):
        raise fail(
            "engine-failed",
            f"the bench of {operation} ended after {len(rows)} of {len(wanted)} sizes",
            who="the ranks of the bench; their messages stand above",
            fix="run it with fewer ranks or smaller sizes",
        )
    return rows


def work(rank: int, ranks: int, order: str) -> None:
    """Be one rank of a bench: measure as ``order`` says, and as rank 0 print a JSON row for each size."""
    import torch

    import allhands as dist

    torch.set_num_threads(1)
    wanted = json.loads(order)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=120)
    groups = {"gloo": dist.group.WORLD, "allhands": dist.new_group(backend="allhands")}
    for size in wanted["sizes"]:
        call = _call(wanted["operation"], size // 4, ranks)
        times: dict[str, list[float]] = {name: [] for name in groups}
        repeats = {name: _repeats(call, group) for name, group in groups.items()}
        for _ in range(wanted["rounds"]):
            for name, group in groups.items():
                times[name].append(_spell(call, group, repeats[name]))
        if rank == 0:
            copy_s = _copy(size)
            sys.stdout.write(json.dumps(_row(wanted["operation"], ranks, size, times, copy_s)) + "\n")
            sys.stdout.flush()
    dist.destroy_process_group()


def _call(operation: str, count: int, ranks: int) -> Any:
    import torch

    import allhands as dist

    each = max(1, count // ranks)
    mine = torch.ones(count)
    pieces = [torch.ones(each) for _ in range(ranks)]
    others = [torch.empty(each) for _ in range(ranks)]
    whole = [torch.empty(count) for _ in range(ranks)] if operation == "all_gather" else []
    match operation:
        case "all_reduce":
            # The greatest, so that repeating does not overflow.
            return lambda group: dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=group)
        case "broadcast":
            return lambda group: dist.broadcast(mine, 0, group=group)
        case "all_gather":
            return lambda group: dist.all_gather(whole, mine, group=group)
        case "reduce_scatter":
            return lambda group: dist.reduce_scatter(others[0], pieces, op=dist.ReduceOp.MAX, group=group)
        case _:
            return lambda group: dist.all_to_all(others, pieces, group=group)


def _repeats(call: Any, group: Any) -> int:
    import torch

    import allhands as dist

    for _ in range(3):
        call(group)
    started = time.perf_counter()
    call(group)
    # All ranks must make the same number of calls: the slowest one's time decides.
    slowest = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return max(2, min(_MOST_REPEATS, int(_SPELL_S / max(1e-6, slowest.item()))))


def _spell(call: Any, group: Any, repeats: int) -> float:
    import allhands as dist

    dist.barrier(group=group)
    started = time.perf_counter()
    for _ in range(repeats):
        call(group)
    return (time.perf_counter() - started) / repeats


def _copy(size: int) -> float:
    """Return how long one plain copy of ``size`` bytes takes on this machine at this moment."""
    import torch

    source, target = torch.ones(size // 4), torch.empty(size // 4)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _row(operation: str, ranks: int, size: int, times: dict[str, list[float]], copy_s: float) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "operation": operation,
        "ranks": ranks,
        "bytes": size,
        "rounds": len(times["gloo"]),
        "allhands_s": medians["allhands"],
        "allhands_least_s": min(times["allhands"]),
        "gloo_s": medians["gloo"],
        "gloo_least_s": min(times["gloo"]),
        "copy_s": copy_s,
        "ratio": medians["gloo"] / medians["allhands"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Put ``rows`` into an aligned table."""
    head = (
        f"{'bytes':>12}  {'allhands':>11}  {'least':>11}  {'gloo':>11}  {'least':>11}  {'ratio':>6}  {'one copy':>11}"
    )
    lines = [f"{rows[0]['operation']}, {rows[0]['ranks']} ranks, float32; us", head, "-" * len(head)]
    keys = ("allhands_s", "allhands_least_s", "gloo_s", "gloo_least_s")
    for row in rows:
        cells = "  ".join(f"{row[key] * 1e6:>11,.1f}" for key in keys)
        lines.append(f"{row['bytes']:>12,}  {cells}  {row['ratio']:>6.1f}  {row['copy_s'] * 1e6:>11,.1f}")
    lines.append(
        f"medians of {rows[0]['rounds']} rounds, both engines in turn in the same processes; ratio: gloo over allhands"
    )
    return "\n".join(lines)

"""What follows from all nodes of a job together: one story, a hang, another start. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ..attempt import Story
from ..job import Job
from ..stall import Hang
from ..verdict import Outcome, Verdict

__all__ = ["Urging", "again", "merge", "ranks_of", "shifted", "stands_still"]


def shifted(story: Story, by_s: float) -> Story:
    """Return a story that another node told, with its times moved by ``by_s`` to be on this node's clock."""
    return msgspec.structs.replace(story, outcomes=[_shifted(outcome, by_s) for outcome in story.outcomes])


def _shifted(outcome: Outcome, by_s: float) -> Outcome:
    record = dict(outcome.record)
    if "at_s" in record:
        record["at_s"] = float(record["at_s"]) + by_s
    return msgspec.structs.replace(
        outcome,
        record=record,
        ended_s=outcome.ended_s + by_s,
        # 0 is "never".
        sent_s=outcome.sent_s + by_s if outcome.sent else 0.0,
    )


def merge(stories: Mapping[int, Story]) -> Story:
    """Return the story of all nodes as if they were one; leftovers say which node had them."""
    outcomes = [outcome for node in sorted(stories) for outcome in stories[node].outcomes]
    leftovers = [f"node {node}: {each}" for node in sorted(stories) for each in stories[node].leftovers]
    stopped = next((story.stopped for story in stories.values() if story.stopped), 0)
    hangs = [stories[node].hanging for node in sorted(stories)]
    return Story(sorted(outcomes, key=lambda outcome: outcome.rank), _hang(hangs), stopped, leftovers)


def _hang(hangs: Iterable[Hang | None]) -> Hang | None:
    found = [hang for hang in hangs if hang is not None]
    if not found:
        return None
    return Hang(
        boards={rank: board for hang in found for rank, board in hang.boards.items()},
        stacks={rank: text for hang in found for rank, text in hang.stacks.items()},
        states={rank: state for hang in found for rank, state in hang.states.items()},
        pids={rank: pid for hang in found for rank, pid in hang.pids.items()},
        after_s=max(hang.after_s for hang in found),
    )


def stands_still(nodes: Iterable[int], said: Mapping[int, tuple[bool, bool]]) -> bool:
    """Tell whether the job hangs: every node of ``nodes`` stands still, and one has a rank inside a collective."""
    states = [said.get(node, (False, False)) for node in nodes]
    return bool(states) and all(still for still, _ in states) and any(inside for _, inside in states)


def again(job: Job, verdict: Verdict | None, number: int, *, stopped: bool = False) -> bool:
    """Tell whether the job is to be started again after the start ``number`` ended with ``verdict``."""
    if verdict is None or stopped or verdict.cause == "stopped" or number >= job.max_restarts:
        return False
    # Running out of memory is a signal too.
    causes = {verdict.cause, "any"} | ({"signal"} if verdict.cause == "oom" else set())
    return bool(causes & job.restart_if)


class Urging(msgspec.Struct):
    """Who asked for the end of the job how often. The same signal at several nodes is one; twice at one node is two."""

    asked: dict[str, int]
    urged: int = 0

    def more(self, by: str, times: int) -> int:
        """Take note; return how many more times the workers are to be told."""
        self.asked[by] = max(times, self.asked.get(by, 0))
        before, self.urged = self.urged, max(self.asked.values())
        return self.urged - before


def ranks_of(layout: Sequence[int], node: int) -> tuple[int, ...]:
    """Return the ranks of ``node`` where each node has as many as ``layout`` says."""
    first = sum(layout[:node])
    return tuple(range(first, first + layout[node])) if layout else ()

"""What differs in a group on several hosts: its engine compares calls by records, which carry shapes and sites.

`processgroup.WideGroup` is this and the collectives of `processgroup.Group`.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from ..diagnosis import Diagnosis
from ..engines.base import CallMismatch
from ..errors import AllhandsError
from . import failure
from .hostgroup import HostGroup, Via

__all__ = ["Wide"]


# As much of a refusal as the others are told.
_MOST_WORDS = 120

# More shapes than this tell a reader no more.
_MOST_SHAPES = 3


class Wide(HostGroup):
    """How one call of a group on several hosts is done, and what its failures mean."""

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for everyone and name who does not come: all of them, whatever ``wait_all_ranks`` says."""
        del wait_all_ranks
        limit_ns = self._limit_ns if timeout is None else int(timeout.total_seconds() * 1e9)

        def run(_: int) -> None:
            self.engine.barrier(limit_ns)

        self._do("monitored_barrier", run, [], None).wait()

    def abort(self) -> None:
        """End the group for everyone, now. It is the end of the job's default group too."""
        who = f"rank {self.session.member.rank} ({socket.gethostname()}, pid {os.getpid()})"
        self.session.member.end_group(
            Diagnosis(
                "peer-lost",
                f"rank {self.session.member.rank} ended the group",
                who=who,
                why="it called abort()",
                fix="look at the end of its output for the reason",
                ranks=(self.session.member.rank,),
                hosts=(socket.gethostname(),),
            )
        )

    def window(self, name: str, size: int) -> None:
        """Hosts share no memory."""
        del name, size

    # Inside ------------------------------------------------------------------------------------------------

    def _do(
        self,
        name: str,
        run: Callable[[int], None],
        tensors: list[torch.Tensor],
        opts: Any,
        via: Via | None = None,
    ) -> Any:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors[:_MOST_SHAPES])
        shapes += f" and {len(tensors) - _MOST_SHAPES} more" * (len(tensors) > _MOST_SHAPES)
        told = functools.partial(self._told, name, shapes, run)
        return super()._do(name, told, tensors, opts, via)

    def _noted(self, name: str, site: str, number: int, run: Callable[[int], None], within_ns: int) -> None:
        self.engine.site = site
        super()._noted(name, site, number, run, within_ns)

    # What ended a call in the middle, with the frames that hold its tensors: Gloo may still write there.
    _kept: BaseException | None = None

    def _told(self, name: str, shapes: str, run: Callable[[int], None], timeout_ns: int) -> None:
        """Do ``run`` in its turn, telling the others what it is; raise what its failure means."""
        self.session.member.check()
        self.engine.shape, site = shapes, self.engine.site
        try:
            self._together(name, run, timeout_ns)
        except CallMismatch as mismatch:
            raise failure.of_group(self, mismatch, name, site) from None
        except Exception as problem:
            if not self.engine.in_call:
                raise  # All ranks refused alike and are still in step.
            self._kept = problem
            explained = failure.explain(self.session, problem, name, site, self)
            if explained is None:
                failure.announce(self.session, problem)
                raise
            raise explained from (problem if explained.slug == "engine-failed" else None)
        except BaseException as problem:
            # A signal's handler raised in the middle.
            self._kept = problem
            failure.announce(self.session, problem)
            raise

    def _together(self, name: str, run: Callable[[int], None], timeout_ns: int) -> None:
        """Do ``run``. Where it cannot even begin here, the others are told, who would wait otherwise."""
        try:
            run(timeout_ns)
        except Exception as problem:
            if not self.engine.in_call:
                words = problem.diagnosis.what if isinstance(problem, AllhandsError) else str(problem)
                self.engine.refuse(
                    name, (words.splitlines() or [type(problem).__name__])[0][:_MOST_WORDS], self._limit_ns
                )
            raise

"""Collectives over MPI, done by the C core's `Ferry`: what everyone calls goes ahead of the data.

What the operations do is in `csrc/mpi/voyage.c`; here a call gets its words,
and what became of it is raised. Calls of the fast path come by here only where they fail.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ... import _core
from ...diagnosis.majority import Judgement
from .. import fingerprint
from ..base import CallMismatch, EngineAborted, EngineTimeout, TransportFailure
from ..dtypes import operation_code
from ..gloo.engine import GlooEngine
from .world import World

__all__ = ["Mpi"]

# The flag of a record that says that its rank cannot make its call, in csrc/record.h.
_REFUSED = 2

# How often to look before giving the core away where every rank has one, some 0.1 us each: a rank that is on its way
# comes within this, and giving the core away would let another process have it. Looking is a disaster where it keeps
# the awaited rank off its core.
_SPINS = 2000

# How often to look each time before giving the core away: MPI moves a piece each time it is asked.
_BURST = 4

_Places = tuple[int, ...]

# A forked child has its parent's ferries and must not be taken for it: the short way is shut there.
_LIVE: weakref.WeakSet[Mpi] = weakref.WeakSet()


def _shut_in_child() -> None:
    for each in _LIVE:
        each.ferry.fast_path_closed = 1


os.register_at_fork(after_in_child=_shut_in_child)


class Mpi(GlooEngine):
    """One rank's end of a group. One call at a time; addresses and sizes must be right.

    Each operation returns 0, or raises: `Difference`, or RuntimeError. The ranks may be out of step then: `under_way`
    stays, no further call is taken, and the group must end.
    """

    def __init__(self, world: World, comm: Any, gloo: Any, rank: int, ranks: Sequence[int], wall: int) -> None:  # noqa: PLR0917  # all that makes a group
        """``wall`` is a descriptor from `wall.fetch`, which stays the caller's; -1 where MPI carries the records."""
        handles = (world.handle(comm), world.handle(world.module.BYTE))
        spins = _SPINS if len(os.sched_getaffinity(0)) >= len(ranks) else 0
        self.fast_path = self.ferry = _core.Ferry(world.lock, *handles, rank, len(ranks), spins, _BURST, wall)
        super().__init__(gloo, rank, ranks)
        self.world = world
        self.comm = comm
        _LIVE.add(self)

    @property
    def in_call(self) -> bool:
        """Whether a call has begun and not come to a good end."""
        return bool(self.ferry.under_way)

    @in_call.setter
    def in_call(self, value: bool) -> None:
        self.ferry.under_way = int(value)

    def sequence(self) -> int:
        """Return the number of the last call."""
        return self.ferry.sequence()

    # The operations of the core ----------------------------------------------------------------------------

    def barrier(self, limit_ns: int) -> None:
        """Wait for everyone."""
        self._do(self.ferry.barrier, limit_ns)

    def compare_only(self, kind: int, reduction: int, dtype: int, nbytes: int, root: int, limit_ns: int) -> None:  # noqa: PLR0917  # the core's signature
        """Compare a call that the caller then lets Gloo do by `through`, and ends by `done`."""
        self._do(self.ferry.agree, kind, reduction, dtype, nbytes, root, 0, limit_ns)
        self.in_call = True

    def refuse(self, name: str, why: str, limit_ns: int) -> None:
        """Tell the others that this rank cannot make its call; raise Difference unless no rank can."""
        self._do(self.ferry.agree, operation_code(name), 0, 0, 0, -1, _REFUSED, limit_ns, refused=why)

    def all_reduce(self, address: int, size: int, dtype: int, reduction: int, limit_ns: int) -> None:
        """Reduce to everyone."""
        self._do(self.ferry.all_reduce, address, size, dtype, reduction, limit_ns)

    def reduce(self, address: int, size: int, dtype: int, reduction: int, root: int, limit_ns: int) -> None:  # noqa: PLR0917  # the core's signature
        """Reduce to the root; the data of the others stays as it is."""
        self._do(self.ferry.reduce, address, size, dtype, reduction, root, limit_ns)

    def broadcast(self, address: int, size: int, dtype: int, root: int, limit_ns: int) -> None:
        """Give the root's data to everyone."""
        self._do(self.ferry.broadcast, address, size, dtype, root, limit_ns)

    def all_gather(self, address: int, size: int, out: _Places, dtype: int, limit_ns: int) -> None:
        """Give everyone's data to everyone."""
        self._do(self.ferry.all_gather, address, size, out, dtype, limit_ns)

    def gather(self, address: int, size: int, out: _Places | None, dtype: int, root: int, limit_ns: int) -> None:  # noqa: PLR0917  # the core's signature
        """Give everyone's data to the root."""
        self._do(self.ferry.gather, address, size, out or None, dtype, root, limit_ns)

    def scatter(self, given: _Places | None, address: int, size: int, dtype: int, root: int, limit_ns: int) -> None:  # noqa: PLR0917  # the core's signature
        """Give each rank its part of the root's data."""
        self._do(self.ferry.scatter, given or None, address, size, dtype, root, limit_ns)

    def reduce_scatter(  # noqa: PLR0917  # the core's signature
        self, given: _Places, address: int, size: int, dtype: int, reduction: int, limit_ns: int
    ) -> None:
        """Reduce each part of everyone's data to the rank it is for."""
        self._do(self.ferry.reduce_scatter, given, address, size, dtype, reduction, limit_ns)

    def all_to_all(self, given: _Places, out: _Places, dtype: int, limit_ns: int) -> None:
        """Give each rank its part of everyone's data."""
        self._do(self.ferry.all_to_all, given, out, dtype, limit_ns)

    # Inside ------------------------------------------------------------------------------------------------

    def _do(self, function: Callable[..., int], *args: Any, refused: str = "") -> None:
        if self.ferry.under_way:
            raise EngineAborted("an earlier call of this group failed")
        self.ferry.say(self.shape, self.site, refused)
        try:
            code = function(*args)
        finally:
            self.world.spoilt |= bool(self.ferry.left)
        self.judge(code)

    def judge(self, code: int) -> None:
        """Raise what became of a call that ended with ``code``."""
        self.world.spoilt |= bool(self.ferry.left)
        if code == 0:
            return
        if code == 4:
            raise CallMismatch(self._difference())
        if code == 1:
            raise EngineTimeout("timed out waiting for the other ranks")
        if code == 3:
            raise EngineAborted("the group ended in the middle of this call")
        said = self.ferry.problem()
        raise TransportFailure(
            f"MPI says {said}" if said else "an earlier call of this group failed, or there was no memory for this one"
        )

    def _difference(self) -> Judgement:
        calls = [fingerprint.unpack(record) for record in self.ferry.records()]
        judgement = fingerprint.judge(calls, self._numbers)
        if judgement is None:
            numbers, width = self.ferry.tables(), 2 * self._size
            rows = [numbers[at : at + width] for at in range(0, len(numbers), width)]
            judgement = fingerprint.judge_sizes(
                [row[: self._size] for row in rows], [row[self._size :] for row in rows], calls, self._numbers
            )
        return judgement or Judgement((), ())

    def abort(self, rank: int) -> None:
        """The group is over, because of ``rank`` or not: whoever waits stops."""
        super().abort(rank)
        self.ferry.end()

    def close(self, within_s: float) -> None:
        """Let go of what MPI has for this group, where nothing was left in the middle. Does not wait for the others."""
        del within_s
        if self.ferry.under_way or self.ferry.left:
            self.world.spoilt = True
            return
        self.ferry.close()

"""Collectives over MPI, done by the C core's `Ferry`: what everyone calls goes ahead of the data.

An `Mpi` has the methods of the C core's Segment, as a `Relay` has. What they do is in `csrc/voyage.c`; here a call gets
its words, and what became of it is raised. Calls of the short way (`csrc/quick.c`) come by here only where they fail.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ... import _core
from ...diagnosis.majority import Judgement
from .. import fingerprint
from ..gloo.engine import Difference, Relay
from ..shm import engine as shm
from .world import World

__all__ = ["Mpi"]

_KINDS = {name: kind for kind, name in enumerate(shm.KINDS)}

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
        each.ferry.shut = 1


os.register_at_fork(after_in_child=_shut_in_child)


class Mpi(Relay):
    """One rank's end of a group. One call at a time; addresses and sizes must be right.

    Each operation returns 0, or raises: `Difference`, or RuntimeError. The ranks may be out of step then: `under_way`
    stays, no further call is taken, and the group must end.
    """

    def __init__(self, world: World, comm: Any, gloo: Any, rank: int, ranks: Sequence[int], wall: int) -> None:  # noqa: PLR0917  # all that makes a group
        """``wall`` is a descriptor from `wall.fetch`, which stays the caller's; -1 where MPI carries the records."""
        handles = (world.handle(comm), world.handle(world.module.BYTE))
        spins = _SPINS if len(os.sched_getaffinity(0)) >= len(ranks) else 0
        self.gate = self.ferry = _core.Ferry(world.lock, *handles, rank, len(ranks), spins, _BURST, wall)
        super().__init__(gloo, rank, ranks)
        self.world = world
        self.comm = comm
        _LIVE.add(self)

    @property
    def under_way(self) -> bool:
        """Whether a call has begun and not come to a good end."""
        return bool(self.ferry.under_way)

    @under_way.setter
    def under_way(self, value: bool) -> None:
        self.ferry.under_way = int(value)

    def sequence(self) -> int:
        """Return the number of the last call."""
        return self.ferry.sequence()

    # The operations of the core ----------------------------------------------------------------------------

    def barrier(self, limit_ns: int) -> int:
        """Wait for everyone."""
        return self._do(self.ferry.barrier, limit_ns)

    def agree(self, kind: int, reduction: int, dtype: int, nbytes: int, root: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Compare a call that the caller then lets Gloo do by `through`, and ends by `done`."""
        self._do(self.ferry.agree, kind, reduction, dtype, nbytes, root, 0, limit_ns)
        self.under_way = True
        return 0

    def refuse(self, name: str, why: str, limit_ns: int) -> None:
        """Tell the others that this rank cannot make its call; raise Difference unless no rank can."""
        self._do(self.ferry.agree, _KINDS.get(name, 0), 0, 0, 0, -1, _REFUSED, limit_ns, refused=why)

    def all_reduce(self, address: int, size: int, dtype: int, reduction: int, limit_ns: int) -> int:
        """Reduce to everyone."""
        return self._do(self.ferry.all_reduce, address, size, dtype, reduction, limit_ns)

    def reduce(self, address: int, size: int, dtype: int, reduction: int, root: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Reduce to the root; the data of the others stays as it is."""
        return self._do(self.ferry.reduce, address, size, dtype, reduction, root, limit_ns)

    def broadcast(self, address: int, size: int, dtype: int, root: int, limit_ns: int) -> int:
        """Give the root's data to everyone."""
        return self._do(self.ferry.broadcast, address, size, dtype, root, limit_ns)

    def all_gather(self, address: int, size: int, out: _Places, dtype: int, limit_ns: int) -> int:
        """Give everyone's data to everyone."""
        return self._do(self.ferry.all_gather, address, size, out, dtype, limit_ns)

    def gather(self, address: int, size: int, out: _Places | None, dtype: int, root: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Give everyone's data to the root."""
        return self._do(self.ferry.gather, address, size, out or None, dtype, root, limit_ns)

    def scatter(self, given: _Places | None, address: int, size: int, dtype: int, root: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Give each rank its part of the root's data."""
        return self._do(self.ferry.scatter, given or None, address, size, dtype, root, limit_ns)

    def reduce_scatter(self, given: _Places, address: int, size: int, dtype: int, reduction: int, limit_ns: int) -> int:  # noqa: PLR0917  # the core's signature
        """Reduce each part of everyone's data to the rank it is for."""
        return self._do(self.ferry.reduce_scatter, given, address, size, dtype, reduction, limit_ns)

    def all_to_all(self, given: _Places, out: _Places, dtype: int, limit_ns: int) -> int:
        """Give each rank its part of everyone's data."""
        return self._do(self.ferry.all_to_all, given, out, dtype, limit_ns)

    # Inside ------------------------------------------------------------------------------------------------

    def _do(self, function: Callable[..., int], *args: Any, refused: str = "") -> int:
        if self.ferry.under_way:
            raise RuntimeError("connection closed: an earlier call of this group failed")
        self.ferry.say(self.shape, self.site, refused)
        try:
            code = function(*args)
        finally:
            self.world.spoilt |= bool(self.ferry.left)
        self.judge(code)
        return 0

    def judge(self, code: int) -> None:
        """Raise what became of a call that ended with ``code``."""
        self.world.spoilt |= bool(self.ferry.left)
        how = shm.CODES[code]
        if how == "ok":
            return
        if how == "mismatch":
            raise Difference(self._difference())
        if how == "timeout":
            raise RuntimeError("Timed out waiting for the other ranks")
        if how == "aborted":
            raise RuntimeError("connection closed: the group ended in the middle of this call")
        said = self.ferry.problem()
        raise RuntimeError(
            f"connection closed: MPI says {said}"
            if said
            else "connection closed: an earlier call of this group failed, or there was no memory for this one"
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

    def end(self, rank: int) -> None:
        """The group is over, because of ``rank`` or not: whoever waits stops."""
        super().end(rank)
        self.ferry.end()

    def leave(self) -> None:
        """Let go of what MPI has for this group, where nothing was left in the middle. Does not wait for the others."""
        if self.ferry.under_way or self.ferry.left:
            self.world.spoilt = True
            return
        self.ferry.close()

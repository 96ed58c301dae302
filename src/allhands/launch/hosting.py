"""The coordinator in the agent's own process: one after the other, a fresh one for each group of an attempt."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os

from ..control import Coordinator
from ..control.holder import holder
from ..diagnosis import Diagnosis
from ..errors import AllhandsError, fail
from ..world import Address

__all__ = ["Hosting"]

# Nobody needs to be told of a refusal after its ranks are dead; the next group of the same ranks wants the place.
_LINGER_S = 1.0


class Hosting:
    """Keeps a coordinator at one place, and what the coordinators there found."""

    def __init__(self, name: str, token: bytes, address: Address | None = None) -> None:
        self.findings: list[Diagnosis] = []
        self._name, self._token, self._address = name, token, address
        self._coordinator: Coordinator | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen, and go on with a fresh coordinator whenever a group is over; raise why it cannot."""
        try:
            self._coordinator = await self._open()
        except OSError as problem:
            raise self._trouble(problem) from problem
        self._task = asyncio.create_task(self._renew())

    async def close(self) -> None:
        """End it; what it found stays in `findings`."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._coordinator is not None:
            self._note(self._coordinator)
            await self._coordinator.close()
            self._coordinator = None

    async def _open(self) -> Coordinator:
        coordinator = Coordinator(token=self._token, linger_s=_LINGER_S)
        coordinator.roll.listening = "the launcher's coordinator"
        await coordinator.listen_unix(self._name)
        if self._address is not None:
            await coordinator.listen_tcp(self._address.host, self._address.port)
            coordinator.roll.listening = str(self._address)
        coordinator.start()
        return coordinator

    async def _renew(self) -> None:
        while self._coordinator is not None:
            await self._coordinator.finished.wait()
            self._note(self._coordinator)
            old, self._coordinator = self._coordinator, None
            await old.close()
            self._coordinator = await self._open()

    def _trouble(self, problem: OSError) -> AllhandsError:
        taken = problem.errno == errno.EADDRINUSE
        held = holder(self._address.port) if taken and self._address is not None else None
        return fail(
            "port-in-use" if taken else "address-not-local",
            f"the launcher cannot listen on {self._address}: {problem.strerror or problem}",
            who=f"the launcher of node 0 (pid {os.getpid()})",
            why=f"it is held by {held}" if held else "the system refused the address (observed)",
            fix="give another port" if taken else "give an address of this machine: node 0 must run where it is",
        )

    def _note(self, coordinator: Coordinator) -> None:
        found = coordinator.verdict or coordinator.refused
        if found is not None:
            self.findings.append(found)

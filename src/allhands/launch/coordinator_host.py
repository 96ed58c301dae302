"""The coordinator in the agent's own process: one after the other, a fresh one for each group of an attempt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from ..control.coordinator import Coordinator
from ..diagnosis import Diagnosis

__all__ = ["Hosting"]

# Nobody needs to be told of a refusal after its ranks are dead; the next group of the same ranks wants the place.
_LINGER_S = 1.0


class Hosting:
    """Keeps a coordinator at one place, and what the coordinators there found."""

    def __init__(self, name: str, token: bytes, opened: Callable[[], None] = lambda: None) -> None:
        """``opened`` is called whenever there is a fresh coordinator."""
        self.findings: list[Diagnosis] = []
        self._name, self._token, self._opened = name, token, opened
        self._coordinator: Coordinator | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen, and go on with a fresh coordinator whenever a group is over."""
        self._coordinator = await self._open()
        self._opened()
        self._task = asyncio.create_task(self._renew())

    @property
    def coordinator(self) -> Coordinator | None:
        """The one that serves now; None while a fresh one is being made."""
        return self._coordinator

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
        coordinator.start()
        return coordinator

    async def _renew(self) -> None:
        while self._coordinator is not None:
            await self._coordinator.finished.wait()
            self._note(self._coordinator)
            old, self._coordinator = self._coordinator, None
            await old.close()
            self._coordinator = await self._open()
            self._opened()

    def _note(self, coordinator: Coordinator) -> None:
        found = coordinator.verdict or coordinator.refused
        if found is not None:
            self.findings.append(found)

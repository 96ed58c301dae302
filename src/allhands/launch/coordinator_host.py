"""The coordinator in the agent's process, or in a thread of the parent of `allhands.spawn`."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import wait

from ..control.coordinator import Coordinator
from ..diagnosis import Diagnosis

__all__ = ["CoordinatorHost", "CoordinatorThread"]

# How long a coordinator repeats a refusal to late ranks. Short: the next group of the same ranks needs the address.
_LINGER_S = 1.0


class CoordinatorHost:
    """Serves one coordinator after the other at one Unix socket: a new one for each group of an attempt."""

    def __init__(self, socket_name: str, token: bytes, on_open: Callable[[], None] = lambda: None) -> None:
        """``on_open`` is called whenever there is a new coordinator."""
        self.findings: list[Diagnosis] = []
        # None while a new one is being opened.
        self.coordinator: Coordinator | None = None
        self._socket_name, self._token, self._on_open = socket_name, token, on_open
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen, and open a new coordinator whenever a group is over."""
        await self._open()
        self._task = asyncio.create_task(self._renew())

    async def close(self) -> None:
        """Close the coordinator; `findings` is complete afterwards."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._close_coordinator()

    async def _open(self) -> None:
        coordinator = Coordinator(token=self._token, linger_s=_LINGER_S)
        coordinator.roll.listening = "the launcher's coordinator"
        await coordinator.listen_unix(self._socket_name)
        coordinator.start()
        self.coordinator = coordinator
        self._on_open()

    async def _close_coordinator(self) -> None:
        old, self.coordinator = self.coordinator, None
        if old is not None:
            found = old.verdict or old.refused
            if found is not None:
                self.findings.append(found)
            await old.close()

    async def _renew(self) -> None:
        while self.coordinator is not None:
            await self.coordinator.finished.wait()
            await self._close_coordinator()
            await self._open()


class CoordinatorThread:
    """A `CoordinatorHost` in a thread, from `__init__` to `close`. Create it after every fork."""

    def __init__(self, socket_name: str, token: str) -> None:
        self._host = CoordinatorHost(socket_name, token.encode())
        self._loop = asyncio.new_event_loop()
        # A daemon, because the interpreter joins other threads before ranks that the program did not join.
        self._thread = threading.Thread(target=self._loop.run_forever, name="allhands-coordinator", daemon=True)
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(self._host.start(), self._loop)
        try:
            started.result()
        except BaseException:
            # It failed; or Ctrl-C, after which the caller will have no object to close.
            wait([started])
            self.close()
            raise

    def close(self) -> list[Diagnosis]:
        """End it; return what it found."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._host.close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        return self._host.findings

"""The coordinator in a thread of a process that has other things to do: the parent of `allhands.spawn`."""

from __future__ import annotations

import asyncio
import threading

from ...diagnosis import Diagnosis

__all__ = ["Backstage"]


class Backstage:
    """A `Hosting` in a thread of its own, from `__init__` to `close`. Start it after everything that forks."""

    def __init__(self, name: str, token: str) -> None:
        self._name, self._token = name, token
        self._findings: list[Diagnosis] = []
        self._problem: BaseException | None = None
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        # A daemon: children that nobody joined are waited for at exit, when other threads have been waited for already.
        self._thread = threading.Thread(target=self._run, name="allhands-coordinator", daemon=True)
        self._thread.start()
        try:
            self._ready.wait()
        except BaseException:
            # Ctrl-C: nobody will have it to close.
            self._ready.wait()
            self.close()
            raise
        if self._problem is not None:
            raise self._problem

    def close(self) -> list[Diagnosis]:
        """End it; return what it found."""
        if self._loop is not None and self._over is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()
        return self._findings

    def _run(self) -> None:
        try:
            asyncio.run(self._host())
        except BaseException as problem:  # noqa: BLE001  # raised where it was asked for
            self._problem = problem
        finally:
            self._ready.set()

    async def _host(self) -> None:
        # Here, so that the children's interpreters start meanwhile: the control plane takes a while to import.
        from ..coordinator_host import Hosting

        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        hosting = Hosting(self._name, self._token.encode())
        await hosting.start()
        self._ready.set()
        try:
            await self._over.wait()
        finally:
            await hosting.close()
            self._findings = hosting.findings

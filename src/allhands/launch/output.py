"""The workers' output: pipes into whole lines, lines onto the screen and into log files, with back-pressure."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from pathlib import Path

from ..errors import fail
from .fold import Fold, ranges
from .job import Job
from .lines import Lines, label, prefixed
from .screen import Screen
from .starting import open_pipe

__all__ = ["Output", "Pipe"]

_READ = 1 << 18

# How often lines that are held back, redrawn or unfinished are looked at.
_LOOK_S = 0.1

# A progress bar is shown as often as this; what it was in between would have been overwritten anyway.
_REDRAW_S = 1.0

# An unfinished line that is not continued within this is a question, and is shown on a terminal.
_QUESTION_S = 0.3

_STREAMS = ("stdout", "stderr")


class Pipe:
    """One stream of one worker, from its pipe to where it goes."""

    def __init__(self, output: Output, reader: int, rank: int, stream: int, *, shown: bool, log: int | None) -> None:
        self.reader = reader
        self.rank, self.stream, self.shown, self.log = rank, stream, shown, log
        self.lines = Lines()
        self.prefix = output.label([rank], stream)
        self.heard_s = self.drawn_s = 0.0
        self.drawn = b""
        self._output = output

    def read(self) -> None:
        """Take what is there. Called by the event loop."""
        try:
            data = os.read(self.reader, _READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._output.take(self, data)
        else:
            self._output.ended(self)


class Output:
    """All streams of all workers of this node. Lives as long as the agent; pipes come and go with attempts."""

    def __init__(self, job: Job, on_broken: asyncio.Event) -> None:
        # Which ranks are here; others may be here after a restart on several nodes.
        self.job = job
        self._loop = asyncio.get_running_loop()
        self._broken = on_broken
        self._screen = Screen(resume=self._resume_soon, broken=self._broke)
        self._pipes: set[Pipe] = set()
        self._closed = asyncio.Event()
        self._paused: set[Pipe] = set()
        self._folds = {stream: Fold(job.local_world_size) for stream in (1, 2)} if job.fold else {}
        self._terminal = {stream: os.isatty(stream) for stream in (1, 2)}
        self._coloured = {stream: self._terminal[stream] and not os.environ.get("NO_COLOR") for stream in (1, 2)}
        # Whose unfinished line stands at the end of the terminal.
        self._open: Pipe | None = None
        self._looking: asyncio.TimerHandle | None = None
        self.folder: Path | None = None
        self._logs: dict[int, Path] = {}

    def label(self, ranks: list[int], stream: int) -> bytes:
        """Return what stands before lines of ``ranks``."""
        if not self.job.prefix:
            return b""
        return label(ranges(ranks), ranks[0] if self._coloured[stream] else None)

    # Streams come and go -----------------------------------------------------------------------------------

    def open(self, local_rank: int, attempt: int) -> tuple[int, int]:
        """Return what a worker is to have as stdout and stderr, to be closed by the caller."""
        streams = self.job.streams_of(local_rank)
        found = []
        for stream, bit in ((1, 1), (2, 2)):
            log = self._log(attempt, local_rank, stream) if (streams.redirected | streams.teed) & bit else None
            if streams.redirected & bit and not streams.teed & bit and log is not None:
                del self._logs[log]
                found.append(log)
                continue
            reader, writer = open_pipe()
            self.adopt(local_rank, stream, reader, log)
            found.append(writer)
        return found[0], found[1]

    def adopt(self, local_rank: int, stream: int, reader: int, log: int | None = None) -> None:
        """Read a stream of a worker from its pipe, until its end."""
        shown = self.job.shown is None or local_rank in self.job.shown
        made = Pipe(self, reader, self.job.rank(local_rank), stream, shown=shown, log=log)
        self._pipes.add(made)
        self._loop.add_reader(reader, made.read)
        if self._looking is None:
            self._looking = self._loop.call_later(_LOOK_S, self._look)

    def _log(self, attempt: int, local_rank: int, stream: int) -> int | None:
        """Open torchrun's file for it: DIR/NAME_random/attempt_0/RANK/stdout.log."""
        if self.folder is None:
            base = self.job.log_dir or None
            try:
                if base is not None:
                    Path(base).mkdir(parents=True, exist_ok=True)
                self.folder = Path(tempfile.mkdtemp(prefix=f"{self.job.name}_", dir=base))
            except OSError as problem:
                raise fail(
                    "invalid-argument",
                    f"the folder for logs, {base or tempfile.gettempdir()}, cannot be written",
                    who=f"the launcher (pid {os.getpid()})",
                    why=problem.strerror or str(problem),
                    fix="give another folder as --log-dir",
                ) from problem
            if base is None:
                self.say(f"the ranks' logs are in {self.folder}")
        path = self.folder / f"attempt_{attempt}" / str(local_rank) / f"{_STREAMS[stream - 1]}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._logs[log] = path
        return log

    def ended(self, pipe: Pipe) -> None:
        """A stream is over: show what is left of it."""
        self._loop.remove_reader(pipe.reader)
        os.close(pipe.reader)
        self._pipes.discard(pipe)
        self._paused.discard(pipe)
        self._closed.set()
        self._show(pipe, pipe.lines.rest())

    async def drained(self, within_s: float) -> None:
        """Wait until every pipe is closed and read, at most ``within_s``; then read no more."""
        deadline = time.monotonic() + within_s
        while self._pipes and (time.monotonic() < deadline or self._screen.full):
            self._closed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), _LOOK_S)
        for pipe in list(self._pipes):
            self.ended(pipe)
        self._flush(all_of_it=True)

    def close(self) -> None:
        """Write everything that is left; as long as that takes, unless nobody reads any more."""
        if self._looking is not None:
            self._looking.cancel()
        self._flush(all_of_it=True)
        if self._open is not None:
            self._screen.put(1, b"\n")
        self._screen.close()
        for log in self._logs:
            os.close(log)
        self._logs.clear()

    # Lines -------------------------------------------------------------------------------------------------

    def take(self, pipe: Pipe, data: bytes) -> None:
        """Pass on what a stream said."""
        pipe.heard_s = time.monotonic()
        if pipe.log is not None:
            self._screen.put(pipe.log, data)
        if pipe.shown:
            self._show(pipe, pipe.lines.feed(data))
        if self._screen.full:
            self._pause()

    def _show(self, pipe: Pipe, whole: bytes) -> None:
        if not whole:
            return
        # A progress bar ends with the state that was shown last.
        whole, pipe.drawn = whole.removeprefix(pipe.drawn), b""
        if not whole:
            return
        fold = self._folds.get(pipe.stream)
        if fold is not None:
            fold.add(pipe.rank, whole, time.monotonic())
            self._flush()
        elif self._open is pipe:
            # The beginning of the first line stands there already.
            first, newline, others = whole.partition(b"\n")
            self._open = None
            self._screen.put(pipe.stream, first + newline + prefixed(pipe.prefix, others))
        else:
            self._put(pipe.stream, prefixed(pipe.prefix, whole))

    def _put(self, stream: int, data: bytes) -> None:
        if self._open is not None:
            data, self._open = b"\n" + data, None
        self._screen.put(stream, data)

    def _flush(self, *, all_of_it: bool = False) -> None:
        for stream, fold in self._folds.items():
            due = fold.due(time.monotonic(), all_of_it=all_of_it)
            if due:
                self._put(stream, b"".join([prefixed(self.label(ranks, stream), line) for line, ranks in due]))

    def say(self, text: str, stream: int = 2) -> None:
        """Say something of the launcher's own, on lines of their own."""
        self._put(stream, f"allhands: {text}\n".encode())

    def write(self, text: str) -> None:
        """Write the launcher's last words, as they are, to standard error."""
        self._put(2, text.encode(errors="replace"))

    # What waits --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        self._looking = self._loop.call_later(_LOOK_S, self._look)
        self._flush()
        for pipe in self._pipes:
            if not pipe.lines.partial:
                continue
            drawn = pipe.lines.redrawn()
            if drawn and drawn != pipe.drawn and now - pipe.drawn_s >= _REDRAW_S:
                pipe.drawn, pipe.drawn_s = drawn, now
                self._put(pipe.stream, prefixed(pipe.prefix, drawn))
            elif not drawn and self._terminal[pipe.stream] and not self._folds and now - pipe.heard_s >= _QUESTION_S:
                self._ask(pipe)

    def _ask(self, pipe: Pipe) -> None:
        """Show an unfinished line; whoever speaks next begins on a new one."""
        text = pipe.lines.take()
        if self._open is pipe:
            self._screen.put(pipe.stream, text)
        else:
            self._put(pipe.stream, pipe.prefix + text)
            self._open = pipe

    def _pause(self) -> None:
        for pipe in self._pipes - self._paused:
            self._loop.remove_reader(pipe.reader)
            self._paused.add(pipe)

    def _resume_soon(self) -> None:
        self._loop.call_soon_threadsafe(self._resume)

    def _resume(self) -> None:
        for pipe in self._paused:
            self._loop.add_reader(pipe.reader, pipe.read)
        self._paused.clear()

    def _broke(self, descriptor: int, problem: OSError) -> None:
        """In the screen's thread: nobody reads any more, or a disk is full."""
        if descriptor in {1, 2}:
            self._loop.call_soon_threadsafe(self._broken.set)
        else:
            path = self._logs.get(descriptor)
            words = f"the log {path} takes no more: {problem.strerror or problem}"
            self._loop.call_soon_threadsafe(self.say, words)

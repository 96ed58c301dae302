"""The workers' output: from pipes to whole lines, from lines to the terminal and log files, with back-pressure."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import selectors
import tempfile
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import fail
from .options import Job
from .start import PIPE_BYTES, open_pipe
from .verdict import rank_ranges

__all__ = ["FOLD_WINDOW_S", "MOST_LINE_BYTES", "Fold", "LineBuffer", "Output", "label", "prefixed"]

_READ_BYTES = 1 << 18

# How often folded, redrawn and unfinished lines are checked.
_TICK_S = 0.1

# A progress bar is printed at most this often; a terminal would have overwritten the states in between.
_REDRAW_S = 1.0

# An unfinished line that is not continued within this time is a prompt, and is printed on a terminal.
_PROMPT_S = 0.3

# A line waits this long for the same line of other ranks: longer than ranks that do the same differ, and short enough
# for a person who watches.
FOLD_WINDOW_S = 0.3

# Beyond this many bytes no line waits, which bounds the memory for a flood of different lines. The second is the memory
# of a line besides its text.
_MOST_FOLD_BYTES, _FOLD_LINE_BYTES = 8 << 20, 420

# A longer line is printed in pieces of this size: binary output has no newlines, and must not fill the memory.
MOST_LINE_BYTES = 1 << 20

# ANSI colours that are readable on light and dark backgrounds, by rank.
_COLOURS = (36, 33, 32, 35, 34, 31)

# One write: large for throughput, small for a terminal that accepts about 1 MiB a second.
_WRITE_BYTES = 1 << 16

_STREAMS = ("stdout", "stderr")


@dataclass(eq=False, slots=True)
class _Pipe:
    """One stream of one worker."""

    reader: int
    rank: int
    stream: int
    prefix: bytes
    shown: bool
    log: int | None
    lines: LineBuffer
    received_s: float = 0.0
    redrawn_s: float = 0.0
    # The state of a progress bar that was printed last.
    redrawn: bytes = b""


class Output:
    """All streams of all workers of this node. Lives as long as the agent; each attempt has its own pipes.

    A thread reads the pipes and writes to the terminal and to log files. While a write blocks, no pipe is read, so that
    the workers are slowed down and the memory is bounded.
    """

    def __init__(self, job: Job, broken: asyncio.Event) -> None:
        """``broken`` is set once the agent's stdout or stderr has no reader any more."""
        # Replaced by the agent: this node's ranks may differ after a restart on several nodes.
        self.job = job
        self._loop = asyncio.get_running_loop()
        self._broken = broken
        self._log_dir: Path | None = None
        self._logs: dict[int, Path] = {}
        self._terminal = {stream: os.isatty(stream) for stream in (1, 2)}
        self._coloured = {stream: self._terminal[stream] and not os.environ.get("NO_COLOR") for stream in (1, 2)}
        # Pipes that were added and have not ended.
        self._open_pipes = 0
        self._all_ended = asyncio.Event()
        # Of the thread only, from here on. Functions that it calls next:
        self._calls: deque[Callable[[], object]] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._pipes: set[_Pipe] = set()
        self._folds = {stream: Fold(job.local_world_size) for stream in (1, 2)} if job.fold else {}
        # The pipe whose unfinished line ends the terminal's content.
        self._prompting: _Pipe | None = None
        self._failed: set[int] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="allhands-output", daemon=True)
        self._thread.start()

    # For the agent -----------------------------------------------------------------------------------------

    def open(self, local_rank: int, attempt: int) -> tuple[int, int]:
        """Return stdout and stderr for a worker; the caller closes them."""
        redirected, teed = self.job.streams[local_rank] if self.job.streams else (0, 0)
        found = []
        for stream, bit in ((1, 1), (2, 2)):
            log = self._open_log(attempt, local_rank, stream) if (redirected | teed) & bit else None
            if redirected & bit and not teed & bit and log is not None:
                del self._logs[log]
                found.append(log)
                continue
            reader, writer = open_pipe()
            self.add(local_rank, stream, reader, log)
            found.append(writer)
        return found[0], found[1]

    def add(self, local_rank: int, stream: int, reader: int, log: int | None = None) -> None:
        """Read a worker's stream from the pipe ``reader`` until its end."""
        rank = self.job.rank(local_rank)
        shown = self.job.shown is None or local_rank in self.job.shown
        pipe = _Pipe(reader, rank, stream, self._label([rank], stream), shown, log, LineBuffer())
        self._open_pipes += 1
        self._all_ended.clear()
        self._call(lambda: self._add(pipe))

    def message(self, text: str) -> None:
        """Print a line of the launcher's own on standard error."""
        self.write(f"allhands: {text}\n")

    def write(self, text: str) -> None:
        """Print ``text`` as it is on standard error."""
        self._call(lambda: self._print_block(2, text.encode(errors="replace")))

    async def drain(self, timeout_s: float) -> None:
        """Wait until every pipe has ended, at most ``timeout_s``; then read what the others hold, and close them."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_ended.wait(), timeout_s)
        self._call(self._end_pipes)

    def close(self) -> None:
        """Write everything that is left, however long that takes, unless it has no reader any more."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._selector.close()
        for descriptor in (self._wake, *self._logs):
            os.close(descriptor)

    def _call(self, function: Callable[[], object]) -> None:
        """Have the thread call ``function``, after those before."""
        self._calls.append(function)
        os.eventfd_write(self._wake, 1)

    def _label(self, ranks: list[int], stream: int) -> bytes:
        if not self.job.prefix:
            return b""
        return label(rank_ranges(ranks), ranks[0] if self._coloured[stream] else None)

    def _open_log(self, attempt: int, local_rank: int, stream: int) -> int:
        """Open torchrun's file: DIR/NAME_random/attempt_0/RANK/stdout.log."""
        if self._log_dir is None:
            base = self.job.log_dir or None
            try:
                if base is not None:
                    Path(base).mkdir(parents=True, exist_ok=True)
                self._log_dir = Path(tempfile.mkdtemp(prefix=f"{self.job.name}_", dir=base))
            except OSError as problem:
                raise fail(
                    "invalid-argument",
                    f"the folder for logs, {base or tempfile.gettempdir()}, cannot be written",
                    who=f"the launcher (pid {os.getpid()})",
                    why=problem.strerror or str(problem),
                    fix="give another folder as --log-dir",
                ) from problem
            if base is None:
                self.message(f"the ranks' logs are in {self._log_dir}")
        path = self._log_dir / f"attempt_{attempt}" / str(local_rank) / f"{_STREAMS[stream - 1]}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._logs[log] = path
        return log

    def _pipe_ended(self) -> None:
        self._open_pipes -= 1
        if not self._open_pipes:
            self._all_ended.set()

    # In the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        ticked_s = 0.0
        while self._calls or not self._closing:
            for key, _ in self._selector.select(_TICK_S):
                if key.data is None:
                    os.eventfd_read(self._wake)
                else:
                    self._read(key.data)
            while self._calls:
                self._calls.popleft()()
            now = time.monotonic()
            if now - ticked_s >= _TICK_S:
                ticked_s = now
                self._tick(now)
        self._flush_folds(everything=True)
        if self._prompting is not None:
            self._write(1, b"\n")

    def _add(self, pipe: _Pipe) -> None:
        self._pipes.add(pipe)
        self._selector.register(pipe.reader, selectors.EVENT_READ, pipe)

    def _read(self, pipe: _Pipe) -> bool:
        """Read, log and print what has arrived; return whether there may be more."""
        try:
            data = os.read(pipe.reader, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._end(pipe)
            return False
        pipe.received_s = time.monotonic()
        if pipe.log is not None:
            self._write(pipe.log, data)
        if pipe.shown:
            self._print(pipe, pipe.lines.feed(data))
        return True

    def _end(self, pipe: _Pipe) -> None:
        """Close a stream and print its last, unfinished line."""
        self._selector.unregister(pipe.reader)
        os.close(pipe.reader)
        self._pipes.discard(pipe)
        self._print(pipe, pipe.lines.rest())
        self._loop.call_soon_threadsafe(self._pipe_ended)

    def _end_pipes(self) -> None:
        for pipe in list(self._pipes):
            # Bounded, should a process that is not the job's keep writing.
            for _ in range(PIPE_BYTES // _READ_BYTES):
                if not self._read(pipe):
                    break
            if pipe in self._pipes:
                self._end(pipe)
        self._flush_folds(everything=True)

    def _print(self, pipe: _Pipe, whole: bytes) -> None:
        if not whole:
            return
        # A progress bar ends with the state that was printed last.
        whole, pipe.redrawn = whole.removeprefix(pipe.redrawn), b""
        if not whole:
            return
        fold = self._folds.get(pipe.stream)
        if fold is not None:
            fold.add(pipe.rank, whole, time.monotonic())
            self._flush_folds()
        elif self._prompting is pipe:
            # The beginning of the first line is on the terminal already.
            first, newline, others = whole.partition(b"\n")
            self._prompting = None
            self._write(pipe.stream, first + newline + prefixed(pipe.prefix, others))
        else:
            self._print_block(pipe.stream, prefixed(pipe.prefix, whole))

    def _print_block(self, stream: int, data: bytes) -> None:
        """Print whole lines, on a new line."""
        if self._prompting is not None:
            data, self._prompting = b"\n" + data, None
        self._write(stream, data)

    def _flush_folds(self, *, everything: bool = False) -> None:
        for stream, fold in self._folds.items():
            due = fold.due(time.monotonic(), everything=everything)
            if due:
                lines = [prefixed(self._label(ranks, stream), line) for line, ranks in due]
                self._print_block(stream, b"".join(lines))

    def _tick(self, now: float) -> None:
        """Print folded, redrawn and unfinished lines that are due."""
        self._flush_folds()
        for pipe in self._pipes:
            if not pipe.lines.partial:
                continue
            state = pipe.lines.redrawn()
            if state and state != pipe.redrawn and now - pipe.redrawn_s >= _REDRAW_S:
                pipe.redrawn, pipe.redrawn_s = state, now
                self._print_block(pipe.stream, prefixed(pipe.prefix, state))
            elif not state and self._terminal[pipe.stream] and not self._folds and now - pipe.received_s >= _PROMPT_S:
                self._print_prompt(pipe)

    def _print_prompt(self, pipe: _Pipe) -> None:
        """Print an unfinished line; output of another rank then begins on a new line."""
        text = pipe.lines.pop_partial()
        if self._prompting is pipe:
            self._write(pipe.stream, text)
        else:
            self._print_block(pipe.stream, pipe.prefix + text)
            self._prompting = pipe

    def _write(self, descriptor: int, data: bytes) -> None:
        view = memoryview(data)
        while view and descriptor not in self._failed:
            try:
                view = view[os.write(descriptor, view[:_WRITE_BYTES]) :]
            except BlockingIOError:
                # Another process made the terminal non-blocking.
                select.select([], [descriptor], [])
            except OSError as problem:
                # The reader is gone, or a disk is full.
                self._failed.add(descriptor)
                if descriptor in {1, 2}:
                    self._loop.call_soon_threadsafe(self._broken.set)
                else:
                    self.message(f"the log {self._logs[descriptor]} takes no more: {problem.strerror or problem}")


class LineBuffer:
    """Splits one stream into whole lines. Works on large pieces: there may be 100,000 lines a second. Pure."""

    def __init__(self) -> None:
        # The unfinished line.
        self.partial = b""
        self._redrawing = False

    def feed(self, data: bytes) -> bytes:
        """Return the lines that are complete now, each with its newline; b"" for none."""
        cut = data.rfind(b"\n") + 1
        whole, left = (self.partial + data[:cut], data[cut:]) if cut else (b"", self.partial + data)
        self._redrawing = b"\r" in left or (self._redrawing and not cut)
        self.partial = _as_displayed(left)
        whole = _as_displayed(whole)
        while len(self.partial) > MOST_LINE_BYTES:
            whole += self.partial[:MOST_LINE_BYTES] + b"\n"
            self.partial = self.partial[MOST_LINE_BYTES:]
        return whole

    def rest(self) -> bytes:
        """Return the unfinished line with a newline, at the end of the stream; b"" for none."""
        partial = self.pop_partial()
        return partial.rstrip(b"\r") + b"\n" if partial else b""

    def pop_partial(self) -> bytes:
        """Return the unfinished line as it is; what follows continues it."""
        partial, self.partial = self.partial, b""
        return partial

    def redrawn(self) -> bytes:
        """Return the last state of a line that is redrawn with carriage returns, as a line; b"" for none."""
        state = self.partial.strip(b"\r") if self._redrawing else b""
        return state + b"\n" if state else b""


def _as_displayed(whole: bytes) -> bytes:
    """Keep of each line what a terminal would display: what follows its last carriage return."""
    if b"\r" not in whole:
        return whole
    return b"\n".join([_last_state(line) if b"\r" in line else line for line in whole.split(b"\n")])


def _last_state(line: bytes) -> bytes:
    text = line.rstrip(b"\r")
    return text.rpartition(b"\r")[2] + (b"\r" if len(text) < len(line) else b"")


def label(ranks: str, colour: int | None) -> bytes:
    """Return the prefix of a line of ``ranks``: ``[3] ``; in the colour of the rank ``colour``, None for plain."""
    text = f"[{ranks}]"
    return (text if colour is None else f"\x1b[{_COLOURS[colour % len(_COLOURS)]}m{text}\x1b[0m").encode() + b" "


def prefixed(prefix: bytes, whole: bytes) -> bytes:
    """Put ``prefix`` before each of the ``whole`` lines."""
    return prefix + whole[:-1].replace(b"\n", b"\n" + prefix) + b"\n" if prefix and whole else whole


class Fold:
    """Merges equal lines of several ranks. Lines of each rank stay in order, and none is lost. Pure.

    A line is due when it is the next one of every rank that has it waiting, and all ranks have it or it is old.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        # Each rank's lines, with their times of arrival.
        self._waiting: defaultdict[int, deque[tuple[bytes, float]]] = defaultdict(deque)
        # How often each rank has a line waiting.
        self._holders: defaultdict[bytes, Counter[int]] = defaultdict(Counter)
        self._bytes = 0

    def add(self, rank: int, whole: bytes, now: float) -> None:
        """Add whole lines of one rank."""
        for line in whole.split(b"\n")[:-1]:
            self._waiting[rank].append((line, now))
            self._holders[line][rank] += 1
            self._bytes += len(line) + _FOLD_LINE_BYTES

    def due(self, now: float, *, everything: bool = False) -> list[tuple[bytes, list[int]]]:
        """Return the lines that need not wait any longer, each with its ranks, in order."""
        found: list[tuple[bytes, list[int]]] = []
        while heads := self._heads():
            hurry = everything or self._bytes > _MOST_FOLD_BYTES
            old = [line for line, (since, _) in heads.items() if hurry or now - since >= FOLD_WINDOW_S]
            due = [
                line
                for line, (_, ranks) in heads.items()
                if len(ranks) == len(self._holders[line]) and (len(ranks) == self._ranks or line in old)
            ]
            if old and not due:
                # Ranks print the same lines in different orders: the oldest is printed first.
                due = [min(old, key=lambda line: heads[line][0])]
            if not due:
                break
            found += [(line + b"\n", self._pop(line, heads[line][1])) for line in due]
        return found

    def _heads(self) -> dict[bytes, tuple[float, list[int]]]:
        """Return the next lines, each with the time since when it waits and the ranks that have it next."""
        heads: dict[bytes, tuple[float, list[int]]] = {}
        for rank, waiting in self._waiting.items():
            if waiting:
                line, at = waiting[0]
                since, ranks = heads.get(line, (at, []))
                heads[line] = (min(at, since), [*ranks, rank])
        return heads

    def _pop(self, line: bytes, ranks: list[int]) -> list[int]:
        for rank in ranks:
            self._waiting[rank].popleft()
            self._bytes -= len(line) + _FOLD_LINE_BYTES
        self._holders[line] -= Counter(ranks)
        if not self._holders[line]:
            del self._holders[line]
        return sorted(ranks)

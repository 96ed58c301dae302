"""Bytes of one stream into whole lines. Pure; works on large pieces, because lines come 100,000 a second."""

from __future__ import annotations

__all__ = ["MOST_LINE", "Lines", "label", "prefixed"]

# A longer line is shown in pieces of this size: binary output has no newlines, and must not fill the memory.
MOST_LINE = 1 << 20

# The colours of a terminal that can be read on light and dark; ranks take them in turn.
_COLOURS = (36, 33, 32, 35, 34, 31)


class Lines:
    """Takes what a stream says and gives back its whole lines; the last, unfinished one stays."""

    def __init__(self) -> None:
        self._partial = b""
        self._redrawing = False

    @property
    def partial(self) -> bytes:
        """The line that is not finished yet."""
        return self._partial

    def feed(self, data: bytes) -> bytes:
        """Return the lines that are whole now, each with its newline; b"" for none."""
        cut = data.rfind(b"\n") + 1
        whole, left = (self._partial + data[:cut], data[cut:]) if cut else (b"", self._partial + data)
        self._redrawing = b"\r" in left or (self._redrawing and not cut)
        self._partial = _drawn(left)
        return _drawn(whole) + self._too_long()

    def rest(self) -> bytes:
        """Return the unfinished line with a newline, at the end of the stream; b"" for none."""
        partial, self._partial = self._partial, b""
        return partial.rstrip(b"\r") + b"\n" if partial else b""

    def take(self) -> bytes:
        """Return the unfinished line as it is, to be shown before it is finished; what follows continues it."""
        partial, self._partial = self._partial, b""
        return partial

    def redrawn(self) -> bytes:
        """Return the last state of a line that is drawn again and again with carriage returns, as a line; b"" for none.

        A terminal would overwrite the states before it.
        """
        if not self._redrawing:
            return b""
        state = self._partial.strip(b"\r")
        return state + b"\n" if state else b""

    def _too_long(self) -> bytes:
        pieces = []
        while len(self._partial) > MOST_LINE:
            pieces.append(self._partial[:MOST_LINE] + b"\n")
            self._partial = self._partial[MOST_LINE:]
        return b"".join(pieces)


def _drawn(whole: bytes) -> bytes:
    """Keep of each line what a terminal would show: what comes after its last carriage return."""
    if b"\r" not in whole:
        return whole
    return b"\n".join([_last_state(line) if b"\r" in line else line for line in whole.split(b"\n")])


def _last_state(line: bytes) -> bytes:
    text = line.rstrip(b"\r")
    return text.rpartition(b"\r")[2] + (b"\r" if len(text) < len(line) else b"")


def label(ranks: str, colour: int | None) -> bytes:
    """Return what stands before a line of ``ranks``: ``[3] ``; in colour for the rank ``colour``, None for plain."""
    text = f"[{ranks}]"
    return (text if colour is None else f"\x1b[{_COLOURS[colour % len(_COLOURS)]}m{text}\x1b[0m").encode() + b" "


def prefixed(prefix: bytes, whole: bytes) -> bytes:
    """Put ``prefix`` before each of the ``whole`` lines."""
    return prefix + whole[:-1].replace(b"\n", b"\n" + prefix) + b"\n" if prefix and whole else whole

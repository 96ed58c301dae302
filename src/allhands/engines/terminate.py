"""Gloo's last word: when more bytes arrive than a call expects, it ends the process by an exception nobody catches.

That is thrown in a thread of its own, deep inside locks, so nothing of Gloo's can go on afterwards; but the process
can, as long as that thread does not return.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

__all__ = ["before_end"]

# std::set_terminate, by the name that the C++ compiler gives it.
_SET_TERMINATE = "_ZSt13set_terminatePFvvE"

# What the name of any exception type of Gloo's begins with, as the C++ compiler writes it (N4gloo13EnforceNotMetE).
_GLOO = b"N4gloo"

_Handler = ctypes.CFUNCTYPE(None)


def before_end(asked: Callable[[], None]) -> Callable[[], None] | None:
    """Call ``asked`` in Gloo's thread before an exception of Gloo's ends this process; return what undoes this.

    If ``asked`` returns, the process ends as it would have. None where the C++ library cannot be found.
    """
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        replace, kind = library[_SET_TERMINATE], library["__cxa_current_exception_type"]
    except (OSError, AttributeError):
        return None
    replace.restype, replace.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    # A std::type_info: its virtual table, then its name.
    kind.restype, kind.argtypes = ctypes.POINTER(ctypes.c_char_p), []

    def ending() -> None:
        thrown = kind()
        if thrown and (thrown[1] or b"").startswith(_GLOO):
            asked()
        if before is not None:
            _Handler(before)()

    ours = _Handler(ending)
    before: int | None = replace(ctypes.cast(ours, ctypes.c_void_p))

    def undo() -> None:
        # Whatever was put in its place since stays there.
        last = replace(before)
        if last != ctypes.cast(ours, ctypes.c_void_p).value:
            replace(last)

    return undo

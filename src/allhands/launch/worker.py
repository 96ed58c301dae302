"""What runs in a worker before, around and after the script: it dies with its agent, and leaves evidence of its end.

Imports nothing that a script would notice, and neither torch nor what is slow. The script is run as the interpreter
runs one: as ``__main__``, in a module of its own, with its own ``sys.argv`` and ``sys.path[0]``.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from types import ModuleType

from ..observe.stacks import SIGNAL
from .record import exited, raised, write

# Not from typing, whose import takes as long as the rest of an interpreter's start; type checkers know the name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

__all__ = ["PROGRAM", "follow", "main", "order"]

# Given to `python -c`. The folder of the package comes last, and what -c put first is taken off before anything is
# imported, so that nothing beside the user's script shadows a module of the standard library.
PROGRAM = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); sys.path.append(sys.argv[1]); "
    "from allhands.launch.worker import main; main()"
)


def order(kind: str, *, agent: int, record: int, fatal: int, stacks: int, board: int, init: bool) -> str:
    """Return the word that tells a worker what to do; the numbers are descriptors and the agent's pid."""
    return ",".join([kind, *(str(int(number)) for number in (agent, record, fatal, stacks, board, init))])


def main() -> None:
    """Do what `order` said, then end as the script does."""
    appended, ordered, target, *arguments = sys.argv[1:]
    if sys.path[:-1].count(appended):
        sys.path.pop()
    kind, *numbers = ordered.split(",")
    agent, record, fatal, stacks, board, init = map(int, numbers)
    follow(agent)
    os.environ["ALLHANDS_RECORDER_FD"] = f"{board}:{os.getpid()}"
    for descriptor in (record, fatal, stacks):
        os.set_inheritable(descriptor, False)
    if kind == "program":
        write(record, {"end": "program"})
        os.execvp(target, [target, *arguments])  # noqa: S606  # the program that the user named
    os.set_inheritable(board, False)
    faulthandler.enable(fatal)
    faulthandler.register(SIGNAL, file=stacks)
    _run(kind, target, arguments, record, init=bool(init))


def follow(agent: int) -> None:
    """Die when the process ``agent``, which is this one's parent, does: at once."""
    # By its full name: `from .. import` would ask the facade first, which imports more to answer.
    from .._core import set_parent_death_signal

    set_parent_death_signal(signal.SIGKILL)
    # An agent that ended before that call is not told of: we are already someone else's child.
    if os.getppid() != agent:
        os.kill(os.getpid(), signal.SIGKILL)


def _run(kind: str, target: str, arguments: list[str], record: int, *, init: bool) -> None:
    sys.argv = [target, *arguments]
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    formed = False
    try:
        if init:
            from ..groups.lifecycle import destroy_process_group, init_process_group

            init_process_group()
            formed = True
        _start(kind, target, module)
    except SystemExit as problem:
        write(record, exited(problem))
        raise
    except BaseException as problem:  # noqa: BLE001  # shown as the interpreter would show it, and raised again
        _fail(problem, record)
    finally:
        if formed:
            destroy_process_group()
    write(record, {"end": "done"})


def _start(kind: str, target: str, module: ModuleType) -> None:
    if kind == "module":
        if not sys.flags.safe_path:
            sys.path.insert(0, os.getcwd())  # noqa: PTH109  # what python -m puts there, as text
        _as_main(target, argv=True)
    elif os.path.isdir(target) or not _is_source(target):  # noqa: PTH112  # pathlib is not imported for this
        # A folder or an archive with a __main__ in it.
        sys.path.insert(0, target)
        _as_main("__main__", argv=False)
    else:
        if not sys.flags.safe_path:
            sys.path.insert(0, os.path.dirname(os.path.realpath(target)))  # noqa: PTH120
        _as_script(target, module)


def _is_source(target: str) -> bool:
    with open(target, "rb") as file:  # noqa: PTH123
        return file.read(4) != b"PK\x03\x04"


def _as_main(name: str, *, argv: bool) -> None:
    import runpy

    # What the interpreter itself calls for -m; the public run_module takes the module away again at the end, while
    # threads and exit handlers of the script may still need it.
    runpy._run_module_as_main(name, alter_argv=argv)  # type: ignore[attr-defined]  # noqa: SLF001


def _as_script(path: str, module: ModuleType) -> None:
    from importlib.machinery import SourceFileLoader
    from io import open_code

    with open_code(os.path.abspath(path)) as file:  # noqa: PTH100  # what the interpreter uses, for audit hooks
        source = file.read()
    space = module.__dict__
    space |= {"__file__": path, "__cached__": None, "__loader__": SourceFileLoader("__main__", path)}
    code = compile(source, path, "exec", dont_inherit=True)
    exec(code, space)  # noqa: S102  # to run the user's script is what this is for


# How the script ended -----------------------------------------------------------------------------------------


def _fail(problem: BaseException, record: int) -> NoReturn:
    """Show an uncaught exception without our frames, leave a record of it, and end as the interpreter does."""
    trace = problem.__traceback__
    ours = {__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    problem.__traceback__ = trace
    write(record, raised(problem, trace))
    sys.last_type, sys.last_value, sys.last_traceback = type(problem), problem, trace
    _spare_traceback(problem)
    sys.excepthook(type(problem), problem, trace)
    # Raised again, so that exit handlers, exit status and what Ctrl-C does to a process are Python's own.
    sys.excepthook = lambda *_: None
    raise problem


def _spare_traceback(problem: BaseException) -> None:
    """Leave the culprit's traceback out of an error that only passes it on.

    The culprit shows it, and so does the verdict; each of n ranks would show it otherwise.
    """
    diagnosis: Any = getattr(problem, "diagnosis", None)
    if getattr(diagnosis, "traceback", ""):
        import msgspec

        problem.diagnosis = msgspec.structs.replace(diagnosis, traceback="")  # type: ignore[attr-defined]  # ours

"""The code around the script in a worker: it ends the worker with the agent, and records how the script ended.

Imports nothing slow, no torch, and nothing that a script could notice. The script runs as the interpreter runs one: as
``__main__``, in a module of its own, with its own ``sys.argv`` and ``sys.path[0]``.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from types import ModuleType

from ..observe import stacks

# Not from typing, whose import takes as long as the rest of an interpreter's start; type checkers know the name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any, NoReturn

__all__ = [
    "PROGRAM",
    "die_with_parent",
    "encode_task",
    "exception_record",
    "main",
    "system_exit_record",
    "write_exit_record",
]

# The argument of `python -c`. The directory of the package is appended, and the one that -c put first is removed before
# anything is imported, so that no file beside the user's script shadows a module of the standard library.
PROGRAM = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); sys.path.append(sys.argv[1]); "
    "from allhands.launch.worker import main; main()"
)

# The longest message and traceback in an exit record; a longer one is data.
_MOST_TEXT = 64 * 1024


def encode_task(kind: str, *, agent: int, record: int, fatal: int, recorder: int, init: bool) -> str:
    """Return the command-line argument of a worker: kind of target, the agent's pid, and descriptors."""
    return ",".join([kind, *(str(int(number)) for number in (agent, record, fatal, recorder, init))])


def main() -> None:
    """Run the task of `encode_task`, and end as the script does."""
    appended, task, target, *arguments = sys.argv[1:]
    if sys.path[:-1].count(appended):
        sys.path.pop()
    kind, *numbers = task.split(",")
    agent, record, fatal, recorder, init = map(int, numbers)
    die_with_parent(agent)
    os.environ["ALLHANDS_RECORDER_FD"] = f"{recorder}:{os.getpid()}"
    for descriptor in (record, fatal):
        os.set_inheritable(descriptor, False)
    if kind == "program":
        write_exit_record(record, {"end": "program"})
        os.execvp(target, [target, *arguments])  # noqa: S606  # the program that the user named
    os.set_inheritable(recorder, False)
    faulthandler.enable(fatal)
    stacks.register()
    _run(kind, target, arguments, record, init=bool(init))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent, the process ``parent``, ends."""
    # By its full name: `from .. import` would load the package's facade.
    from .._core import set_parent_death_signal

    set_parent_death_signal(signal.SIGKILL)
    # A parent that ended before that call sends no signal, and this process has another parent already.
    if os.getppid() != parent:
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
        write_exit_record(record, system_exit_record(problem))
        raise
    except BaseException as problem:  # noqa: BLE001  # printed as the interpreter prints it, and raised again
        _fail(problem, record)
    finally:
        if formed:
            destroy_process_group()
    write_exit_record(record, {"end": "done"})


def _start(kind: str, target: str, module: ModuleType) -> None:
    if kind == "module":
        if not sys.flags.safe_path:
            sys.path.insert(0, os.getcwd())  # noqa: PTH109  # the text that python -m inserts
        _run_as_main(target, alter_argv=True)
    elif os.path.isdir(target) or not _is_source(target):  # noqa: PTH112  # pathlib is slow to import
        # A directory or an archive with a __main__ in it.
        sys.path.insert(0, target)
        _run_as_main("__main__", alter_argv=False)
    else:
        if not sys.flags.safe_path:
            sys.path.insert(0, os.path.dirname(os.path.realpath(target)))  # noqa: PTH120
        _run_script(target, module)


def _is_source(target: str) -> bool:
    with open(target, "rb") as file:  # noqa: PTH123
        return file.read(4) != b"PK\x03\x04"


def _run_as_main(name: str, *, alter_argv: bool) -> None:
    import runpy

    # The function that the interpreter calls for -m. The public run_module removes the module at the end, while
    # threads and exit handlers of the script may still need it.
    runpy._run_module_as_main(name, alter_argv=alter_argv)  # type: ignore[attr-defined]  # noqa: SLF001


def _run_script(path: str, module: ModuleType) -> None:
    from importlib.machinery import SourceFileLoader
    from io import open_code

    with open_code(os.path.abspath(path)) as file:  # noqa: PTH100  # as the interpreter, for audit hooks
        source = file.read()
    space = module.__dict__
    space |= {"__file__": path, "__cached__": None, "__loader__": SourceFileLoader("__main__", path)}
    code = compile(source, path, "exec", dont_inherit=True)
    exec(code, space)  # noqa: S102  # the user's script


def _fail(problem: BaseException, record: int) -> NoReturn:
    """Print an uncaught exception without the frames of this file, record it, and end as the interpreter does."""
    trace = problem.__traceback__
    ours = {__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    problem.__traceback__ = trace
    write_exit_record(record, exception_record(problem, trace))
    sys.last_type, sys.last_value, sys.last_traceback = type(problem), problem, trace
    _drop_remote_traceback(problem)
    sys.excepthook(type(problem), problem, trace)
    # Raised again, so that exit handlers, the exit status and the effect of Ctrl-C are Python's own.
    sys.excepthook = lambda *_: None
    raise problem


def _drop_remote_traceback(problem: BaseException) -> None:
    """Remove the culprit's traceback from an error that passes it on; else each of n ranks would print it."""
    diagnosis: Any = getattr(problem, "diagnosis", None)
    if getattr(diagnosis, "traceback", ""):
        import msgspec

        problem.diagnosis = msgspec.structs.replace(diagnosis, traceback="")  # type: ignore[attr-defined]  # ours


# The exit record --------------------------------------------------------------------------------------------------


def exception_record(problem: BaseException, trace: TracebackType | None) -> dict[str, Any]:
    """Return the exit record of an uncaught exception, with its traceback from ``trace`` on."""
    import traceback

    text = "".join(traceback.format_exception(type(problem), problem, trace))
    found: dict[str, Any] = {
        "end": "raised",
        "kind": type(problem).__name__,
        "message": _message(problem)[:_MOST_TEXT],
        "traceback": text[-_MOST_TEXT:],
        "bases": [base.__name__ for base in type(problem).__mro__],
        # A pool or a DataLoader attaches the traceback of the process that raised first.
        "remote": any(type(each).__name__.endswith("RemoteTraceback") for each in _causes(problem)),
    }
    if hasattr(problem, "diagnosis"):
        found |= {"slug": problem.slug, "ranks": list(problem.ranks)}  # type: ignore[attr-defined]  # an AllhandsError
    return found


def _message(problem: BaseException) -> str:
    try:
        return str(problem)
    except Exception:  # noqa: BLE001  # a __str__ of the script that raises; the interpreter prints this too
        return "<exception str() failed>"


def _causes(problem: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while problem is not None and problem not in found:
        found.append(problem)
        problem = problem.__cause__ or problem.__context__
    return found


def system_exit_record(problem: SystemExit) -> dict[str, Any]:
    """Return the exit record of a call of sys.exit."""
    if problem.code is None or problem.code == 0:
        return {"end": "done"}
    trace = problem.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    site = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
    # `python -m` itself, which found no such module, is no line of the user's.
    site = "" if site.startswith("<frozen runpy>") else site
    return {"end": "exit", "message": str(problem.code)[:_MOST_TEXT], "site": site}


def write_exit_record(descriptor: int, record: dict[str, Any], *, final: bool = True) -> None:
    """Write ``record`` into a memfd of the launcher; ``final`` adds the time of the end.

    The file is not truncated, because a script that closed every descriptor may have reused the number: a record that
    is not final must be shorter than the one that replaces it.
    """
    import json
    import time

    record = {**record, "at_s": time.monotonic()} if final else record
    try:
        os.pwrite(descriptor, json.dumps(record).encode(errors="replace"), 0)
    except OSError:
        return  # A script that closed every descriptor leaves no record.

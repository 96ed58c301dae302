"""The public names are those of `__all__`, and importing the package is cheap."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "allhands"
FACADE = PACKAGE / "__init__.py"
MODULES = sorted(PACKAGE.rglob("*.py"))
# The launcher, the coordinator and the command line start without torch, whose import takes seconds.
TORCHLESS = ["allhands", "allhands.cli", "allhands.control", "allhands.environments", "allhands.launch"]


def bound(body: list[ast.stmt], *, package: bool) -> Iterator[str]:
    """Yield the names that the statements of a module bind, in a package those imported from its modules too."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id="TYPE_CHECKING")]):
                pass  # What typing calls so, without its import.
            case ast.Assign(targets=targets):
                for target in targets:
                    yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.ImportFrom(level=level, names=aliases) if package and level:
                yield from (alias.asname or alias.name for alias in aliases)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case ast.If(body=first, orelse=second):
                yield from bound([*first, *second], package=package)
            case ast.Try(body=first, handlers=handlers, orelse=second):
                inner = [statement for handler in handlers for statement in handler.body]
                yield from bound([*first, *inner, *second], package=package)


def declared(path: Path) -> list[str]:
    """Return the `__all__` of a module, which must be written out as a list."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List() as value)
                | ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.List() as value)
            ):
                names: list[str] = ast.literal_eval(value)
                return names
    pytest.fail(f"{path.name} has no __all__ that is a plain list", pytrace=False)


def order(name: str) -> tuple[int, list[str | int]]:
    """Sort as ruff does (RUF022): CONSTANTS, Classes, the rest; numbers by value."""
    kind = 0 if len(name) > 1 and name.isupper() else 1 if name[0].isupper() else 2
    return kind, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def run(code: str, **environment: str) -> str:
    """Run ``code`` in a fresh interpreter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_all_is_what_is_public(path: Path) -> None:
    """`__all__` is sorted and holds each public name that the module defines, and no other."""
    names = declared(path)
    assert names == sorted(names, key=order)
    assert len(names) == len(set(names))
    body = ast.parse(path.read_text(encoding="utf-8")).body
    here = {name for name in bound(body, package=path.name == "__init__.py") if not name.startswith("_")}
    if path == FACADE:
        # Its names are fetched when first used, so most are bound nowhere; the next test fetches them.
        assert here <= set(names)
    else:
        assert {name for name in names if name != "__version__"} == here


def test_every_name_of_the_facade_is_there() -> None:
    """Each name that `import allhands` offers can be fetched."""
    facade = importlib.import_module("allhands")
    missing = [name for name in facade.__all__ if not hasattr(facade, name)]
    assert missing == []


@pytest.mark.parametrize("module", TORCHLESS)
def test_no_torch_until_it_is_needed(module: str) -> None:
    """Importing these does not import torch, with allhands' entry point for torch installed."""
    base = PACKAGE.parent.joinpath(*module.split("."))
    if not base.with_suffix(".py").exists() and not (base / "__init__.py").exists():
        pytest.skip(f"{module} does not exist yet")
    code = f"import sys, {module}; print([name for name in sys.modules if name.partition('.')[0] == 'torch'])"
    assert run(code).strip() == "[]"


def test_import_torch_loads_next_to_nothing_of_ours() -> None:
    """`import torch` knows the backend through the entry point, and loads no module for it that it had not."""
    code = "import json, sys, torch; print(json.dumps([sorted(sys.modules), torch.distributed.Backend.backend_list]))"
    without, _ = json.loads(run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
    loaded, backends = json.loads(run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="1"))
    assert "allhands" in backends
    # Torch reads the list of entry points with or without us.
    ours = {name for name in set(loaded) - set(without) if name.partition(".")[0] not in {"importlib", "email", "csv"}}
    assert {name for name in ours if name.partition(".")[0] == "allhands"} <= {
        "allhands",
        "allhands.groups",
        "allhands.groups.registration",
        "allhands._version",
    }
    assert not ours & {"asyncio", "click", "msgspec", "psutil", "rich"}

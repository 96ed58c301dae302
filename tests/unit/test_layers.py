"""Imports follow the layers: a module imports from its own layer and from those above it in the table."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "allhands"

# From the words that everything uses down to what people use; each layer may import those above it.
# A name is a module or a folder directly under allhands/. A new one must be given its place here.
LAYERS: dict[str, set[str]] = {
    "base": {"_core", "_version", "diagnosis", "errors", "settings"},
    "environments": {"environments"},
    "observe": {"observe"},
    "control": {"control"},
    "engines": {"_torch", "engines"},
    "groups": {"groups"},
    "training": {"training"},
    # `spawn` is part of the public interface, so the package itself is above launch.
    "launch": {"launch"},
    "facade": {"__init__"},
    "tools": {"__main__", "bench", "cli", "doctor", "notebook", "testing"},
}
ORDER = {name: number for number, names in enumerate(LAYERS.values()) for name in names}

# The one module that may use names that torch does not promise to keep.
PRIVATE_TORCH = PACKAGE / "_torch.py"

SOURCES = sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")])
MODULES = [path for path in SOURCES if path.suffix == ".py"]


def name(path: Path) -> str:
    """Return the module or folder directly under allhands/ that ``path`` belongs to."""
    return path.relative_to(PACKAGE).parts[0].partition(".")[0]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of all that is imported in ``path``, wherever it stands, relative names resolved."""
    # The package that relative names start from: the module's folder, also for an __init__.
    package = ["allhands", *path.parent.relative_to(PACKAGE).parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=aliases):
                yield from ((node.lineno, alias.name) for alias in aliases)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                base = package[: len(package) - level + 1] if level else []
                origin = ".".join([*base, *([module] if module else [])])
                yield from ((node.lineno, f"{origin}.{alias.name}") for alias in aliases)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                args=[ast.Constant(value=str(text)), *_],
            ):
                yield node.lineno, f"allhands{text}" if text.startswith(".") else text


def target(dotted: str) -> str | None:
    """Return which part of allhands ``dotted`` names, or None for other packages."""
    first, *rest = dotted.split(".")
    if first != "allhands":
        return None
    # `from . import errors` names a module, `import allhands` or `from . import something else` the facade.
    return rest[0] if rest and rest[0] in ORDER and rest[0] != "__init__" else "__init__"


def private_torch(path: Path) -> Iterator[str]:
    """Yield the uses of underscored names of torch's modules in ``path``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    aliases: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for each in names:
                    if each.name.partition(".")[0] == "torch":
                        aliases.add(each.asname or "torch")
                        if any(private(part) for part in each.name.split(".")):
                            yield f"line {node.lineno}: import {each.name}"
            case ast.ImportFrom(module=str(module), names=names, level=0) if module.partition(".")[0] == "torch":
                for each in names:
                    aliases.add(each.asname or each.name)
                    if any(private(part) for part in [*module.split("."), each.name]):
                        yield f"line {node.lineno}: from {module} import {each.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in aliases:
                yield f"line {node.lineno}: {ast.unparse(node)}"


def private(word: str) -> bool:
    """Return whether ``word`` is underscored; Python's own __names__ are not."""
    return word.startswith("_") and not word.endswith("__")


def test_each_name_has_one_layer() -> None:
    """No name stands in two layers."""
    assert len(ORDER) == sum(map(len, LAYERS.values()))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_has_a_layer(path: Path) -> None:
    """A module that is not in the table has no place yet: someone must decide on it."""
    assert name(path) in ORDER


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_up_only(path: Path) -> None:
    """A module imports from its own layer and those above it, nothing below; lazy imports count too."""
    own = ORDER[name(path)]
    wrong = [
        f"line {line}: {dotted}"
        for line, dotted in imports(path)
        if (part := target(dotted)) is not None and ORDER[part] > own
    ]
    assert wrong == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_torch_names_stay_in_one_module(path: Path) -> None:
    """Names that torch may change at any time are used in `_torch.py` only."""
    if path != PRIVATE_TORCH:
        assert list(private_torch(path)) == []


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("import torch._C", 1),
        ("from torch import _C", 1),
        ("from torch._C._distributed_c10d import Store", 1),
        ("import torch.distributed as dist\ndist.distributed_c10d._world", 1),
        ("from torch.distributed import distributed_c10d as c10d\nc10d._get_default_group()", 1),
        ("import torch\ntorch.__version__\ntorch.ones(1)", 0),
        ("import other\nother._private", 0),
    ],
)
def test_private_torch_names_are_recognised(tmp_path: Path, code: str, number: int) -> None:
    """The check above sees every way to reach a private name, and no more."""
    path = tmp_path / "module.py"
    path.write_text(code)
    assert len(list(private_torch(path))) == number


@pytest.mark.parametrize(
    ("place", "code", "found"),
    [
        ("groups/backend.py", "from ..errors import fail", "errors"),
        ("groups/backend.py", "from .. import errors", "errors"),
        ("control/member.py", "from ..launch import agent", "launch"),
        ("control/member.py", "from .messages import Hello", "control"),
        ("control/__init__.py", "from .member import Member", "control"),
        ("errors.py", "def f():\n    from allhands.cli import main", "cli"),
        ("errors.py", "import importlib\nimportlib.import_module('allhands.groups.backend')", "groups"),
        ("cli.py", "import allhands", "__init__"),
        ("cli.py", "from . import init_process_group", "__init__"),
        ("cli.py", "import json", None),
    ],
)
def test_imports_are_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, code: str, found: str | None
) -> None:
    """The check above sees absolute, relative and lazy imports alike."""
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    path.write_text(code)
    *_, (_, dotted) = imports(path)
    assert target(dotted) == found

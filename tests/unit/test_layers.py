"""Imports follow the layers: a module imports from its own layer and from those above it in the table."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "allhands"

# From the base to the tools; each layer may import those above it.
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

# File names that occur in several folders, and the one idea that each stands for.
SHARED_NAMES = {
    "__init__.py": "a package",
    "base.py": "the interface that the other modules of its package implement",
    "command.py": "the command line of its package: allhands doctor, allhands run",
    "engine.py": "the implementation of engines/base.py by its engine",
    "errors.py": "exceptions",
    "rollcall.py": "the roll call: control/ decides it, bench/ measures it",
}

SOURCES = sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")])
MODULES = [path for path in SOURCES if path.suffix == ".py"]


def name(path: Path) -> str:
    """Return the module or folder directly under allhands/ that ``path`` belongs to."""
    return path.relative_to(PACKAGE).parts[0].partition(".")[0]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of each import anywhere in ``path``, relative names resolved."""
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


def dotted(path: Path) -> str:
    """Return the dotted name of the module ``path`` below allhands, "" for the facade."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def at_import(path: Path) -> Iterator[str]:
    """Yield the modules of allhands that ``path`` imports when it is imported itself."""
    known = {dotted(each) for each in MODULES}
    package = ["allhands", *path.parent.relative_to(PACKAGE).parts]
    for node in top_level(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = package[1 : len(package) - node.level + 1]
        origin = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            full = f"{origin}.{alias.name}".lstrip(".")
            found = full if full in known else origin
            if found != dotted(path) and found:
                yield found


def top_level(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements that run at import, without those for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.stmt):
            yield node
            yield from top_level(node)


def cycles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Yield the import cycles of ``graph``: the strongly connected components with more than one module."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> Iterator[list[str]]:
        index[node] = low[node] = len(index)
        stack.append(node)
        for following in graph.get(node, ()):
            if following not in index:
                yield from visit(following)
                low[node] = min(low[node], low[following])
            elif following in stack:
                low[node] = min(low[node], index[following])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                yield sorted(component)

    for node in graph:
        if node not in index:
            yield from visit(node)


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
    """No name is in two layers."""
    assert len(ORDER) == sum(map(len, LAYERS.values()))


def test_every_module_has_a_layer() -> None:
    """A module or package directly under allhands/ must be in the table above."""
    assert sorted({name(path) for path in SOURCES} - ORDER.keys()) == []


def test_imports_go_up_only() -> None:
    """A module imports from its own layer and those above it in the table; lazy imports count too."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {dotted}"
        for path in SOURCES
        for line, dotted in imports(path)
        if (part := target(dotted)) is not None and ORDER[part] > ORDER[name(path)]
    ]
    assert wrong == []


def test_a_file_name_stands_for_one_idea() -> None:
    """No two folders have a file of the same name, except for the names listed above with their idea."""
    folders: dict[str, list[str]] = {}
    for root, patterns in ((PACKAGE, ["*.py"]), (PACKAGE.parents[1] / "csrc", ["*.c", "*.h"])):
        for path in sorted(path for pattern in patterns for path in root.rglob(pattern)):
            folders.setdefault(path.name, []).append(str(path.parent.relative_to(PACKAGE.parents[1])))
    shared = {file: where for file, where in folders.items() if len(where) > 1}
    assert {file: where for file, where in shared.items() if file not in SHARED_NAMES} == {}


def test_no_module_takes_part_in_an_import_cycle() -> None:
    """Modules import each other in one direction; imports inside functions do not count, they run later."""
    graph = {dotted(path): set(at_import(path)) for path in MODULES}
    assert list(cycles(graph)) == []


def test_private_torch_names_stay_in_one_module() -> None:
    """Names that torch may change at any time are used in `_torch.py` only."""
    found = {str(path.relative_to(PACKAGE)): list(private_torch(path)) for path in MODULES if path != PRIVATE_TORCH}
    assert {path: uses for path, uses in found.items() if uses} == {}


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

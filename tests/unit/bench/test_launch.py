from __future__ import annotations

import compileall
from pathlib import Path

from allhands.bench import launch

ROW = {"total_s": 2.0, "before_s": 0.2, "import_s": 1.7, "after_s": 0.1, "end_s": 1.0}
FOUND = {
    "ranks": 4,
    "rounds": 5,
    "kinds": dict.fromkeys(launch.KINDS, ROW),
    "ratio": 1.5,
    "not_importing_s": 0.3,
    "not_importing_by_difference_s": 0.25,
    "bytecode": True,
}


def test_the_table_says_what_is_measured() -> None:
    """Each kind of launch has a row, the columns are aligned, and the ratio and the split stand under them."""
    lines = launch.table(FOUND).splitlines()
    assert len({len(line) for line in lines[:5]}) == 1
    assert lines[2].split()[-5:] == ["2.000", "0.200", "1.700", "0.100", "3.000"]
    assert "1.50 times as long" in lines[6]
    assert "0.300 s before and after" in lines[7]
    assert "0.250 s as the difference" in lines[7]
    assert "medians of 5 launches of 4 ranks" in lines[8]
    assert len(lines) == 9


def test_the_table_says_where_everything_is_compiled_anew() -> None:
    """Figures of a tree without bytecode are not those of an installation, and the last line says so."""
    assert "compiled anew in every process" in launch.table({**FOUND, "bytecode": False}).splitlines()[9]


def test_the_scripts_are_python(tmp_path: Path) -> None:
    """What the ranks are to run compiles, for each kind."""
    for kind in launch.KINDS:
        launch.write(kind, tmp_path / f"{kind}.py")
    assert compileall.compile_dir(tmp_path, quiet=2)

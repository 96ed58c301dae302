"""Compiled code that communicates, through the compiler that generates C++."""

from __future__ import annotations

import shutil

import pytest

from ranks.compiled import differences

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("fork_server")]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's inductor needs a C++ compiler")
def test_generated_code_gives_what_gloo_gives() -> None:
    """Code that inductor compiles from functional collectives and DDP agrees on our backend and on Gloo."""
    found = differences("inductor", 400)
    assert found == dict.fromkeys(found, "")
    assert len(found) == 3

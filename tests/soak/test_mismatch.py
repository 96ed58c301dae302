"""Every difference of one rank's call, with every library and way to call."""

from __future__ import annotations

import pytest

from faults.test_mismatch import WAYS, Case, differences, run_cases

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("fork_server")]


@pytest.mark.parametrize(("group", "library", "later"), WAYS)
def test_every_mismatch(group: str, library: str, later: bool) -> None:
    """Operation, type, count, root, reduction, in either group, through either library, waited for or not."""
    cases = [Case(*pair, 1 + index % 3, group, library, later) for index, pair in enumerate(differences())]
    wrong, slowest = run_cases(cases, timeout=300)
    print(f"\n{len(cases)} mismatches, all ranks told within {slowest:.3f} s")  # noqa: T201  # the measurement of the test
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(wrong[:20])

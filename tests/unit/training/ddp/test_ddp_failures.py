from __future__ import annotations

from allhands.errors import TrainingError
from allhands.training.ddp import ddp_failures


def test_unused_parameters_are_listed_with_their_ranks() -> None:
    """Each name has its ranks, long lists are counted, and the exception has the ranks as an attribute."""
    problem = ddp_failures.unused_parameters(0, {f"p{number}": [1, 2, 3] for number in range(20)}, static=False)
    assert isinstance(problem, TrainingError)
    assert problem.slug == "unused-parameters"
    assert "p0 on ranks 1-3" in str(problem)
    assert "and 8 more parameters" in str(problem)
    assert problem.ranks == (1, 2, 3)
    assert "find_unused_parameters=True" in str(problem)
    assert "static_graph" in str(ddp_failures.unused_parameters(0, {"p": [0]}, static=True))


def test_changed_parameters_are_listed_by_kind_of_change() -> None:
    """Long lists are cut, with the number of the others."""
    problem = ddp_failures.module_changed(0, [f"p{number}" for number in range(20)], [], ["q"])
    assert "new: p0, p1" in str(problem)
    assert "p11 and 8 more" in str(problem)
    assert "replaced: q" in str(problem)
    assert "gone" not in str(problem)

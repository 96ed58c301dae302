from __future__ import annotations

from allhands.errors import TrainingError
from allhands.training.ddp.reducer import unused_parameters


def test_unused_parameters_are_listed_with_their_ranks() -> None:
    """Each name has its ranks, long lists are counted, and the exception has the ranks as an attribute."""
    problem = unused_parameters(0, {f"p{number}": [1, 2, 3] for number in range(20)}, static=False)
    assert isinstance(problem, TrainingError)
    assert problem.slug == "unused-parameters"
    assert "p0 on ranks 1-3" in str(problem)
    assert "and 8 more parameters" in str(problem)
    assert problem.ranks == (1, 2, 3)
    assert "find_unused_parameters=True" in str(problem)
    assert "static_graph" in str(unused_parameters(0, {"p": [0]}, static=True))

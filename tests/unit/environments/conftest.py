"""What the tests of environments share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from allhands.environments.identify import identify
from allhands.errors import AllhandsError

Refuse = Callable[..., AllhandsError]


@pytest.fixture
def refuse() -> Refuse:
    """Return a function that identifies a process, expects an error of the slug, and checks that it helps."""

    def check(slug: str, env: Mapping[str, str], **arguments: Any) -> AllhandsError:
        with pytest.raises(AllhandsError) as caught:
            identify(env, **arguments)
        told = caught.value.diagnosis
        assert told.slug == slug
        assert "pid" in told.who
        assert told.fix
        return caught.value

    return check

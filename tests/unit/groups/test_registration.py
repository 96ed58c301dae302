from __future__ import annotations

import sys
import types
from importlib import metadata

import pytest

from allhands.groups import registration

torch = pytest.importorskip("torch")


def test_the_entry_point_is_installed() -> None:
    """Torch finds `register` in the group whose entry points it calls when it is imported."""
    (entry,) = [entry for entry in metadata.entry_points(group="torch.backends") if entry.name == "allhands"]
    assert entry.load() is registration.register


def test_default_backends_stay_as_they_were() -> None:
    """Registering leaves the backend that torch picks for each device as torch has it."""
    backend = torch.distributed.Backend
    before = dict(backend.default_device_backend_map)
    registration.register()
    registration.register()
    assert backend.default_device_backend_map == before
    assert "allhands" not in before.values()
    assert backend.backend_list.count("allhands") == 1
    assert backend.backend_capability["allhands"] == ["cpu", "cuda"]


def test_a_failure_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong in registering is told, and does not break `import torch`."""

    def fails(*_: object, **__: object) -> None:
        raise AttributeError("no such thing")

    monkeypatch.setattr(torch.distributed.Backend, "register_backend", fails)
    with pytest.warns(RuntimeWarning, match="could not register its backend.*AttributeError: no such thing"):
        registration.register()


def test_a_torch_without_distributed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch was built without torch.distributed there is nothing to register and nothing to say."""
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(torch.distributed, "Backend")
    registration.register()


def test_the_group_is_loaded_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that torch is given hands its two arguments on to `allhands.groups.backend.create`."""
    group = types.ModuleType("allhands.groups.backend")
    monkeypatch.setattr(group, "create", lambda *arguments: arguments, raising=False)
    monkeypatch.setitem(sys.modules, "allhands.groups.backend", group)
    assert torch.distributed.Backend._plugins["ALLHANDS"].creator_fn("options", None) == ("options", None)

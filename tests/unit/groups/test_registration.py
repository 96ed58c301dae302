from __future__ import annotations

import sys
import types
import warnings
from importlib import metadata

import pytest

from allhands.groups import registration

torch = pytest.importorskip("torch")


def test_the_entry_point_is_installed() -> None:
    """Torch finds `register` in the group whose entry points it calls when it is imported."""
    (entry,) = [entry for entry in metadata.entry_points(group="torch.backends") if entry.name == "allhands"]
    assert entry.load() is registration.register


def test_default_backends_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registering leaves the backend that torch picks for each device as torch has it, however often it is done."""
    backend = torch.distributed.Backend
    torchs = {"cpu": "gloo", "cuda": "nccl"}
    assert {device: backend.default_device_backend_map.get(device) for device in torchs} == torchs
    monkeypatch.setattr(backend, "default_device_backend_map", dict(torchs))
    registration.register()
    registration.register()
    assert backend.default_device_backend_map == torchs
    assert backend.backend_list.count("allhands") == 1
    assert backend.backend_capability["allhands"] == ["cpu", "cuda"]


def test_a_failure_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in `register` becomes a warning, and does not break `import torch`."""

    def fails(*_: object, **__: object) -> None:
        raise AttributeError("no such thing")

    monkeypatch.setattr(torch.distributed.Backend, "register_backend", fails)
    with pytest.warns(RuntimeWarning, match="could not register its backend.*AttributeError: no such thing"):
        registration.register()


@pytest.mark.parametrize("available", [False, True])
def test_a_torch_without_distributed_is_left_alone(available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch was built without torch.distributed nothing is registered, without a warning."""
    registered: list[str] = []
    monkeypatch.setattr(torch.distributed, "is_available", lambda: available)
    monkeypatch.setattr(torch.distributed.Backend, "register_backend", lambda name, *_, **__: registered.append(name))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registration.register()
    assert registered == ["allhands"] * available


def test_the_group_is_loaded_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that torch is given passes its two arguments to `allhands.groups.backend.create`."""
    group = types.ModuleType("allhands.groups.backend")
    monkeypatch.setattr(group, "create", lambda *arguments: arguments, raising=False)
    monkeypatch.setitem(sys.modules, "allhands.groups.backend", group)
    assert torch.distributed.Backend._plugins["ALLHANDS"].creator_fn("options", None) == ("options", None)

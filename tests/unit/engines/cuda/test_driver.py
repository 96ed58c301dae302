"""NVIDIA's driver, where there is none: a refusal in words, before anything is touched."""

from __future__ import annotations

import ctypes

import pytest

from allhands.engines.cuda import driver


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(_has_driver(), reason="this machine has a driver")
def test_no_driver() -> None:
    """Each call says which library is missing."""
    with pytest.raises(driver.DriverError, match=r"libcuda\.so\.1"):
        driver.allocate(100)
    with pytest.raises(driver.DriverError, match=r"libcuda\.so\.1"):
        driver.batch_memory_ops(0, waits=[(0, 1)])


def test_an_operation_is_as_large_as_the_driver_has_it() -> None:
    """CUstreamBatchMemOpParams has 48 bytes; the driver reads an array of them."""
    assert ctypes.sizeof(driver._Operation) == 48
    fields = {name: getattr(driver._Operation, name).offset for name in ("operation", "address", "value", "flags")}
    assert fields == {"operation": 0, "address": 8, "value": 16, "flags": 24}

"""torch's own tests of a backend, run on ours: `python torch_suite.py GATING REPORT NAME...`.

Without arguments it prints the names of all tests.

They are in torch's wheel (`torch.testing._internal.distributed.distributed_test`), and decide by the name of the
backend, when they are imported, which of them are for it. A gating is the name that they are shown then; what is
tested is `allhands` in any case.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["BACKEND", "OUR_DDP", "WORLD_SIZES"]

BACKEND = "allhands"

# Variable that makes the tests use our DistributedDataParallel instead of torch's.
OUR_DDP = "TORCH_SUITE_OUR_DDP"

# Under our own name the tests that any backend has to pass; as "gloo" those that torch knows one CPU backend to
# pass; as "mpi" those for CPU tensors that Gloo did not do when the tests were written. "open" runs whatever torch
# leaves out: most tests that it keeps for GPUs, for other backends or for more ranks need none of these.
# Three ranks are what most tests were written for: subgroups of ranks 1 and 2 that leave rank 0 out. Those that
# ask for a number ask for four.
WORLD_SIZES = {BACKEND: 3, "gloo": 3, "mpi": 3, "open": 4}

# Timeout of a test. The slowest, which compiles, needs 48 s on two idle cores.
DEADLINE_S = 240


class _Name(str):
    """Our backend's name, equal to the gating's name too: some tests compare it again while they run."""

    __slots__ = ("other",)
    other: str

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == self.other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _keep(test: Callable[..., None]) -> Callable[..., None]:
    """Replace a decorator that skips a test; this one does not. torch looks for the wrapped function."""

    @functools.wraps(test)
    def run(*args: Any, **kw: Any) -> None:
        test(*args, **kw)

    return run


def _keep_by(*_: object, **__: object) -> Callable[..., Any]:
    """Replace one with arguments."""
    return _keep


def _open() -> None:
    """Make all that leaves a test out when it is defined, or when its ranks begin, do nothing."""
    from torch.testing._internal import common_distributed, common_utils

    for name in ("skip_if_no_gpu", "skip_if_small_worldsize", "skip_if_odd_worldsize", "skip_if_rocm_multiprocess"):
        setattr(common_distributed, name, _keep)
    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "requires_nccl_version"):
        setattr(common_distributed, name, _keep_by)
    for name in ("skip_but_pass_in_sandcastle", "skip_but_pass_in_sandcastle_if"):
        setattr(common_utils, name, _keep_by)
    unittest.skip = unittest.skipIf = _keep_by  # type: ignore[assignment]


class _Here(TorchFunctionMode):
    """Takes every GPU for the CPU, so that tests about something else than GPUs run where there is none."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = _here(kwargs["device"])
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = (args[0], *map(_here, args[1:]))
        return function(*args, **kwargs)


def _here(device: Any) -> Any:
    """Return the CPU for a GPU; anything else as it is."""
    if type(device) is int or (isinstance(device, str | torch.device) and str(device).startswith("cuda")):
        return torch.device("cpu")
    return device


def _without_gpus(module: Any) -> None:
    """Let the tests of ``module`` run on the CPU what they would run on GPUs."""
    to, ddp = torch.nn.Module.to, module.DistributedDataParallel
    init = ddp.__init__
    torch.nn.Module.to = lambda self, *args, **kw: to(  # type: ignore[method-assign]
        self, *map(_here, args), **{name: _here(value) for name, value in kw.items()}
    )
    torch.nn.Module.cuda = lambda self, _=None: self  # type: ignore[method-assign, assignment]
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    module.init_multigpu_helper = lambda size, _: {rank: [rank] for rank in range(size)}

    def on_cpu(self: Any, *args: Any, device_ids: Any = None, output_device: Any = None, **kw: Any) -> None:
        del device_ids, output_device
        init(self, *args, **kw)

    ddp.__init__ = on_cpu


def load(gating: str) -> type[unittest.TestCase]:
    """Return torch's tests as a class, as they are where the backend is called ``gating``."""
    from torch.testing._internal import common_distributed

    features = common_distributed.DistTestCases.backend_feature
    for feature in ("ddp", "subgroup", "plugin"):
        features[feature].add(BACKEND)
    # Some of torch's tests have a timeout of 400 s.
    common_distributed.TIMEOUT_DEFAULT = DEADLINE_S
    common_distributed.TIMEOUT_OVERRIDE.clear()
    every = gating == "open"
    if every:
        _open()
        gating = BACKEND
    os.environ["BACKEND"] = gating
    module = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    backend = _Name(BACKEND)
    backend.other = gating
    module.BACKEND = backend  # type: ignore[attr-defined]
    if os.environ.get(OUR_DDP):
        import allhands

        # Everywhere that the tests take it from; ours counts as an instance of torch's.
        torch.nn.parallel.DistributedDataParallel = allhands.DistributedDataParallel  # type: ignore[assignment, misc]
        module.DistributedDataParallel = allhands.DistributedDataParallel  # type: ignore[attr-defined]

    if every:
        _without_gpus(module)

    class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            # Forked instead of spawned: importing torch needs longer than most of the tests.
            self._start_processes(common_distributed.torch.multiprocessing.get_context("fork").Process)

        def run_test(self, *args: Any) -> None:
            with _Here() if every else contextlib.nullcontext():
                super().run_test(*args)

    return Suite


class Report(unittest.TestResult):
    """Writes one line of JSON for each test as it ends."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("a")
        self._begun = 0.0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802  # unittest's name
        """Note when it began."""
        super().startTest(test)
        self._begun = time.monotonic()
        print(f"=== {test.id()}", flush=True)  # noqa: T201  # a heading in the log

    def _write(self, test: unittest.TestCase, outcome: str, why: str = "") -> None:
        name = test.id().rpartition(".")[2]
        seconds = round(time.monotonic() - self._begun, 2)
        self._file.write(json.dumps({"test": name, "outcome": outcome, "why": why, "seconds": seconds}) + "\n")
        self._file.flush()

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        """Passed."""
        self._write(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        """Left out by torch."""
        self._write(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        """Failed."""
        self._write(test, "failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    addError = addFailure  # noqa: N815


def main(gating: str, report: str, *names: str) -> None:
    """Run the tests ``names`` one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "init").mkdir()
        os.environ.update(
            WORLD_SIZE=str(WORLD_SIZES[gating]),
            TEMP_DIR=folder,
            # Some tests end their group and form another one, here.
            INIT_METHOD=f"file://{folder}/init/file",
            # The same tests everywhere: with a GPU torch would run fewer on the CPU.
            CUDA_VISIBLE_DEVICES="",
            PYTORCH_PRINT_REPRO_ON_FAILURE="0",
        )
        # More threads than cores spin for each other.
        torch.set_num_threads(1)
        suite = load(gating)
        unittest.TestSuite(suite(name) for name in names).run(Report(Path(report)))


def show() -> None:
    """Print the names of all tests."""
    os.environ.update(WORLD_SIZE="3", TEMP_DIR=tempfile.gettempdir())
    print(*unittest.TestLoader().getTestCaseNames(load(BACKEND)))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:]) if sys.argv[1:] else show()

"""The engines of CUDA tensors where there is no GPU: a driver and an NCCL that work on memory of the host, at once.

What this cannot show is the order of a real stream; `tests/gpu` does.
"""

from __future__ import annotations

import pytest

from ranks import harness

SIMULATED = """
import ctypes, datetime, mmap, os, time
from types import SimpleNamespace
import torch
import torch.distributed as torch_dist
from allhands import _torch
from allhands.engines import compared, dtypes
from allhands.engines.base import CallMismatch, parts_of
from allhands.engines.cuda import driver, ipc, nccl, stream
from allhands.engines.shm.fd_passing import FdPassing

torch.set_num_threads(1)
store = torch_dist.FileStore(os.environ["GATES"] + "/store", size)
DEVICE, NS = torch.device("cpu"), 20_000_000_000
kept, files = [], {}

def mapped(descriptor, nbytes):
    kept.append(mmap.mmap(descriptor, nbytes))
    return ctypes.addressof(ctypes.c_char.from_buffer(kept[-1]))

def allocate(nbytes):
    descriptor = os.memfd_create("gpu")
    os.ftruncate(descriptor, nbytes)
    address = mapped(descriptor, nbytes)
    files[address] = f"/proc/{os.getpid()}/fd/{descriptor} {nbytes}"
    return address

def open_handle(handle):
    path, nbytes = handle.decode().split()
    descriptor = os.open(path, os.O_RDWR)
    return mapped(descriptor, int(nbytes))

def word(address):
    return ctypes.c_uint64.from_address(address)

def batch_memory_ops(_, *, waits=(), write=None):
    until = time.monotonic() + 20
    while not all(word(address).value >= value for address, value in waits):
        assert time.monotonic() < until
        time.sleep(0)
    if write is not None:
        word(write[0]).value = write[1]

driver.context, driver.enter = lambda: 1, lambda context: None
driver.map_host, driver.unmap_host = lambda address, nbytes: address, lambda address: None
driver.allocate, driver.free = allocate, lambda address: None
driver.export_handle, driver.open_handle = lambda address: files[address].encode(), open_handle
driver.close_handle, driver.batch_memory_ops = lambda address: None, batch_memory_ops
driver.create_stream, driver.destroy_stream = lambda: 0, lambda number: None
stream.at = ipc.at = lambda address, nbytes, device: compared.at(address, nbytes)
torch.cuda.ExternalStream = lambda number, device: SimpleNamespace(cuda_stream=number, synchronize=lambda: None)
# Rows grow to 64 KiB, so that a larger call takes several rounds.
torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=(64 << 10) * 32 * size)
ipc._MIN_ROW_BYTES = 16 << 10
ipc._SWITCH_BYTES = 100_000

class Nccl:
    '''Gloo with what NCCL has besides.'''
    def __init__(self, gloo):
        self.gloo = gloo
    def __getattr__(self, name):
        return getattr(self.gloo, name)
    def allreduce(self, tensors, options):
        averaged = options.reduceOp == torch_dist.ReduceOp.AVG
        if averaged:
            options.reduceOp = torch_dist.ReduceOp.SUM
        work = self.gloo.allreduce(tensors, options)
        work.wait()
        if averaged:
            tensors[0].div_(size)
        return work
    def reduce(self, tensors, options):
        made = torch_dist.AllreduceOptions()
        made.reduceOp = options.reduceOp
        return self.allreduce(tensors, made)
    def reduce_scatter(self, outputs, lists, options):
        made = torch_dist.AllreduceOptions()
        made.reduceOp = options.reduceOp
        whole = torch.cat(lists[0])
        work = self.allreduce([whole], made)
        outputs[0].copy_(whole.view(size, -1)[rank])
        return work
    def shutdown(self):
        pass

def form(key):
    sub = torch_dist.PrefixStore(key, store)
    counters, trouble = stream.share(FdPassing(sub, rank, size, lambda: None), "counters", rank, range(size), 20.0)
    assert counters is not None, trouble
    if os.environ["KIND"] == "cuda_ipc":
        return ipc.form(counters, sub, rank, size, DEVICE)
    gloo = _torch.gloo(torch_dist.PrefixStore("gloo", sub), rank, size, datetime.timedelta(seconds=20))
    return nccl.NcclEngine(counters, Nccl(gloo), rank, size, DEVICE)

def place(tensor):
    return tensor.data_ptr(), tensor.nbytes
"""

pytestmark = pytest.mark.usefixtures("fork_server")

both = pytest.mark.parametrize("kind", ["cuda_ipc", "nccl"])


@both
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_operation(kind: str, ranks: int) -> None:
    """Each operation gives what torch computes from everyone's data: several types, sizes, roots and uneven parts."""
    results = harness.launch(
        SIMULATED
        + """
engine = form("operations")
def data(each, length, dtype):
    return ((torch.arange(length) * 3 + each * 5) % 4 + (each % 2)).to(dtype)
number = 0
for length in (0, 1, 700, 5_000, 70_001):
    for dtype, names in ((torch.float32, ("SUM", "AVG", "MAX")), (torch.bfloat16, ("PRODUCT",)),
                         (torch.uint16, ("SUM", "MIN")), (torch.bool, ("SUM",)), (torch.int64, ("SUM", "BXOR"))):
        for name in names:
            code, reduction = dtypes.DTYPES[dtype], dtypes.REDUCTION_NAMES.index(name)
            number += 1
            root, everyone = number % size, [data(each, length, dtype) for each in range(size)]
            want = dtypes.reduce_rows(everyone, reduction)
            mine = everyone[rank].clone()
            engine.all_reduce(*place(mine), code, reduction, NS)
            assert torch.equal(mine, want), ("all_reduce", length, dtype, name)
            mine = everyone[rank].clone()
            engine.reduce(*place(mine), code, reduction, root, NS)
            assert torch.equal(mine, want if rank == root else everyone[rank]), ("reduce", length, dtype, name)
            mine, given = torch.empty_like(everyone[0]), [each.clone() for each in everyone]
            engine.reduce_scatter(parts_of(given), *place(mine), code, reduction, NS)
            rows = [everyone[rank]] * size
            assert torch.equal(mine, dtypes.reduce_rows(rows, reduction)), ("reduce_scatter", length, dtype, name)
            mine = everyone[rank].clone()
            engine.broadcast(*place(mine), code, root, NS)
            assert torch.equal(mine, everyone[root]), ("broadcast", length, dtype)
code = dtypes.DTYPES[torch.float32]
for scale in (0, 1, 30_000):
    for uneven in (0, 1):
        sizes = [(each * uneven + 1) * scale for each in range(size)]
        want = [torch.full((each,), float(number)) for number, each in enumerate(sizes)]
        got = [torch.zeros_like(each) for each in want]
        engine.all_gather(*place(want[rank]), parts_of(got), code, NS)
        assert all(map(torch.equal, got, want)), ("all_gather", scale, uneven)
        for root in range(size):
            got = [torch.zeros_like(each) for each in want]
            engine.gather(*place(want[rank]), parts_of(got) if rank == root else None, code, root, NS)
            assert rank != root or all(map(torch.equal, got, want)), ("gather", scale, uneven)
            out = torch.zeros_like(want[rank])
            engine.scatter(parts_of(want) if rank == root else None, *place(out), code, root, NS)
            assert torch.equal(out, want[rank]), ("scatter", scale, uneven)
        table = [[((i * 2 + j) % 4 * uneven + 1) * scale for j in range(size)] for i in range(size)]
        given = [torch.full((table[rank][j],), rank * 10.0 + j) for j in range(size)]
        came = [torch.zeros(table[i][rank]) for i in range(size)]
        engine.all_to_all(parts_of(given), parts_of(came), code, NS)
        assert all(torch.equal(each, torch.full_like(each, i * 10.0 + rank)) for i, each in enumerate(came))
engine.refuse("all_reduce", "a reason", NS)
engine.barrier(NS)
say(calls=engine.sequence())
engine.close(1.0)
""",
        ranks,
        {"KIND": kind},
    )
    harness.well(results)
    assert len({result["calls"] for result in results}) == 1


@both
def test_a_mismatch(kind: str) -> None:
    """Different calls, and parts that do not fit, raise CallMismatch on the rank that posts last."""
    results = harness.launch(
        SIMULATED
        + """
found = []
for number, (usual, odd) in enumerate((("barrier(NS)", "all_reduce(*place(x), 12, 1, NS)"),
                                       ("all_to_all(parts_of([x] * 2), parts_of(room), 12, NS)",
                                        "all_to_all(parts_of(two), parts_of(room), 12, NS)"))):
    engine, x, room = form(f"mismatch {number}"), torch.ones(3), list(torch.empty(2, 3))
    two = [x[:2].clone(), x[:2].clone()]
    if rank == 1:
        gate(f"posted {number}")
    else:
        engine._meet = engine._all_to_all = lambda *_: None
    try:
        eval("engine." + (odd if rank == 1 else usual))
        found.append("")
    except CallMismatch as mismatch:
        found.append(" ".join(mismatch.judgement.lines))
    if rank == 0:
        gate(f"posted {number}")
say(found=found)
""",
        2,
        {"KIND": kind},
    )
    harness.well(results)
    assert results[0]["found"] == ["", ""]
    assert "barrier" in results[1]["found"][0]
    assert "all_reduce" in results[1]["found"][0]
    assert "gives" in results[1]["found"][1]

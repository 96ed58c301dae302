"""Sharded models and tensors, and their checkpoints, on our backend, compared with Gloo."""

from __future__ import annotations

import pytest

from ranks.against_gloo import compare

pytestmark = pytest.mark.usefixtures("fork_server")

TRIALS = """import pathlib
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

FOLDER = pathlib.Path(os.environ["GATES"]).parent

def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 7), nn.ReLU(), nn.Linear(7, 3))

def steps(model, optimizer, seed):
    torch.manual_seed(seed)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 10)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

def whole(model):
    return [p.full_tensor() for p in model.parameters()]

def sharded(**options):
    model, mesh = net(), init_device_mesh("cpu", (size,))
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)

def try_fully_shard():
    found = []
    for options in ({}, {"reshard_after_forward": False},
                    {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}):
        model = sharded(**options)
        found += [steps(model, torch.optim.Adam(model.parameters(), lr=0.01), rank), whole(model)]
    return found

def try_fsdp1():
    found = []
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        model = FSDP(net(), device_id=torch.device("cpu"), sharding_strategy=strategy)
        found += [steps(model, torch.optim.SGD(model.parameters(), lr=0.1), rank), list(model.state_dict().values())]
    return found

def try_dtensor():
    mesh = init_device_mesh("cpu", (size,))
    start = torch.randn(7, 6)
    found = []
    for before in (Shard(0), Shard(1), Replicate(), Partial()):
        made = (DTensor.from_local(start * (rank + 1), mesh, [before]) if before.is_partial()
                else distribute_tensor(start, mesh, [before]))
        for after in (Shard(0), Shard(1), Replicate()):
            moved = made.redistribute(mesh, [after])
            found += [moved.to_local(), moved.full_tensor()]
    a = distribute_tensor(torch.randn(8, 6), mesh, [Shard(1)]).requires_grad_()
    b = distribute_tensor(torch.randn(6, 5), mesh, [Shard(0)])
    product = a @ b
    product.redistribute(mesh, [Replicate()]).to_local().pow(2).sum().backward()
    found += [product.full_tensor(), a.grad.full_tensor(), a.sum().full_tensor(), a.softmax(1).full_tensor()]
    return found + [DTensor.from_local(start * (rank + 1), mesh, [Partial(op)]).full_tensor()
                    for op in ("avg", "max", "min")]

def try_tensor_parallel():
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 6))
    parallelize_module(model, init_device_mesh("cpu", (size,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 4), whole(model)

def try_sequence_parallel():
    model = nn.ModuleDict({"norm": nn.LayerNorm(10), "up": nn.Linear(10, 16), "down": nn.Linear(16, 10)})
    plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1))}
    parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    out = model["down"](model["up"](model["norm"](torch.randn(2, 8 // size, 10))))
    out.sum().backward()
    return out, [p.grad.full_tensor() for p in model.parameters()]

def trained():
    model = sharded()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    steps(model, optimizer, rank)
    return model, optimizer, dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))

def try_checkpoint():
    where = FOLDER / torch_dist.get_backend()
    model, optimizer, state = trained()
    dcp.save(state, checkpoint_id=where)
    before = whole(model)
    with torch.no_grad():
        [p.zero_() for p in model.parameters()]
    dcp.load(state, checkpoint_id=where)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert all(map(torch.equal, before, whole(model)))
    alone = torch_dist.new_group([0])
    if rank == 0:
        state = {"model": net().state_dict()}
        dcp.load(state, checkpoint_id=where, process_group=alone)
        assert all(map(torch.equal, before, state["model"].values()))
    torch_dist.barrier()
    return before

def try_asynchronous_checkpoint():
    where = FOLDER / f"{torch_dist.get_backend()}-later"
    model, optimizer, state = trained()
    before = whole(model)
    # A group of its own: it communicates during training.
    saving = dcp.async_save(state, checkpoint_id=where, process_group=torch_dist.new_group())
    steps(model, optimizer, rank)
    saving.result()
    torch_dist.barrier()
    dcp.load(state, checkpoint_id=where)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert all(map(torch.equal, before, whole(model)))
    return before
"""

ON_A_MESH = """import collections
import threading
from torch import nn
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def on_backend(group):
    assert torch_dist.get_backend(group) == torch_dist.get_backend()
    assert (type(group).__name__ == "Group") == (torch_dist.get_backend() == "allhands")
    return group

def summed(group):
    x = torch.ones(3) * (rank + 1)
    torch_dist.all_reduce(x, group=on_backend(group))
    return x, torch_dist.get_process_group_ranks(group)

def try_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    again = DeviceMesh.from_group(mesh.get_group("tp"), "cpu")
    spread = distribute_tensor(torch.arange(32.0).view(8, 4), mesh, [Shard(0), Shard(1)])
    return [
        mesh.get_coordinate(), mesh["tp"].get_local_rank(), mesh["dp"].size(), mesh.mesh,
        summed(mesh.get_group("dp")), summed(mesh["tp"].get_group()), summed(again.get_group()),
        summed(mesh["dp", "tp"]._flatten("all").get_group()),
        spread.to_local(), spread.full_tensor(), (spread @ spread.t()).full_tensor(),
    ]

def try_2d_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 6))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(mesh["dp"].get_local_rank())
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 10)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.full_tensor() for p in model.parameters()]

def gradients(model):
    torch.manual_seed(rank)
    model(torch.randn(8, 10)).pow(2).mean().backward()
    return [p.grad.full_tensor() for p in model.parameters()]

def try_hybrid_shard():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return gradients(fully_shard(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 6)), mesh=mesh))

def try_gradients_divided_before_their_sum():
    model = fully_shard(nn.Linear(10, 6), mesh=init_device_mesh("cpu", (size,)))
    model.set_gradient_divide_factor(3.0)
    # Gloo has no PREMUL_SUM.
    model.set_force_sum_reduction_for_comms(torch_dist.get_backend() == "gloo")
    return gradients(model)

def try_pipelines():
    found = []
    for schedule in (ScheduleGPipe, Schedule1F1B):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(size)]
        stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
        running = schedule(stage, 4, loss_fn=nn.functional.mse_loss)
        torch.manual_seed(1)
        given, wanted, losses = torch.randn(8, 8), torch.randn(8, 8), []
        last = rank == size - 1
        out = running.step(*([given] if rank == 0 else []), **({"target": wanted, "losses": losses} if last else {}))
        found += [out if last else 0, losses, [p.grad for p in layers[rank].parameters()]]
    return found

def try_overlapping_groups_in_threads():
    members = [(0, 1), (1, 2), (2, 3), (0, 2, 3)]
    groups = [torch_dist.new_group(each) for each in members]
    found, problems = {}, []

    def work(number):
        try:
            for step in range(20):
                x = torch.ones(500) * (step + rank)
                torch_dist.all_reduce(x, group=on_backend(groups[number]))
                out = [torch.empty(500) for _ in members[number]]
                torch_dist.all_gather(out, x * rank, group=groups[number])
                found[number, step] = [x, out]
        except BaseException as problem:
            problems.append(repr(problem))

    threads = [threading.Thread(target=work, args=(n,)) for n, each in enumerate(members) if rank in each]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not problems, problems
    return [found[key] for key in sorted(found)]

def try_subgroups():
    mine, everyone = torch_dist.new_subgroups(2)
    other, _ = torch_dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    return len(everyone), summed(mine), summed(other), torch_dist.get_group_rank(other, rank)

def try_hierarchical_averages():
    torch.manual_seed(rank)
    net = nn.Linear(4, 4)
    net(torch.ones(4)).sum().backward()
    periods = collections.OrderedDict([(2, 2), (4, 4)])
    averager = HierarchicalModelAverager(period_group_size_dict=periods, warmup_steps=0)
    for _ in range(5):
        averager.average_parameters(net.parameters())
    return list(net.parameters())
"""


def test_sharded_models_and_tensors_equal_gloo() -> None:
    """FSDP of both kinds, DTensor, tensor parallelism and checkpoints: bit for bit with two ranks.

    A checkpoint of two ranks loads on one; one that is saved in the background has the values of when it was begun.
    """
    found = compare(TRIALS, 2)
    assert found == dict.fromkeys(found, "")
    assert len(found) == 7


def test_meshes_pipelines_and_overlapping_groups_equal_gloo() -> None:
    """Four ranks as a mesh: its groups are on our backend too, and results differ from Gloo's by rounding at most."""
    found = compare(ON_A_MESH, 4, close=1e-5)
    assert found == dict.fromkeys(found, "")
    assert len(found) == 8

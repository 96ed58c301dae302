"""What a worker finds in its environment: what torchrun sets, and what allhands' own detection reads."""

from __future__ import annotations

from collections.abc import Mapping

from ..environments.world import Address
from .job import Job

__all__ = ["MARK", "STALE", "mark", "variables"]

# Unique to one agent and inherited by everything that its workers start, whatever session or group they move to.
MARK = "ALLHANDS_COORDINATOR"

# What an outer launcher may have left and would be believed or would be wrong here.
STALE = (
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    "ALLHANDS_RECORDER_FD",
    "ALLHANDS_NODE_ADDRESS",
    "ALLHANDS_TOKEN_FILE",
)


def mark(name: str) -> tuple[str, str]:
    """Return the variable and its value that mark every process of the job whose agent is at the socket ``name``."""
    return MARK, f"unix:{name}"


def variables(
    job: Job,
    local_rank: int,
    attempt: int,
    *,
    coordinator: str,
    token: str,
    master: Address,
    address: str = "",
    environment: Mapping[str, str],
) -> dict[str, str]:
    """Return the environment of this node's worker ``local_rank`` in the start number ``attempt``.

    TORCHELASTIC_USE_AGENT_STORE is taken out: with it, torch would look for a store at MASTER_PORT that nobody serves.
    """
    rank, size, local = str(job.rank(local_rank)), str(job.world_size), str(job.local_world_size)
    found = {name: value for name, value in environment.items() if name not in STALE}
    found |= {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": str(job.node_rank),
        "GROUP_WORLD_SIZE": str(job.nodes),
        "ROLE_NAME": job.role,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": master.host,
        "MASTER_PORT": str(master.port),
        "TORCHELASTIC_RUN_ID": job.name,
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "ALLHANDS_RANK": rank,
        "ALLHANDS_LOCAL_RANK": str(local_rank),
        "ALLHANDS_WORLD_SIZE": size,
        "ALLHANDS_LOCAL_WORLD_SIZE": local,
        "ALLHANDS_NODE_RANK": str(job.node_rank),
        "ALLHANDS_JOB": job.name,
        "ALLHANDS_ATTEMPT": str(attempt),
        "ALLHANDS_RESTART": str(attempt),
        "ALLHANDS_TOKEN": token,
        MARK: coordinator,
    }
    found.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if address:
        found["ALLHANDS_NODE_ADDRESS"] = address
    if job.local_world_size > 1:
        # As torchrun: each rank would otherwise start a thread for every core, for its own use.
        found.setdefault("OMP_NUM_THREADS", "1")
    return found

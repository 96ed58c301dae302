"""LSF's jsrun."""

from __future__ import annotations

from collections.abc import Mapping

from .base import Detection, lines, text

__all__ = ["MARK", "NAME", "detect"]

NAME = "lsf"
MARK = "LSB_JOBID and JSM_NAMESPACE_RANK"


def detect(env: Mapping[str, str]) -> Detection | None:
    """Recognise a task that jsrun started."""
    job = text(env, "LSB_JOBID")
    if not job or not text(env, "JSM_NAMESPACE_RANK"):
        return None
    found = Detection(NAME, "LSB_JOBID and JSM_NAMESPACE_RANK are set by jsrun", env)
    found.take("rank", "JSM_NAMESPACE_RANK").take("world_size", "JSM_NAMESPACE_SIZE")
    found.take("local_rank", "JSM_NAMESPACE_LOCAL_RANK").take("local_world_size", "JSM_NAMESPACE_LOCAL_SIZE")
    # Several jsruns may share a job; PMIx, if present, names each of them.
    part = text(env, "PMIX_NAMESPACE")
    found.call(f"lsf-{job}-{part}" if part else f"lsf-{job}", f"LSB_JOBID={job}" + (f" and {part}" if part else ""))
    return found.meet(lambda: _host(env)) if text(env, "LSB_DJOB_RANKFILE") else found.meet()


def _host(env: Mapping[str, str]) -> tuple[str, str]:
    """Return the second line: the first is the launch node, where no rank runs."""
    hosts = lines(env, "LSB_DJOB_RANKFILE", "set MASTER_ADDR to the host of rank 0")
    return (hosts[1] if len(hosts) > 1 else ""), "the second line of LSB_DJOB_RANKFILE"

"""The part of forming a group that is torch's: what it is given, how long it may take, and why it failed."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from ..engines.cuda import nccl
from ..engines.gloo import connections
from ..errors import AllhandsError, error, fail
from .session import Session

__all__ = ["check_timeout", "current_device", "default_backend", "form_by", "not_formed", "prepare"]

# How often to look at the clock, and how long torch may take to notice the group's end.
_LOOK_S, _RAISE_S = 0.05, 0.3


def check_timeout(timeout: timedelta | float | None) -> timedelta | None:
    """Return the timeout as torch takes it; raise for one that makes no sense. Seconds are taken too."""
    if timeout is None or isinstance(timeout, timedelta):
        limit = timeout
    elif isinstance(timeout, int | float):
        limit = timedelta(seconds=timeout)
    else:
        raise TypeError(f"timeout must be a datetime.timedelta or a number of seconds, not {type(timeout).__name__}")
    if limit is not None and limit <= timedelta(0):
        raise fail("invalid-argument", f"timeout={timeout} leaves no time", who="this process", fix="pass more than 0")
    return limit


def default_backend() -> str:
    """Return the backend for who names none: our own where there are only CPUs.

    With GPUs, torch's for both kinds of tensor; its own default takes the GPU's and refuses CPU tensors.
    """
    return "cpu:gloo,cuda:nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "allhands"


def current_device(device_id: torch.device | int | None) -> torch.device | None:
    """Return the GPU that this rank uses: the one given, else the current one where there is one, else None."""
    if isinstance(device_id, int):
        return torch.device("cuda", device_id)
    if device_id is None and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())
    return device_id


def prepare(session: Session, name: str, local_world_size: int | None) -> None:
    """Point Gloo at the interface that leads to the peers, for as long as the group lives."""
    rank = session.member.rank
    chosen = os.environ.get(connections.IFNAME, "")
    if chosen:
        for part in chosen.split(","):
            connections.check_interface(part, one_host=session.one_host, rank=rank)
    else:
        interface = (
            connections.loopback_interface() if session.one_host else connections.interface_of(session.own_address)
        )
        if interface:
            os.environ[connections.IFNAME] = interface
            session.undo.append(_unset_interface)
    if "nccl" in name and session.one_host and session.member.world_size > 1:
        nccl.check_shared_memory(local_world_size or session.member.world_size, rank)


def _unset_interface() -> None:
    os.environ.pop(connections.IFNAME, None)


def not_formed(session: Session, name: str, problem: Exception) -> AllhandsError:
    """Say why torch could not form the group although every rank answered, to this rank and to the others."""
    explained = session.explain(problem, "init_process_group", session.formed_at)
    if explained is not None:
        return explained
    if isinstance(problem, AllhandsError):
        return error(session.member.end_group(problem.diagnosis))
    first = (str(problem).splitlines() or [""])[0]
    found = fail(
        "engine-failed",
        f"torch could not form the {name or 'default'} group although every rank answered the roll call",
        who=f"rank {session.member.rank} ({socket.gethostname()}, pid {os.getpid()})",
        why=f"{type(problem).__name__}: {first}",
        fix="torch refused the arguments: check backend=, device_id= and pg_options="
        if isinstance(problem, ValueError | TypeError | AssertionError)
        else "ranks connect to each other on ports above 1023: open them between the hosts; check GLOO_SOCKET_IFNAME "
        "and NCCL_SOCKET_IFNAME",
        ranks=(session.member.rank,),
        hosts=(socket.gethostname(),),
    )
    return error(session.member.end_group(found.diagnosis))


def form_by(deadline: float, session: Session, form: Callable[[], None]) -> None:
    """Run ``form`` beside this thread, and leave it behind where it outlasts the deadline or the group's end.

    Gloo waits for a peer that vanished while it connects five times as long as it is told to, and cannot be
    interrupted there. It is told the timeout of collectives, because point to point keeps what it is told first.
    """
    problems: list[BaseException] = []
    done, left_behind = threading.Event(), threading.Event()

    def run() -> None:
        try:
            form()
        except BaseException as problem:  # noqa: BLE001  # raised in the caller's thread
            problems.append(problem)
        done.set()
        if left_behind.is_set() and not problems:
            dist.destroy_process_group()  # Too late: everyone was told that there is no group.

    threading.Thread(target=run, name="allhands-form", daemon=True).start()
    ended_at: float | None = None
    while not done.wait(_LOOK_S):
        now = time.monotonic()
        if ended_at is None and session.member.verdict is not None:
            ended_at = now
        # Once the group is over, store and connections raise by themselves, if it is them that it waits for.
        if now >= deadline or (ended_at is not None and now - ended_at >= _RAISE_S):
            left_behind.set()
            raise RuntimeError("Timed out waiting for torch to connect the group")
    if problems:
        raise problems[0]

"""The catalogue of diagnoses: every slug, the exception that carries it, and its page.

A slug never changes its meaning, its page lists what to do, and a test provokes it.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CATALOGUE", "Entry", "closest", "page", "title"]


class Entry(NamedTuple):
    """One kind of finding: the exception class (by name, in ``errors``) and a one-line meaning."""

    slug: str
    error: str
    meaning: str


_ENTRIES = (
    # Identity of this process.
    Entry("rank-out-of-range", "WorldError", "a rank is not between 0 and world size - 1"),
    Entry("launcher-mismatch", "WorldError", "two sources disagree about this process's rank or world size"),
    Entry("incomplete-environment", "WorldError", "the environment gives only part of rank, world size and address"),
    Entry("not-launched", "WorldError", "the job asks for several processes, but its launcher was not used"),
    Entry("node-not-process", "WorldError", "RANK counts nodes, but several processes per node are intended"),
    # Reaching the coordinator.
    Entry("address-unresolvable", "ConnectError", "the coordinator's host name has no address"),
    Entry("name-server-silent", "ConnectError", "a name server does not answer"),
    Entry("address-not-local", "ConnectError", "rank 0 was told to listen on an address of another machine"),
    Entry("connection-refused", "ConnectError", "the coordinator's host answers, but nothing listens on the port"),
    Entry("connection-filtered", "ConnectError", "packets to the coordinator disappear: a firewall, or no such host"),
    Entry("no-route", "ConnectError", "this machine has no route to the coordinator"),
    Entry("wrong-service", "ConnectError", "something that is not an allhands coordinator answers on the port"),
    Entry("port-in-use", "ConnectError", "rank 0 cannot listen on the port: another process holds it"),
    Entry(
        "loopback-advertised", "ConnectError", "the coordinator's address is loopback, but ranks are on several hosts"
    ),
    Entry("interface-mismatch", "ConnectError", "the requested network interface has no route to the peers"),
    Entry("stale-file", "ConnectError", "the file of init_method file:// has other content, or cannot be used"),
    Entry("file-in-use", "ConnectError", "the file of init_method file:// belongs to a job that is running"),
    Entry("not-authorised", "ConnectError", "the token is missing or is not the job's token"),
    Entry("coordinator-silent", "ConnectError", "the coordinator accepted the connection but stopped answering"),
    # The roll call.
    Entry("missing-ranks", "RollCallTimeout", "not every rank answered the roll call in time"),
    Entry("duplicate-rank", "RollCallRefused", "two processes claim the same rank"),
    Entry("world-size-mismatch", "RollCallRefused", "ranks disagree about the world size"),
    Entry("backend-mismatch", "RollCallRefused", "ranks request different backends"),
    Entry("version-mismatch", "RollCallRefused", "ranks run versions that cannot work together"),
    Entry("device-mismatch", "RollCallRefused", "ranks use different kinds of device"),
    Entry("job-mismatch", "RollCallRefused", "ranks of different jobs use one address"),
    # What the group runs on.
    Entry("nccl-missing", "EngineMissing", "nccl was requested, but this torch has no NCCL"),
    Entry("mpi-missing", "EngineMissing", "mpi was requested, but no MPI can be used here"),
    Entry("gpu-missing", "EngineMissing", "a GPU was requested, but this process sees none"),
    Entry("gpu-shared", "EngineMissing", "several ranks use the same GPU, which NCCL refuses"),
    Entry("backend-unknown", "EngineMissing", "the requested backend does not exist"),
    Entry("fd-limit", "ResourceError", "too few file descriptors for this many ranks"),
    Entry("shm-too-small", "ResourceError", "shared memory is too small for the group"),
    Entry("namespaces-refused", "ResourceError", "a benchmark cannot create the network namespaces that replace hosts"),
    Entry("store-full", "ResourceError", "the job's key-value store is full"),
    # Life and death of a group.
    Entry("peer-failed", "PeerFailed", "a rank raised an exception"),
    Entry("peer-lost", "PeerLost", "a rank's process or connection is gone"),
    Entry("peer-silent", "PeerSilent", "a rank is connected but does not answer"),
    Entry("collective-timeout", "CollectiveTimeout", "not every rank called the collective in time"),
    Entry("collective-mismatch", "CollectiveMismatch", "ranks of one group made different calls"),
    Entry("coordinator-lost", "CoordinatorLost", "the coordinator's process or connection is gone"),
    Entry("engine-failed", "EngineFailed", "torch could not form the group although every rank answered"),
    Entry("spawn-failed", "SpawnFailed", "a rank that allhands.spawn started raised, exited or was killed"),
    Entry("store-timeout", "StoreTimeout", "a key did not appear in the store in time"),
    Entry("not-initialised", "NotInitialised", "there is no process group"),
    Entry("already-initialised", "AlreadyInitialised", "there is a process group already"),
    Entry("already-destroyed", "AlreadyDestroyed", "the process group was destroyed"),
    Entry("forked-process", "NotInitialised", "this process was forked from a rank and is no member of its group"),
    Entry("invalid-argument", "ArgumentError", "an argument is invalid"),
    # Training.
    Entry("unused-parameters", "TrainingError", "parameters have no gradient on some ranks"),
    Entry("parameters-differ", "TrainingError", "the ranks' models are not the same"),
    Entry("module-changed", "TrainingError", "a module's parameters changed after it was wrapped"),
    Entry("gradient-twice", "TrainingError", "a parameter received a gradient after its reduction"),
    Entry("backward-unfinished", "TrainingError", "a backward pass stopped during its reductions"),
    # Found only by `allhands doctor`: no rank raises them, so they have no exception of their own.
    Entry("name-shadowed", "AllhandsError", "the hosts file and the name server disagree about a name"),
    Entry("ports-filtered", "AllhandsError", "the ports that Gloo and NCCL use cannot be reached"),
    Entry("mtu-mismatch", "AllhandsError", "large packets are lost, or machines use different packet sizes"),
    Entry("clock-skewed", "AllhandsError", "the clocks of two machines differ"),
    Entry("memory-low", "AllhandsError", "too little memory for the ranks of this machine"),
    Entry("process-limit", "AllhandsError", "the limit on processes and threads is nearly reached"),
    Entry("too-few-cores", "AllhandsError", "more ranks or threads than cores"),
    Entry("stale-worker", "AllhandsError", "workers of an earlier job run on although their launcher is gone"),
    Entry("driver-mismatch", "AllhandsError", "the GPU driver is too old for this torch"),
    Entry("gpu-busy", "AllhandsError", "other processes use GPUs of this machine"),
    Entry("debugging-left", "AllhandsError", "variables for debugging are set"),
    Entry("rank-behind", "AllhandsError", "ranks of a running job wait for a rank that has not made the call"),
)

CATALOGUE: dict[str, Entry] = {entry.slug: entry for entry in _ENTRIES}


def title(slug: str) -> str:
    """Return the name of the exception that carries ``slug``."""
    return CATALOGUE[slug].error


def page(slug: str) -> str:
    """Return the page on ``slug`` as Markdown; KeyError for a slug that is not in the catalogue."""
    # Here and below: the launcher and every rank import this module, and hardly ever need a page.
    from importlib import resources

    entry = CATALOGUE[slug]
    return (resources.files(__package__) / "pages" / f"{entry.slug}.md").read_text(encoding="utf-8")


def closest(word: str) -> list[str]:
    """Return the slugs that look most like ``word``, for "did you mean"."""
    import difflib

    return difflib.get_close_matches(word, CATALOGUE, n=3, cutoff=0.4)

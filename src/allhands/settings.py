"""The one place where `ALLHANDS_*` environment variables are read; `TABLE` and `LAUNCHER_TABLE` list them all.

Imports nothing slow: the launcher reads it before it starts workers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["LAUNCHER_TABLE", "TABLE", "Settings", "read"]

# name -> meaning, for `allhands help environment` and docs/environment.md.
TABLE: dict[str, str] = {
    "ALLHANDS_TOKEN": "the job's secret; every rank must have the same one",
    "ALLHANDS_TOKEN_FILE": "a file (mode 0600) that holds the job's secret",
    "ALLHANDS_JOB": "the job's name; ranks of different jobs refuse each other",
    "ALLHANDS_ATTEMPT": "number of this start of the job, from 0; the launcher counts restarts in it",
    "ALLHANDS_BIND": "address that rank 0's coordinator binds, if it differs from the one that peers connect to",
    "ALLHANDS_TLS_CERT": "certificate chain (PEM) of the coordinator; turns TLS on",
    "ALLHANDS_TLS_KEY": "private key (PEM) of that certificate",
    "ALLHANDS_TLS_CA": "certificate authority (PEM) by which members check the coordinator",
    "ALLHANDS_DESTROY_TIMEOUT": "seconds that destroy_process_group waits for peers (default 5)",
    "ALLHANDS_SLOT_KIB": "KiB of a slot of shared memory; a group of n ranks has 4 n slots (default 1024)",
    "ALLHANDS_HELPER_THREADS": "helper threads of each rank, up to 3 (default: one per spare core); rank 0's counts",
    "ALLHANDS_ENGINE": "shm (default), gloo or mpi: what moves CPU tensors; rank 0's setting counts",
    "ALLHANDS_CUDA": "auto, nccl, cuda_ipc or host: the way of CUDA tensors on one host; rank 0's setting counts",
    "ALLHANDS_MIXED_VERSIONS": "1 allows ranks of different torch versions in one group",
}

# The same for variables that only the launcher sets, for the processes that it starts.
LAUNCHER_TABLE: dict[str, str] = {
    "ALLHANDS_RANK": "rank of this process",
    "ALLHANDS_WORLD_SIZE": "number of ranks of the job",
    "ALLHANDS_LOCAL_RANK": "rank of this process on its node",
    "ALLHANDS_LOCAL_WORLD_SIZE": "number of ranks on this node",
    "ALLHANDS_NODE_RANK": "number of this node",
    "ALLHANDS_COORDINATOR": "address of the launcher's coordinator: tcp://HOST:PORT or unix:NAME",
    "ALLHANDS_NODE_ADDRESS": "address by which other nodes reach this one",
    "ALLHANDS_RESTART": "number of restarts of the job so far",
    "ALLHANDS_RECORDER_FD": "descriptor of the flight recorder, and the pid that it belongs to",
}


class Settings(NamedTuple):
    """The values of the environment, typed. `environments.launchers` reads the launcher's variables."""

    token: str = ""
    token_file: str = ""
    job: str = ""
    attempt: int = 0
    recorder_fd: str = ""
    bind: str = ""
    node_address: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    destroy_timeout: float = 5.0
    slot_kib: int = 1024
    # Negative: one per spare core.
    helper_threads: int = -1
    mixed_versions: bool = False
    engine: str = ""
    cuda: str = ""

    def __repr__(self) -> str:
        """Leave out the secret."""
        shown = (f"{name}={value!r}" for name, value in self._asdict().items() if name != "token")
        return f"Settings({', '.join(shown)})"

    def secret(self) -> bytes:
        """Return the job's token, b"" if none is configured."""
        if self.token:
            return self.token.encode()
        if not self.token_file:
            return b""
        from pathlib import Path

        from .errors import AllhandsError, fail

        path = Path(self.token_file)

        def refused(what: str, fix: str, why: str = "") -> AllhandsError:
            return fail("not-authorised", f"the token file {path} {what}", who="this process", why=why, fix=fix)

        try:
            mode = path.stat().st_mode & 0o777
            if mode & 0o077:
                why = "a secret that other users of this machine can read protects nothing"
                raise refused(f"can be read by others (mode {mode:04o})", f"chmod 600 {path}", why)
            secret = path.read_bytes().strip()
        except OSError as error:
            fix = "create it, or unset ALLHANDS_TOKEN_FILE"
            raise refused("cannot be read", fix, error.strerror or str(error)) from error
        if not secret:
            raise refused("is empty", f"write a secret into it: head -c 32 /dev/urandom | base64 > {path}")
        return secret


def read(env: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from ``env`` (the process's environment by default)."""
    source = os.environ if env is None else env
    values: dict[str, object] = {}
    for setting, default in Settings._field_defaults.items():
        name = f"ALLHANDS_{setting.upper()}"
        text = source.get(name, "").strip()
        if not text:
            continue
        try:
            match default:
                case bool():
                    values[setting] = text.lower() not in {"0", "false", "no"}
                case int() | float():
                    values[setting] = _number(text, type(default))
                case _:
                    values[setting] = text
        except ValueError as error:
            from .errors import fail

            # A token never takes this path (it is text), so no secret is echoed here.
            raise fail(
                "invalid-argument",
                f"{name}={text!r} is not a number from 0 up",
                who="this process's environment",
                fix=f"unset {name}, or give a number: {TABLE[name]}",
            ) from error
    return Settings(**values)  # type: ignore[arg-type]  # the field types were matched above


def _number(text: str, kind: type[int | float]) -> int | float:
    number = kind(text)
    if not 0 <= number < float("inf"):
        raise ValueError(text)
    return number

"""Install what `backend="mpi"` and `allhands bench --against mpi` need: Open MPI (Debian's packages), mpi4py (by pip).

Does nothing where all is there. Installing packages needs root; without it, this says what to type and exits 1.

    python scripts/install_mpi.py
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["PACKAGES", "main"]

# The second has the library and what mpi4py is compiled against, where there is no wheel of it.
PACKAGES = ("openmpi-bin", "libopenmpi-dev")

_CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"


def main() -> int:
    """Install what is missing; return the exit status."""
    return _packages() or _modules()


def _packages() -> int:
    if shutil.which("mpirun"):
        return 0
    words = f"apt-get install --yes {' '.join(PACKAGES)}"
    if not shutil.which("apt-get"):
        print("mpirun is missing, and so is apt-get: install Open MPI (or another MPI) by this system's own means")
        return 1
    if os.geteuid() != 0:
        print(f"mpirun is missing, and installing it needs root. Type:\n  sudo apt-get update && sudo {words}")
        print("or measure without it: make bench AGAINST=gloo")
        return 1
    print(f"mpirun is missing; installing it: {words}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update", "--quiet"], words.split()):
        if status := subprocess.run(command, env=environment, check=False).returncode:
            print(f"`{' '.join(command)}` failed with status {status}")
            return 1
    return 0


def _modules() -> int:
    missing = [name for name in ("mpi4py", "numpy") if importlib.util.find_spec(name) is None]
    if not missing:
        return 0
    print(f"{' and '.join(missing)} missing; installing by pip into {sys.prefix}", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return subprocess.run([*command, "-c", str(_CONSTRAINTS), *missing], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

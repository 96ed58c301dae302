"""Run a command on a host of the laboratory: `python command.py COMMAND...`, with the host in the variable HOST.

RESOLVER names a file that is to be that host's /etc/resolv.conf.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from hosts.enter_host import enter, lay

enter()
resolver = os.environ.pop("RESOLVER", "")
if resolver:
    lay(resolver, "/etc/resolv.conf")
del os.environ["HOST"]
os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606  # the command is the test's own

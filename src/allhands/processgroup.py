"""The backend that torch calls `allhands`: the engine behind a group, whoever asks torch for one."""

from __future__ import annotations

from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from . import _torch, ending, lifecycle
from . import session as _session

__all__ = ["create"]


def create(options: Any, pg_options: Any) -> Any:
    """Make the backend of one group; torch calls this through `_entry`.

    Inside `allhands.init_process_group` the roll call is already done. Where torch's own
    `init_process_group("allhands")` was called it is done here, and torch's store is the place to meet.
    """
    del pg_options  # Gloo takes none.
    store = options.store
    session = _session.current()
    if not options.global_ranks_in_group and not lifecycle.forming():
        # torch forms a default group by itself. A session that is left over belongs to one that it destroyed.
        ending.end(wait_s=0.0)
        session = lifecycle.attend(store, options.group_rank, options.group_size, options.timeout)
        store = session.store
    elif options.global_ranks_in_group and session is not None:
        # torch's own store where torch formed the default group; on ours, connections can be ended.
        store = PrefixStore(f"{options.group_id}/", session.store)
    return _torch.gloo(store, options.group_rank, options.group_size, options.timeout)

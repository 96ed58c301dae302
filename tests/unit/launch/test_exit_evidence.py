from __future__ import annotations

from pathlib import Path

from allhands.launch.exit_evidence import find_oom_kill, memory_limit, oom_kill_count

LOG = [
    "python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/a,task_memcg=/a,task=python,pid=812,uid=0",
    "Memory cgroup out of memory: Killed process 812 (python) total-vm:171928kB, anon-rss:150000kB, file-rss:0kB",
    "Out of memory: Kill process 77 (python3) score 900 or sacrifice child",
    "Killed process 78 by hand",
]


def test_find_oom_kill() -> None:
    """The line that names the process is found, in the format of old and new kernels, and no other."""
    assert find_oom_kill(812, LOG) == LOG[2]
    assert find_oom_kill(77, LOG) == LOG[3]
    assert find_oom_kill(78, LOG) == ""
    assert find_oom_kill(81, LOG) == ""


def test_cgroup_versions(tmp_path: Path) -> None:
    """Kills and limits are read from version 2 and version 1, and absent files give none."""
    group = str(tmp_path)
    assert (oom_kill_count(group), memory_limit(group)) == (0, None)
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    (tmp_path / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert (oom_kill_count(group), memory_limit(group)) == (2, None)
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 3\noom_kill 3\noom_group_kill 0\n")
    (tmp_path / "memory.max").write_text("157286400\n")
    assert (oom_kill_count(group), memory_limit(group)) == (3, 157286400)

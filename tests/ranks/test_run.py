"""`allhands run`: starting scripts, modules and programs, their environment, and restarts."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from ranks.runner import TWO_GROUPS, run, running

SHOW = """
import json, os, sys
print(json.dumps({"env": dict(os.environ), "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__}))
"""

GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(2) * (dist.get_rank() + 1)
dist.all_reduce(x)
print("sum", x.tolist())
dist.destroy_process_group()
"""


def test_environment() -> None:
    """Workers have torchrun's and allhands' variables, and the script runs as if the interpreter had started it."""
    ran = run(
        SHOW, arguments=("--lr", "1", "-x"), ranks=2, env={"PET_RDZV_ID": "night", "TORCHELASTIC_USE_AGENT_STORE": "1"}
    )
    assert ran.code == 0, ran.err
    for rank in range(2):
        said = json.loads(ran.lines(rank)[0])
        env = said["env"]
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RUN_ID": "night",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "OMP_NUM_THREADS": "1",
            "ALLHANDS_RANK": str(rank),
            "ALLHANDS_LOCAL_RANK": str(rank),
            "ALLHANDS_WORLD_SIZE": "2",
            "ALLHANDS_NODE_RANK": "0",
            "ALLHANDS_JOB": "night",
            "ALLHANDS_ATTEMPT": "0",
            "ALLHANDS_RESTART": "0",
        }
        assert {name: env.get(name) for name in expected} == expected
        assert int(env["MASTER_PORT"]) > 0
        assert env["ALLHANDS_COORDINATOR"].startswith("unix:allhands-")
        assert len(env["ALLHANDS_TOKEN"]) >= 32
        assert "TORCHELASTIC_USE_AGENT_STORE" not in env
        script = said["file"]
        assert said["argv"] == [script, "--lr", "1", "-x"]
        assert said["path"] == str(Path(script).parent)
        assert said["name"] == "__main__"


def test_torchrun_command_line() -> None:
    """Torchrun's spellings, older ones too, start a script that knows only torch, with rank 0's own store."""
    ran = run(
        GLOO,
        "--nproc_per_node=2",
        "--standalone",
        "--rdzv-backend",
        "c10d",
        "--rdzv_id=7",
        "--max_restarts=0",
        "--monitor-interval",
        "1",
    )
    assert ran.code == 0, ran.err
    assert [ran.lines(rank) for rank in range(2)] == [["sum [3.0, 3.0]"]] * 2


def test_allhands_script() -> None:
    """A bare init_process_group() connects to the launcher's coordinator, for each of two groups."""
    ran = run(TWO_GROUPS)
    assert ran.code == 0, ran.err
    assert [ran.lines(rank) for rank in range(2)] == [["sum [3.0, 3.0] 2"] * 2] * 2
    assert ran.report["ranks"][0]["last_call"] == "all_reduce SUM of float32[2] at train.py:5: done"


def test_init() -> None:
    """With --init the script only asks for its rank; the group is ended after it."""
    ran = run(
        "import torch, torch.distributed as d; x = torch.ones(1); d.all_reduce(x); print(d.get_rank(), x.item())",
        "--init",
    )
    assert ran.code == 0, ran.err
    assert [ran.lines(rank) for rank in range(2)] == [["0 2.0"], ["1 2.0"]]


def test_module_and_program() -> None:
    """-m runs a module as python -m does, --no-python a program; both see their arguments."""
    ran = run(SHOW, "-m", ranks=1, script=False, arguments=("train", "a"))
    assert ran.code == 0, ran.err
    said = json.loads(ran.lines(0)[0])
    assert said["argv"] == [said["file"], "a"]
    assert Path(said["path"]) == Path(said["file"]).parent
    assert said["name"] == "__main__"
    ran = run("", "--no-python", script=False, arguments=("sh", "-c", "echo $RANK of $WORLD_SIZE; exit $((RANK * 5))"))
    assert (ran.code, ran.lines(0), ran.lines(1)) == (5, ["0 of 2"], ["1 of 2"])


def test_directory_with_main() -> None:
    """A directory (or an archive) with a __main__.py is run as the interpreter runs it."""
    with running("", ranks=1) as job:
        job.result()
        folder = job.folder / "app"
        folder.mkdir()
        (folder / "part.py").write_text("word = 'part'")
        (folder / "__main__.py").write_text("import part, sys; print(part.word, sys.argv[1:], __name__)")
        ran = run("", ranks=1, script=False, arguments=(str(folder), "x"))
    assert (ran.code, ran.lines(0)) == (0, ["part ['x'] __main__"]), ran.err


def test_hooks_of_the_script() -> None:
    """An excepthook that the script set is called with its exception, then exit handlers, then the exit status is 1."""
    source = """
    import atexit, sys
    atexit.register(print, "at exit")
    sys.excepthook = lambda kind, problem, trace: print("hook", kind.__name__, trace.tb_frame.f_code.co_name)
    raise ValueError
    """
    ran = run(source, ranks=1)
    assert (ran.code, ran.lines(0)) == (1, ["hook ValueError <module>", "at exit"]), ran.err


def test_multiprocessing_and_pickle() -> None:
    """Classes and functions of the script can be pickled, and multiprocessing's spawn finds them in a child."""
    source = """
    import multiprocessing, pickle

    class Thing:
        pass

    def double(x):
        return 2 * x

    if __name__ == "__main__":
        assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(double, [1, 2]))
    """
    ran = run(source, ranks=1)
    assert (ran.code, ran.lines(0)) == (0, ["[2, 4]"]), ran.err


def test_children_of_a_worker_do_not_inherit_its_recorder() -> None:
    """Processes that a worker forks or starts do not write to the flight recorder that the launcher reads."""
    source = """
    import os, subprocess, sys
    from allhands.observe import flight_recorder
    given = int(os.environ["ALLHANDS_RECORDER_FD"].split(":")[0])
    print("given", flight_recorder._mine()[0] == given, flush=True)
    if os.fork() == 0:
        print("fork", flight_recorder._given(), flush=True)
        os._exit(0)
    os.wait()
    code = "from allhands.observe import flight_recorder; print('exec', flight_recorder._given())"
    subprocess.run([sys.executable, "-c", code], check=True)
    """
    ran = run(source, ranks=1)
    assert sorted(ran.lines(0)) == ["exec None", "fork None", "given True"], ran.err


def test_port_in_use() -> None:
    """Where node 0 cannot listen, the error names the port, and no worker is left."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        ran = run(SHOW, "--nnodes", "2", "--node-rank", "0", "--coordinator", place, ranks=1)
    assert ran.code == 1
    assert "[port-in-use]" in ran.err
    assert "Traceback" not in ran.err


def test_restart() -> None:
    """--max-restarts restarts all ranks with a new attempt number, until an attempt succeeds."""
    source = """
    import os, sys
    print("attempt", os.environ["ALLHANDS_RESTART"], os.environ["TORCHELASTIC_RESTART_COUNT"])
    if os.environ["ALLHANDS_RESTART"] == "0" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    """
    ran = run(source, "--max-restarts", "2", "--restart-if", "signal,lost")
    assert ran.code == 0, ran.err
    assert "allhands: restart 1 of 2" in ran.err
    assert [ran.lines(rank)[-1] for rank in range(2)] == ["attempt 1 1"] * 2
    assert ran.report["attempt"] == 1


def test_restart_if() -> None:
    """With --restart-if signal an exception ends the job at once."""
    ran = run("raise ValueError('no')", "--max-restarts", "3", "--restart-if", "signal", ranks=1)
    assert (ran.code, ran.err.count("restart"), ran.report["attempt"]) == (1, 0, 0)


def test_max_restarts() -> None:
    """A job that fails every time fails with the last verdict."""
    ran = run("import sys; sys.exit(7)", "--max-restarts", "1", ranks=1)
    assert (ran.code, ran.report["attempt"]) == (7, 1)


def test_spawn_under_the_launcher() -> None:
    """A rank that spawns ranks of its own has a group with them that is not the job's; then it takes part in that."""
    source = """
    import os
    import torch
    import allhands as dist

    def child(rank, parent):
        assert os.environ["WORLD_SIZE"] == "2"
        with dist.process_group(timeout=60):
            x = torch.tensor([parent + rank])
            dist.all_reduce(x)
            return int(x)

    if __name__ == "__main__":
        rank = int(os.environ["RANK"])
        print("spawned", dist.spawn(child, (10 * rank,), nprocs=2, start_method="fork", results=True))
        with dist.process_group(timeout=60):
            x = torch.tensor([rank + 1])
            dist.all_reduce(x)
            print("sum", int(x))
    """
    ran = run(source)
    assert ran.code == 0, ran.err
    assert [ran.lines(rank) for rank in range(2)] == [["spawned [1, 1]", "sum 3"], ["spawned [21, 21]", "sum 3"]]

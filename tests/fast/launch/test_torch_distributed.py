"""The launcher for torch.distributed, beside the real torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from support import nest, warm
from support.launcher import TORCH, launched, write
from support.processes import free_port, until

STATE = """
    import json, os, sys
    with open(f"{sys.argv[1]}-{os.environ['RANK']}.json", "w") as f:
        json.dump({"argv": sys.argv, "env": dict(os.environ), "python": sys.executable}, f)
    print("hello from", os.environ["RANK"])
"""
RESTARTS = """
    import os, sys, time
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    print("attempt", attempt, flush=True)
    open("began-" + rank, "w").close()
    if attempt == "0" and rank == "1":
        while not os.path.exists("began-0"):
            time.sleep(0.01)
        sys.exit(3)
    time.sleep(600 if attempt == "0" else 0)
"""
MEETS = """
    import os, socket, time
    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if os.environ["RANK"] == "0":  # as torch's store does
        with socket.create_server(place) as listener, listener.accept()[0] as peer:
            peer.sendall(b"of the same job " + os.environ["TEST_JOB"].encode())
    else:
        while (s := socket.socket()).connect_ex(place):
            s.close()
            time.sleep(0.01)
        print(s.makefile().read())
"""
SECRET = "a secret of two machines"
OF_THE_AGENT = {"MASTER_ADDR", "MASTER_PORT"} | {
    f"TORCHELASTIC_{name}" for name in ("ERROR_FILE", "RUN_ID", "SIGNALS_TO_HANDLE", "USE_AGENT_STORE")
}
RANKS = ("RANK", "LOCAL_", "WORLD_", "GROUP_", "ROLE_", "MASTER_", "OMP_", "TORCH")


def state(folder: Path, name: str, rank: int) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads((folder / f"{name}-{rank}.json").read_text())
    return found


def test_ranks_get_the_variables_of_torchrun_and_unchanged_arguments(tmp_path: Path) -> None:
    script = write(tmp_path, "state.py", STATE)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.delenv("PYTHONUNBUFFERED", raising=False)
        ours = ["--nproc-per-node", "2", "--", "state.py", "ours", "--", "--nproc-per-node", "é ü"]
        job = stack.enter_context(launched(TORCH, *ours, folder=tmp_path))
        module = stack.enter_context(launched(TORCH, "--standalone", "-m", "state", "module", "-m", folder=tmp_path))
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", script, "theirs"]
        done = warm.run(torchrun, cwd=tmp_path)
        assert done.returncode == 0, done.stdout
        assert job.wait() == 0
        assert module.wait() == 0
    assert sorted(job.out.splitlines()) == ["[rank=0] hello from 0", "[rank=1] hello from 1"]
    assert job.err == ""
    assert module.out == "[rank=0] hello from 0\n"
    assert module.err == "[launcher] no GPU is visible: starting 1 process (--nproc-per-node N starts N)\n"
    assert state(tmp_path, "module", 0)["argv"][1:] == ["module", "-m"]
    for rank in range(2):
        mine, theirs = state(tmp_path, "ours", rank), state(tmp_path, "theirs", rank)
        assert mine["argv"] == ["state.py", "ours", "--", "--nproc-per-node", "é ü"]
        added = {key: mine["env"][key] for key in mine["env"].keys() - theirs["env"].keys() - {"TEST_JOB"}}
        secret = added.pop("DET_CORE_SECRET")
        assert added.pop("DET_CORE_COMMAND").endswith(
            "torch_distributed --nproc-per-node 2 -- state.py ours -- --nproc-per-node 'é ü'"
        )
        assert added == {"USE_TORCH_DISTRIBUTED": "True", "PYTHONUNBUFFERED": "1"}
        assert secret == state(tmp_path, "ours", 0)["env"]["DET_CORE_SECRET"]
        same = {key for key in theirs["env"] if key.startswith(RANKS) and key not in OF_THE_AGENT}
        assert len(same) > 12 and {k: mine["env"].get(k) for k in same} == {k: theirs["env"][k] for k in same}
        assert mine["env"]["MASTER_ADDR"] == "127.0.0.1" and theirs["env"]["MASTER_ADDR"] in ("127.0.0.1", "localhost")


def test_torchrun_restarts_ranks_under_wrap_rank(tmp_path: Path) -> None:
    write(tmp_path, "restarts.py", RESTARTS)
    before = nest.running()
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    wrapped = ["--no-python", sys.executable, "-m", "det_core.launch.wrap_rank", "RANK", "restarts.py"]
    done = warm.run([*torchrun, *wrapped], cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    until(lambda: nest.running() <= before)
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("[rank="))
    assert said == [f"[rank={r}] attempt {a}" for r, a in ((0, 0), (0, 1), (1, 0), (1, 1))]


def test_ranks_of_two_jobs_meet_at_different_ports(tmp_path: Path) -> None:
    write(tmp_path, "meets.py", MEETS)
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(launched(TORCH, "--nproc-per-node", "2", "meets.py", folder=tmp_path))
            for _ in range(2)
        ]  # fmt: skip
        assert [job.wait() for job in jobs] == [0, 0]
    assert [job.out for job in jobs] == [f"[rank=1] of the same job {job.job}\n" for job in jobs]


def test_two_nodes_know_their_chief_and_share_the_secret(tmp_path: Path) -> None:
    write(tmp_path, "state.py", STATE)
    port = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                launched(
                    TORCH, "--nnodes", "2", "--node-rank", str(node), *port, "--nproc-per-node", "1",
                    "state.py", "two", folder=tmp_path, DET_CORE_SECRET=SECRET,
                )
            )
            for node in range(2)
        ]  # fmt: skip
        assert [job.wait() for job in nodes] == [0, 0]
    assert [job.out for job in nodes] == ["[rank=0] hello from 0\n", "[rank=1] hello from 1\n"]
    for rank in range(2):
        env = state(tmp_path, "two", rank)["env"]
        assert (env["DET_CORE_SECRET"], env["DET_CHIEF_IP"], env["GROUP_RANK"]) == (SECRET, "127.0.0.1", str(rank))


def test_help_for_a_closed_pipe_ends_quietly() -> None:
    with subprocess.Popen([*TORCH, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stderr is not None
        assert job.stdout.readline().startswith("usage:")
        job.stdout.close()
        assert job.stderr.read() == ""
        assert job.wait() == 0

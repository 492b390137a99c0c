"""Where a launcher finds that it runs, from options and variables as schedulers set them."""

from __future__ import annotations

import argparse
import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from det_core._env import Environment
from det_core._slurm import expand_nodes
from det_core.launch import _torchrun
from det_core.launch._machines._hosts import Host
from det_core.launch._machines._place import Place
from det_core.launch._machines._places import find_place
from det_core.launch._words._options import UsageError
from det_core.launch._words._parser import Parser, count

STEP = {
    "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "gpu[03-05]", "SLURM_NODEID": "1", "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_TASKS_PER_NODE": "4(x3)",
}  # fmt: skip
BATCH = {
    "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "gpu[03-04]", "SLURM_NODEID": "0", "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DET_CORE_INFO_DIR", str(tmp_path / "info"))


def place(*options: str, one_for_all: bool = False, **variables: str) -> Place:
    parser = Parser("some", "someprogram")
    parser.add_argument("-np", dest="processes", type=count)
    asked = parser.split([*options, "s.py"]).asked
    environment = Environment.read({"DET_CORE_HOME": "/tmp", "CUDA_VISIBLE_DEVICES": "", **variables})
    return find_place(asked, environment, "someprogram", one_for_all=one_for_all)


def refusal(*options: str, one_for_all: bool = False, **variables: str) -> str:
    with pytest.raises(UsageError) as error:
        place(*options, one_for_all=one_for_all, **variables)
    assert "\n" not in str(error.value)
    return str(error.value)


def slots(found: Place) -> dict[str, int]:
    return {host.name: host.slots for host in found.hosts}


def test_the_bare_machine() -> None:
    alone = place()
    assert (alone.hosts, alone.node_rank, alone.chief, alone.size, alone.several) == (
        (Host("127.0.0.1", 1),), 0, "127.0.0.1", 1, False,
    )  # fmt: skip
    assert "no GPU is visible: starting 1 process" in alone.notice
    assert (place("--nproc-per-node", "3").size, place("--nproc-per-node", "3").notice) == (3, "")
    assert (place("-np", "4").size, place("-np", "4").notice) == (4, "")
    assert place("--nnodes", "1", "--node-rank", "0", "--nproc-per-node", "2").size == 2


def test_several_machines_by_number() -> None:
    options = ["--nnodes", "3", "--node-rank", "1", "--master-addr", "first", "--nproc-per-node", "2"]
    found = place(*options)
    assert (found.size, found.node_rank, found.chief, found.first_rank, found.port) == (6, 1, "first", 2, 29500)
    assert not found.known
    assert place(*options, "--master-port", "4711").port == 4711
    assert "with --node-rank R" in refusal("--nnodes", "2")
    assert "not below --nnodes 2" in refusal("--nnodes", "2", "--node-rank", "2")
    assert "with --master-addr HOST" in refusal("--nnodes", "2", "--node-rank", "0")
    assert "--hosts A:2,B:2 or --hostfile" in refusal(*options, one_for_all=True)


def test_several_machines_by_name() -> None:
    Path("hosts").write_text(f"203.0.113.1 slots=2\n{socket.gethostname()} slots=3\n")
    found = place("--hostfile", "hosts")
    assert (found.node_rank, found.chief, found.here.slots, found.first_rank) == (1, "203.0.113.1", 3, 2)
    assert place("--hostfile", "hosts", "--node-rank", "0").node_rank == 0
    assert place("--hostfile", "hosts", one_for_all=True).node_rank == 0
    assert [h.slots for h in place("--hostfile", "hosts", "--nproc-per-node", "4").hosts] == [4, 4]
    assert slots(place("--hosts", "a:2,b:2", "-np", "3", one_for_all=True)) == {"a": 2, "b": 1}
    assert slots(place("--hosts", "a:2,b:2", "-np", "2", one_for_all=True)) == {"a": 2}
    many = refusal("--hosts", "a:2,b:2", "-np", "5", one_for_all=True)
    assert "5 processes are asked for, and --hosts a:2,b:2 has 4" in many
    assert "give one of them" in refusal("--hosts", "a", "--hostfile", "hosts")
    assert "names 2 hosts" in refusal("--hostfile", "hosts", "--nnodes", "3")
    assert "--node-rank 2" in refusal("--hostfile", "hosts", "--node-rank", "2")
    assert "is this machine" in refusal("--hosts", "203.0.113.1:1,203.0.113.2:1")
    assert "No such file" in refusal("--hostfile", "nowhere")


def test_an_allocation_of_a_master(tmp_path: Path) -> None:
    info = tmp_path / "info"
    info.mkdir()
    cluster: dict[str, Any] = {
        "master_url": "http://m:8080", "cluster_id": "c", "agent_id": "a", "slot_ids": [0, 1], "task_id": "t",
        "allocation_id": "t.1", "session_token": "s", "task_type": "TRIAL",
    }  # fmt: skip
    trial = {
        "trial_id": 1, "experiment_id": 1, "trial_seed": 0, "hparams": {}, "config": {}, "steps_completed": 0,
        "trial_run_id": 0, "debug": False, "inter_node_network_interface": None,
    }  # fmt: skip
    rendezvous = {"container_addrs": ["10.0.0.1", "10.0.0.2"], "container_rank": 1, "container_slot_counts": [4, 2]}
    for name, content in (("cluster", cluster), ("trial", trial), ("rendezvous", rendezvous)):
        (info / f"{name}.json").write_text(json.dumps(content))
    found = place(**BATCH)
    assert (found.where, slots(found), found.node_rank) == ("allocation t.1", {"10.0.0.1": 4, "10.0.0.2": 2}, 1)
    assert (found.chief, found.port, found.notice) == ("10.0.0.1", 29400, "")
    assert slots(place("--nproc-per-node", "1")) == {"10.0.0.1": 1, "10.0.0.2": 1}
    assert place("--hosts", "localhost:5").size == 5, "what is asked for comes first"
    cluster.update(task_type="COMMAND", slot_ids=[])
    (info / "cluster.json").write_text(json.dumps(cluster))
    assert (place().size, "no GPU" in place().notice) == (1, True)


def test_a_step_of_slurm_with_a_launcher_on_each_node() -> None:
    found = place(**STEP)
    assert (found.where, slots(found), found.node_rank) == ("Slurm job 17", {"gpu03": 1, "gpu04": 1}, 1)
    assert found.chief == "gpu03"
    assert "no GPU" in found.notice
    assert slots(place(**STEP, SLURM_GPUS_ON_NODE="4")) == {"gpu03": 4, "gpu04": 4}
    assert slots(place("--nproc-per-node", "2", **STEP)) == {"gpu03": 2, "gpu04": 2}
    assert place("--nproc-per-node", "2", **STEP).port == place(**STEP).port, "the same on all nodes"
    assert "srun --ntasks-per-node=1" in refusal(**{**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"})
    assert "without srun" in refusal(one_for_all=True, **STEP)


def test_the_script_of_an_sbatch() -> None:
    found = place(one_for_all=True, **BATCH)
    assert (slots(found), found.node_rank) == ({"gpu03": 2, "gpu04": 2}, 0)
    assert "start one on each, with srun --ntasks-per-node=1" in refusal(**BATCH)
    single = {**BATCH, "SLURM_JOB_NODELIST": "gpu03", "SLURM_TASKS_PER_NODE": "4"}
    assert slots(place(**single)) == {"gpu03": 4}
    assert "expected counts" in refusal(one_for_all=True, **{**BATCH, "SLURM_TASKS_PER_NODE": "two"})
    assert "is about 3 nodes" in refusal(one_for_all=True, **{**BATCH, "SLURM_TASKS_PER_NODE": "2(x3)"})
    assert "expected nodes" in refusal(one_for_all=True, **{**BATCH, "SLURM_JOB_NODELIST": "gpu[3"})


@pytest.mark.parametrize("variables", [MPI, PMI], ids=["OMPI", "PMI"])
def test_launchers_that_mpirun_started(variables: dict[str, str]) -> None:
    found = place("--nproc-per-node", "2", **variables, DET_CHIEF_IP="10.0.0.1")
    assert (found.node_rank, found.size, found.chief, found.known) == (1, 4, "10.0.0.1", False)
    assert place("--master-addr", "10.0.0.9", **variables).chief == "10.0.0.9"
    assert "--master-addr HOST" in refusal(**variables)
    crowded = {k: "2" if "LOCAL" in k else v for k, v in variables.items()}
    assert "--map-by ppr:1:node" in refusal(**crowded, DET_CHIEF_IP="10.0.0.1")
    assert "start one" in refusal(one_for_all=True, **variables, DET_CHIEF_IP="10.0.0.1")


def test_open_mpi_comes_before_slurm_and_slurm_before_pmi() -> None:
    assert place(**STEP, **MPI, DET_CHIEF_IP="x").where == "mpirun"
    assert place(**STEP, **PMI).where == "Slurm job 17"


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("node1", ["node1"]),
        ("gpu[03-05,9],cpu1", ["gpu03", "gpu04", "gpu05", "gpu9", "cpu1"]),
        ("rack1-n[10-11]-ib,x", ["rack1-n10-ib", "rack1-n11-ib", "x"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("", []),
    ],
)
def test_node_lists(text: str, nodes: list[str]) -> None:
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize("text", ["n[1", "n[a-b]", "n]", "n[1-2]m[3]", ",a"])
def test_node_lists_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="SLURM_JOB_NODELIST"):
        expand_nodes(text)


def torchrun(given: set[str], **variables: str) -> tuple[argparse.Namespace, dict[str, str]]:
    """What torchrun's options come to, and the variables that are set."""
    args = argparse.Namespace(given=given, nnodes="1:1", node_rank=0, master_addr=None, master_port=29500)
    args.nproc_per_node = "1"
    environment = Environment.read({"DET_CORE_HOME": "/tmp", "CUDA_VISIBLE_DEVICES": "", **variables})
    control: Any = SimpleNamespace(notice=lambda text: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DET_CHIEF_IP", raising=False)
        patch.setattr(_torchrun.os, "environ", dict(_torchrun.os.environ))
        _torchrun._place(args, environment, control)
        return args, {k: v for k, v in _torchrun.os.environ.items() if k == "DET_CHIEF_IP"}


def test_torchrun_gets_the_machines_that_others_get_too() -> None:
    args, variables = torchrun(set(), **STEP, SLURM_GPUS_ON_NODE="4")
    assert (args.nnodes, args.node_rank, args.master_addr, args.nproc_per_node) == ("2", 1, "gpu03", "4")
    assert args.master_port == place(**STEP).port
    assert variables == {"DET_CHIEF_IP": "gpu03"}
    args, _ = torchrun({"nproc_per_node", "master_port"}, **STEP)
    assert (args.nproc_per_node, args.master_port) == ("1", 29500)


def test_torchrun_on_one_machine_is_left_as_it_is() -> None:
    args, variables = torchrun(set(), **{**BATCH, "SLURM_JOB_NODELIST": "gpu03", "SLURM_TASKS_PER_NODE": "4"})
    assert (args.nnodes, args.node_rank, args.master_addr, args.nproc_per_node, variables) == ("1:1", 0, None, "1", {})

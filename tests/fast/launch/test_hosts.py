"""Layout of a job: options, host files, and variables as schedulers set them."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from det_core._env import Environment
from det_core._environments import expand_nodes
from det_core.launch import horovod, torch_distributed
from det_core.launch._cli import Parser
from det_core.launch._hosts import (
    CannotStart,
    Host,
    Layout,
    UsageError,
    find_layout,
    index_of_this_host,
    is_this_host,
    read_hostfile,
    read_hosts,
    write_hostfile,
)
from det_core.launch._ports import check_reachable, reserve
from support.processes import free_port

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


def hostfile(folder: Path, text: str) -> str:
    (folder / "hosts").write_text(text)
    return str(folder / "hosts")


def test_read_hostfile_accepts_comments_blanks_and_addresses(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "# two\nnode1 slots=4  # the first\n\n  10.0.0.2\tslots=2\r\nfe80::1 slots=1\nplain\n")
    hosts = (Host("node1", 4), Host("10.0.0.2", 2), Host("fe80::1", 1), Host("plain", 1))
    assert read_hostfile(path) == hosts
    assert read_hostfile(write_hostfile(str(tmp_path / "again"), hosts)) == hosts


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("node1 slots=2\nnode2 slot=2\n", ":2", "expected node2 slots=N, found 'node2 slot=2'"),
        ("node1 slots=two", ":1", "expected node1 slots=N"),
        ("node1 slots=-1", ":1", "expected node1 slots=N"),
        ("node1 slots=2 max=3", ":1", "expected node1 slots=N"),
        ("\n\nnode1 slots=0", ":3", "node1 slots=0: expected 1 or more"),
        ("node1,node2 slots=2", ":1", "invalid host name 'node1,node2'"),
        ("-oProxyCommand=x slots=2", ":1", "invalid host name"),
        ("node1 slots=1\nnode1 slots=2", "", "duplicate host node1"),
        ("# nothing\n", "", "is empty"),
    ],
)
def test_read_hostfile_with_an_invalid_line_names_it(tmp_path: Path, text: str, where: str, message: str) -> None:
    path = hostfile(tmp_path, text)
    with pytest.raises(UsageError) as error:
        read_hostfile(path)
    assert f"{path}{where}" in str(error.value) and message in str(error.value)
    assert "\n" not in str(error.value)


def test_read_hostfile_of_an_unreadable_file_raises(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, message in (("nowhere", "No such file"), ("binary", "is not text"), (".", "Is a directory")):
        with pytest.raises(UsageError, match=message):
            read_hostfile(str(tmp_path / name))


def test_read_hosts_parses_names_addresses_and_slots() -> None:
    assert read_hosts("a:2,b:1,c") == (Host("a", 2), Host("b", 1), Host("c", 1))
    assert read_hosts("::1") == (Host("::1", 1),)
    assert read_hosts("[fd79::1]:2,[fd79::2],b:1") == (Host("fd79::1", 2), Host("fd79::2", 1), Host("b", 1))


@pytest.mark.parametrize(
    "text", ["", "a:2,", "a:two", "a:0", "a:2,a:2", "a b:2", "a:", "[::1]:", "[]:1", "[::1", "::1]"]
)
def test_read_hosts_of_a_malformed_text_raises(text: str) -> None:
    with pytest.raises(UsageError, match="--hosts"):
        read_hosts(text)


def test_index_of_this_host_matches_name_and_addresses() -> None:
    here = socket.gethostname()
    assert is_this_host("localhost") and is_this_host("127.0.0.1") and is_this_host(here)
    assert not is_this_host("203.0.113.1")  # an address for documents alone
    assert index_of_this_host([Host("203.0.113.1", 1), Host(here, 1)], "hosts") == 1
    with pytest.raises(UsageError, match="0 hosts of hosts match"):
        index_of_this_host([Host("203.0.113.1", 1)], "hosts")
    with pytest.raises(UsageError, match=r"2 hosts of hosts .* --node-rank"):
        index_of_this_host([Host("127.0.0.1", 1), Host("127.0.0.2", 1)], "hosts")


def test_is_this_host_ignores_addresses_that_can_merely_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with net.ipv4.ip_nonlocal_bind, on a node that may take over another one's address."""
    monkeypatch.setattr(socket.socket, "bind", lambda *_: None)
    assert not is_this_host("203.0.113.1") and is_this_host("127.0.0.1")


def test_reserve_keeps_a_port_for_the_rank_that_listens_on_it() -> None:
    reserved = reserve()
    port = reserved.getsockname()[1]
    with reserve() as other, socket.socket() as rank:
        assert other.getsockname()[1] != port
        rank.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank.bind(("", port))
        rank.listen()
        with pytest.raises(CannotStart, match=f"port {port} is in use .*--master-port"):
            reserve(port)
        check_reachable("127.0.0.1", port)
    reserved.close()


def test_check_reachable_accepts_a_closed_port_and_refuses_an_unknown_host() -> None:
    check_reachable("127.0.0.1", free_port())
    with pytest.raises(CannotStart, match=r"cannot reach host no-such-host\.invalid from"):
        check_reachable("no-such-host.invalid", 80)


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DET_CORE_INFO_DIR", str(tmp_path / "info"))


def layout(*options: str, **variables: str) -> Layout:
    parsed = Parser(torch_distributed.FRAMEWORK).split([*options, "s.py"]).options
    return find_layout(parsed, Environment.read({"DET_CORE_HOME": "/tmp", "CUDA_VISIBLE_DEVICES": "", **variables}))


def refusal(*options: str, **variables: str) -> str:
    with pytest.raises(UsageError) as error:
        layout(*options, **variables)
    assert "\n" not in str(error.value)
    return str(error.value)


def horovod_layout(*options: str) -> Layout:
    command_line = Parser(horovod.FRAMEWORK).split([*options, "s.py"])
    return horovod.require_host_names(
        find_layout(command_line.options, Environment.read({"CUDA_VISIBLE_DEVICES": ""})), command_line
    )


def slots(found: Layout) -> dict[str, int]:
    return {host.name: host.slots for host in found.hosts}


def test_find_layout_without_any_source_is_one_node() -> None:
    alone = layout()
    assert (alone.hosts, alone.node_rank, alone.chief, alone.size, alone.multi_node) == (
        (Host("127.0.0.1", 1),), 0, "127.0.0.1", 1, False,
    )  # fmt: skip
    assert "no GPU is visible: starting 1 process" in alone.notice
    assert (layout("--nproc-per-node", "3").size, layout("--nproc-per-node", "3").notice) == (3, "")
    assert (horovod_layout("-np", "4").size, horovod_layout("-np", "4").notice) == (4, "")
    assert layout("--nnodes", "1", "--node-rank", "0", "--nproc-per-node", "2").size == 2


def test_find_layout_with_node_options_is_uniform() -> None:
    options = ["--nnodes", "3", "--node-rank", "1", "--master-addr", "first", "--nproc-per-node", "2"]
    found = layout(*options)
    assert (found.size, found.node_rank, found.chief, found.first_rank, found.port) == (6, 1, "first", 2, 29500)
    assert not found.hosts_are_addresses
    assert layout(*options, "--master-port", "4711").port == 4711
    assert "with --node-rank R" in refusal("--nnodes", "2")
    assert "below --nnodes 2" in refusal("--nnodes", "2", "--node-rank", "2")
    assert "with --master-addr HOST" in refusal("--nnodes", "2", "--node-rank", "0")
    with pytest.raises(UsageError, match="--hosts A:2,B:2 or --hostfile"):
        horovod_layout(*options)


def test_find_layout_with_host_options_finds_this_node() -> None:
    Path("hosts").write_text(f"203.0.113.1 slots=2\n{socket.gethostname()} slots=3\n")
    found = layout("--hostfile", "hosts")
    assert (found.node_rank, found.chief, found.this_host.slots, found.first_rank) == (1, "203.0.113.1", 3, 2)
    assert layout("--hostfile", "hosts", "--node-rank", "0").node_rank == 0
    assert [h.slots for h in layout("--hostfile", "hosts", "--nproc-per-node", "4").hosts] == [4, 4]
    named = ["--hosts", "a:2,b:2", "--node-rank"]
    assert slots(horovod_layout(*named, "1", "-np", "3")) == {"a": 2, "b": 1}
    assert slots(horovod_layout(*named, "0", "-np", "2")) == {"a": 2}
    for arguments, message in (
        (["1", "-np", "2"], "-np 2: leaves no process for this node, b"),
        (["0", "-np", "5"], "-np 5: --hosts a:2,b:2 has 4 slots"),
    ):
        with pytest.raises(UsageError, match=message):
            horovod_layout(*named, *arguments)
    assert "pass one of them" in refusal("--hosts", "a", "--hostfile", "hosts")
    assert "has 2 hosts" in refusal("--hostfile", "hosts", "--nnodes", "3")
    assert "--node-rank 2" in refusal("--hostfile", "hosts", "--node-rank", "2")
    assert "0 hosts of --hosts" in refusal("--hosts", "203.0.113.1:1,203.0.113.2:1")
    assert "No such file" in refusal("--hostfile", "nowhere")


def test_find_layout_in_an_allocation_uses_its_containers(tmp_path: Path) -> None:
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
    found = layout(**BATCH)
    assert (found.source, slots(found), found.node_rank) == ("allocation t.1", {"10.0.0.1": 4, "10.0.0.2": 2}, 1)
    assert (found.chief, found.port, found.notice) == ("10.0.0.1", 29400, "")
    assert slots(layout("--nproc-per-node", "1")) == {"10.0.0.1": 1, "10.0.0.2": 1}
    assert layout("--hosts", "localhost:5").size == 5, "options come first"
    cluster.update(task_type="COMMAND", slot_ids=[])
    (info / "cluster.json").write_text(json.dumps(cluster))
    assert (layout().size, "no GPU" in layout().notice) == (1, True)


def test_find_layout_in_a_slurm_step_has_a_launcher_per_node() -> None:
    found = layout(**STEP)
    assert (found.source, slots(found), found.node_rank) == ("Slurm job 17", {"gpu03": 1, "gpu04": 1}, 1)
    assert found.chief == "gpu03"
    assert "no GPU" in found.notice
    assert slots(layout(**STEP, SLURM_GPUS_ON_NODE="4")) == {"gpu03": 4, "gpu04": 4}
    assert slots(layout("--nproc-per-node", "2", **STEP)) == {"gpu03": 2, "gpu04": 2}
    assert layout("--nproc-per-node", "2", **STEP).port == layout(**STEP).port, "the same on all nodes"
    assert layout(**{**STEP, "SLURM_JOB_ID": "18"}).port == layout(**STEP).port + 2, "one is for the launchers"
    without_number = {name: value for name, value in STEP.items() if name != "SLURM_NODEID"}
    assert refusal(**without_number) == "SLURM_NODEID='': expected a number"
    assert "--ntasks-per-node=1 to srun" in refusal(**{**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"})


def test_find_layout_in_an_sbatch_script_needs_a_single_node() -> None:
    assert "start one on each, with srun --ntasks-per-node=1" in refusal(**BATCH)
    single = {**BATCH, "SLURM_JOB_NODELIST": "gpu03", "SLURM_TASKS_PER_NODE": "4"}
    assert slots(layout(**single)) == {"gpu03": 4}
    assert "expected counts" in refusal(**{**BATCH, "SLURM_TASKS_PER_NODE": "two"})
    assert "3 counts for 2 nodes" in refusal(**{**BATCH, "SLURM_TASKS_PER_NODE": "2(x3)"})
    assert "expected nodes" in refusal(**{**BATCH, "SLURM_JOB_NODELIST": "gpu[3"})


@pytest.mark.parametrize("variables", [MPI, PMI], ids=["OMPI", "PMI"])
def test_find_layout_under_mpirun_is_uniform(variables: dict[str, str]) -> None:
    found = layout("--nproc-per-node", "2", **variables, DET_CHIEF_IP="10.0.0.1")
    assert (found.node_rank, found.size, found.chief, found.hosts_are_addresses) == (1, 4, "10.0.0.1", False)
    assert layout("--master-addr", "10.0.0.9", **variables).chief == "10.0.0.9"
    assert "--master-addr HOST" in refusal(**variables)
    crowded = {k: "2" if "LOCAL" in k else v for k, v in variables.items()}
    assert "--map-by ppr:1:node" in refusal(**crowded, DET_CHIEF_IP="10.0.0.1")


def test_find_layout_prefers_open_mpi_to_slurm_and_slurm_to_pmi() -> None:
    assert layout(**STEP, **MPI, DET_CHIEF_IP="x").source == "mpirun"
    assert layout(**STEP, **PMI).source == "Slurm job 17"


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
def test_expand_nodes_returns_all_names(text: str, nodes: list[str]) -> None:
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize("text", ["n[1", "n[a-b]", "n]", "n[1-2]m[3]", ",a"])
def test_expand_nodes_of_a_malformed_text_names_the_variable(text: str) -> None:
    with pytest.raises(ValueError, match="SLURM_JOB_NODELIST"):
        expand_nodes(text)

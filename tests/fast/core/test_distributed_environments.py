"""Job environments: detection of the launcher, from its variables as the real launchers set them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from det_core import core
from det_core._env import Environment
from det_core._environments import (
    ENVIRONMENTS,
    DeepSpeed,
    JobEnvironment,
    Slurm,
    Torchrun,
    detect_launcher,
    detect_ranks,
    expand_counts,
)
from det_core.core._distributed import assign_nodes
from det_core.errors import LauncherNotFound
from support.processes import free_port
from support.ranks import running

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
HOROVOD = {
    "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1", "PMIX_NAMESPACE": "prterun-vm-7@1",
    "PMIX_RANK": "3",
}  # fmt: skip
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "4", "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0",
}  # fmt: skip
TF_CONFIG = (
    '{"cluster": {"worker": ["node0:1", "node1:1", "node2:1", "node3:1"]}, "task": {"type": "worker", "index": 3}}'
)
SBATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "17"}
RANKS = {"rank": 3, "size": 4, "local_rank": 1, "local_size": 2, "cross_rank": 1, "cross_size": 2}


def torch_variables(rank: int, **more: str) -> dict[str, str]:
    """Return what ``env://`` needs of a rank of four, on two nodes, and what some launchers add."""
    return {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29500", **more}


def launcher_variables(name: str, rank: int) -> dict[str, str]:
    """Return what a launcher sets for ``rank`` of four, two on each node (PyTorchJob: one)."""
    node, local = divmod(rank, 2)
    if name in ("torchrun", "accelerate"):
        return torch_variables(
            rank, LOCAL_RANK=str(local), LOCAL_WORLD_SIZE="2", GROUP_RANK=str(node), GROUP_WORLD_SIZE="2",
            ROLE_RANK=str(rank), ROLE_WORLD_SIZE="4", TORCHELASTIC_RUN_ID="none",
        )  # fmt: skip
    if name == "Lightning":  # to the processes that it starts itself: not to the first of each node
        return {"LOCAL_RANK": str(local), "NODE_RANK": str(node), "WORLD_SIZE": "4", "MASTER_ADDR": "node1",
                "MASTER_PORT": "29500"}  # fmt: skip
    if name == "PyTorchJob":
        return torch_variables(rank, PYTHONUNBUFFERED="1")
    if name == "Ray Train":
        return torch_variables(rank, LOCAL_RANK=str(local), LOCAL_WORLD_SIZE="2", NODE_RANK=str(node))
    if name == "deepspeed":
        return torch_variables(
            rank, LOCAL_RANK=str(local), LOCAL_SIZE="2", CROSS_RANK=str(node), CROSS_SIZE="2"
        )  # fmt: skip
    if name == "mpirun":
        numbers = {"RANK": rank, "SIZE": 4, "LOCAL_RANK": local, "LOCAL_SIZE": 2}
        return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in numbers.items()}
    if name == "mpiexec.hydra":
        return {"PMI_RANK": str(rank), "PMI_SIZE": "4", "MPI_LOCALRANKID": str(local), "MPI_LOCALNRANKS": "2"}
    assert name == "srun"
    return {**SRUN, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}


SWEPT = (
    "torchrun", "accelerate", "Lightning", "mpirun", "mpiexec.hydra", "srun", "PyTorchJob", "Ray Train", "deepspeed",
)  # fmt: skip
RECOGNIZED = {"torchrun", "accelerate", "mpirun", "mpiexec.hydra", "srun", "Ray Train", "deepspeed"}


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("name", SWEPT)
def test_detect_ranks_without_any_one_variable_recognizes_or_refuses(name: str, rank: int) -> None:
    complete = launcher_variables(name, rank)
    for missing in [None, *complete]:
        variables = environment({key: value for key, value in complete.items() if key != missing})
        try:
            found = detect_ranks(variables)
        except ValueError as e:
            assert missing or name not in RECOGNIZED
            assert "not set: " in str(e), str(e)
        else:
            assert found is not None, f"alone without {missing}: a run of its own"
            assert (found.rank(), found.size()) == (rank, 4)
            assert name in RECOGNIZED, f"recognized without {missing}"


def test_detect_launcher_with_torch_variables_alone_names_the_missing_ones() -> None:
    with pytest.raises(LauncherNotFound, match=r"not set: LOCAL_RANK, LOCAL_WORLD_SIZE.*RANK=0, WORLD_SIZE=2"):
        detect_launcher(environment(torch_variables(0, WORLD_SIZE="2")))
    with pytest.raises(LauncherNotFound, match="0 and 1 if it is the only one"):
        detect_launcher(environment(torch_variables(1)))


def test_detect_ranks_with_torch_variables_of_one_process_returns_none() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for variables in (alone, {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, {"LOCAL_RANK": "1"}):
        assert detect_ranks(environment(variables)) is None


SPAWNED = """
    import sys
    import torch.distributed as dist
    from det_core import core

    def main(rank, port):
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        alone = core.DistributedContext(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
        for how, call in (
            ("detect", core.DistributedContext.detect),
            ("init", core.init),
            ("by hand", lambda: core.init(distributed=alone)),
        ):
            try:
                call()
            except ValueError as e:
                print(how, e, flush=True)
        dist.destroy_process_group()

    if __name__ == "__main__":
        from torch.multiprocessing import start_processes
        start_processes(main, (int(sys.argv[1]),), nprocs=2, start_method="fork")
"""


def test_detect_in_processes_spawned_by_torch_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with running(SPAWNED, 1, tmp_path, env=dict.fromkeys(TORCHRUN, ""), args=(str(free_port()),)) as ranks:
        assert ranks.wait() == [0], ranks.output(0)
    for how in ("detect", "init", "by hand"):
        expected = f"{how} torch.distributed was initialised with 2 ranks, but det_core would have 1: "
        assert ranks.output(0).count(expected) == 2, ranks.output(0)


def environment(variables: dict[str, str]) -> Mapping[str, str]:
    return Environment.read({"DET_CORE_HOME": "/tmp", **variables}).launch


@pytest.mark.parametrize(
    "variables, name, address",
    [
        (TORCHRUN, "torch_distributed", "node1"),
        (DEEPSPEED, "deepspeed", "10.0.0.1"),
        (HOROVOD, "horovod", None),
        (OPEN_MPI, "mpi", None),
        (MPICH, "mpi", None),
        (SRUN, "slurm", "node1"),
        ({**SRUN, **TORCHRUN}, "torch_distributed", "node1"),
        ({**OPEN_MPI, **HOROVOD}, "horovod", None),
        ({**SRUN, **OPEN_MPI}, "mpi", None),
        ({"TF_CONFIG": TF_CONFIG}, "tf_config", "node0"),
    ],
)
def test_detect_launcher_recognizes_each_launcher(variables: dict[str, str], name: str, address: str | None) -> None:
    found = detect_launcher(environment(variables))
    assert found is not None and f".from_{name}(" in found.constructor
    own_node = {"local_rank": 0, "local_size": 1, "cross_rank": 3, "cross_size": 4}
    assert found.ranks() == (RANKS | own_node if name == "tf_config" else RANKS)
    assert found.address() == address
    assert type(detect_ranks(environment(variables))) is type(found)


@pytest.mark.parametrize("variables", [{}, SBATCH, {"RANK": "0"}, {"TORCHELASTIC_RUN_ID": "x"}])
def test_detect_ranks_without_a_launcher_returns_none(variables: dict[str, str]) -> None:
    assert detect_ranks(environment(variables)) is None


def test_detect_ranks_with_one_process_of_a_launcher_returns_none() -> None:
    alone = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    alone |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    assert detect_ranks(environment(alone)) is None


@pytest.mark.parametrize("environment_class", ENVIRONMENTS)
def test_constructor_of_each_environment_exists(environment_class: type[JobEnvironment]) -> None:
    method = environment_class.constructor.removeprefix("core.DistributedContext.").partition("(")[0]
    assert method.startswith("from_") and callable(getattr(core.DistributedContext, method))


@pytest.mark.parametrize(
    "variables, change",
    [
        (TORCHRUN, {"TORCHELASTIC_RESTART_COUNT": "1"}),
        (TORCHRUN, {"MASTER_PORT": "29401"}),
        (SRUN, {"SLURM_JOB_ID": "18"}),
        (SRUN, {"SLURM_STEP_ID": "1"}),
        (OPEN_MPI, {"PMIX_NAMESPACE": "prterun-vm-8@1"}),
        (HOROVOD, {"HOROVOD_GLOO_RENDEZVOUS_PORT": "4712"}),
    ],
)
def test_job_of_another_launch_differs(variables: dict[str, str], change: dict[str, str]) -> None:
    def job(variables: dict[str, str]) -> tuple[str, ...]:
        found = detect_launcher(environment(variables))
        assert found is not None
        return found.job()

    assert job(variables) == job({**variables, "RANK": "1"} if "RANK" in variables else variables)
    assert job(variables) != job({**variables, **change})


@pytest.mark.parametrize("variables, environment_class", [(TORCHRUN, Torchrun), (SRUN, Slurm), (DEEPSPEED, DeepSpeed)])
def test_ranks_with_a_missing_variable_names_it(
    variables: dict[str, str], environment_class: type[JobEnvironment]
) -> None:
    for variable in environment_class.names:
        rest = environment({key: value for key, value in variables.items() if key != variable})
        with pytest.raises(LauncherNotFound, match=f"not set: {variable}"):
            environment_class(rest).ranks()


def test_ranks_with_an_invalid_number_names_the_variable() -> None:
    with pytest.raises(ValueError, match="WORLD_SIZE='four'"):
        detect_ranks(environment({**TORCHRUN, "WORLD_SIZE": "four"}))


def mpi_ranks(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, int]:
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    found = detect_ranks(environment({f"OMPI_COMM_WORLD_{name}": str(value) for name, value in numbers.items()}))
    assert found is not None
    return found.ranks()


@pytest.mark.parametrize("size", [2, 5, 8])
@pytest.mark.parametrize("local_size", [1, 2, 3, 4])
def test_mpi_rank_on_another_node_never_guesses_the_chiefs(size: int, local_size: int) -> None:
    """A rank that looked for the chief on its own node would hang: the node's number is a guess until all have met."""
    for rank in range(size):
        for local_rank in range(min(local_size, size, rank + 1)):
            numbers = mpi_ranks(rank, size, local_rank, min(local_size, size))
            if numbers["cross_rank"] == 0 and local_size < size:
                assert rank == local_rank, "all lower ranks are beside it, the chief too"


@pytest.mark.parametrize(
    "locations, nodes",
    [
        ([("a", 0, 2), ("a", 1, 2), ("b", 0, 2), ("b", 1, 2)], [0, 0, 1, 1]),
        ([("a", 0, 4), ("a", 1, 4), ("a", 2, 4), ("a", 3, 4), ("b", 0, 1), ("c", 0, 1)], [0, 0, 0, 0, 1, 2]),
        ([("b", 0, 1), ("a", 0, 3), ("a", 1, 3), ("a", 2, 3)], [0, 1, 1, 1]),
        ([("a", 0, 2), ("b", 0, 1), ("a", 1, 2)], [0, 1, 0]),
        ([("x", 0, 2), ("x", 1, 2), ("x", 0, 1), ("x", 0, 1)], [0, 0, 1, 2]),
    ],
)
def test_assign_nodes_numbers_by_lowest_rank(locations: list[tuple[str, int, int]], nodes: list[int]) -> None:
    assert assign_nodes(locations) == nodes


def test_assign_nodes_with_contradicting_sizes_raises() -> None:
    with pytest.raises(ValueError, match="pass the ranks"):
        assign_nodes([("x", 0, 2), ("x", 0, 1), ("x", 1, 2)])


UNEQUAL = """
    import os, socket
    rank = int(os.environ["RANK"])
    host, local_rank, local_size = [("a", 0, 2), ("a", 1, 2), ("b", 0, 1), ("c", 0, 1)][rank]
    numbers = {"RANK": rank, "SIZE": 4, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    os.environ.update({f"OMPI_COMM_WORLD_{name}": str(value) for name, value in numbers.items()})
    socket.gethostname = lambda: host
    from det_core import core

    with core.DistributedContext.from_mpi(chief_ip="127.0.0.1") as distributed:
        print("node", distributed.cross_rank, "of", distributed.get_num_agents(), flush=True)
        print(distributed.allgather_local(rank), flush=True)
"""


def test_from_mpi_with_nodes_of_different_sizes_agrees_on_their_numbers(tmp_path: Path) -> None:
    """Each rank on its own would compute 4 / 2 nodes on the first, 4 / 1 on the others."""
    variables = {"DET_CORE_SECRET": "x" * 32, "INTER_TRAIN_PROCESS_COMM_PORT_1": str(free_port())}
    with running(UNEQUAL, 4, tmp_path, env=variables) as ranks:
        assert ranks.wait() == [0] * 4, "".join(map(ranks.output, range(4)))
    lines = [ranks.output(rank).splitlines()[:2] for rank in range(4)]
    assert [first for first, _ in lines] == [f"node {node} of 3" for node in (0, 0, 1, 2)]
    assert [second for _, second in lines] == ["[0, 1]", "[0, 1]", "[2]", "[3]"]


@pytest.mark.parametrize(
    "text, counts", [("4", [4]), ("2(x3)", [2, 2, 2]), ("2(x3),1", [2, 2, 2, 1]), ("1,2,1(x2)", [1, 2, 1, 1])]
)
def test_expand_counts_repeats_each_count(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


def test_expand_counts_of_a_malformed_text_names_the_variable() -> None:
    with pytest.raises(ValueError, match="SLURM_STEP_TASKS_PER_NODE"):
        expand_counts("many")


@pytest.mark.parametrize(
    "nodes, address",
    [
        ("node1", "node1"),
        ("node[1-2]", "node1"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("a,b", "a"),
        ("rack1-n[10-12]-ib,x", "rack1-n10-ib"),
        ("", None),
    ],
)
def test_address_of_a_slurm_step_is_its_first_node(nodes: str, address: str | None) -> None:
    assert Slurm(environment({**SRUN, "SLURM_STEP_NODELIST": nodes})).address() == address

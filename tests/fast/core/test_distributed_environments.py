"""Which launcher started this process, from its variables as the real launchers set them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from det_core import core
from det_core._env import Environment
from det_core._slurm import expand_counts
from det_core.core._environments import Launcher, assign_nodes, detect_launcher, launched_ranks, launcher_for
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
PLACE = {"rank": 3, "size": 4, "local_rank": 1, "local_size": 2, "cross_rank": 1, "cross_size": 2}


def of_torch(rank: int, **more: str) -> dict[str, str]:
    """What ``env://`` needs of a rank of four, on two machines, and what some launchers add."""
    return {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29500", **more}


def of_a_launcher(name: str, rank: int) -> dict[str, str]:
    """What each launcher of the field sets for ``rank`` of four, two on each machine (PyTorchJob: one)."""
    machine, local = divmod(rank, 2)
    if name in ("torchrun", "accelerate"):
        return of_torch(
            rank, LOCAL_RANK=str(local), LOCAL_WORLD_SIZE="2", GROUP_RANK=str(machine), GROUP_WORLD_SIZE="2",
            ROLE_RANK=str(rank), ROLE_WORLD_SIZE="4", TORCHELASTIC_RUN_ID="none",
        )  # fmt: skip
    if name == "Lightning":  # to the processes that it starts itself: not to the first of each machine
        return {"LOCAL_RANK": str(local), "NODE_RANK": str(machine), "WORLD_SIZE": "4", "MASTER_ADDR": "node1",
                "MASTER_PORT": "29500"}  # fmt: skip
    if name == "PyTorchJob":
        return of_torch(rank, PYTHONUNBUFFERED="1")
    if name == "Ray Train":
        return of_torch(rank, LOCAL_RANK=str(local), LOCAL_WORLD_SIZE="2", NODE_RANK=str(machine))
    if name == "deepspeed":
        return of_torch(
            rank, LOCAL_RANK=str(local), LOCAL_SIZE="2", CROSS_RANK=str(machine), CROSS_SIZE="2"
        )  # fmt: skip
    if name == "mpirun":
        numbers = {"RANK": rank, "SIZE": 4, "LOCAL_RANK": local, "LOCAL_SIZE": 2}
        return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in numbers.items()}
    if name == "mpiexec.hydra":
        return {"PMI_RANK": str(rank), "PMI_SIZE": "4", "MPI_LOCALRANKID": str(local), "MPI_LOCALNRANKS": "2"}
    assert name == "srun"
    return {**SRUN, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(machine)}


SWEPT = (
    "torchrun", "accelerate", "Lightning", "mpirun", "mpiexec.hydra", "srun", "PyTorchJob", "Ray Train", "deepspeed",
)  # fmt: skip
RECOGNISED = {"torchrun", "accelerate", "mpirun", "mpiexec.hydra", "srun", "Ray Train", "deepspeed"}


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("name", SWEPT)
def test_rank_of_a_launcher_without_any_variable_is_recognised_or_refused(name: str, rank: int) -> None:
    """Never alone: each process would be rank 0 of a run of its own."""
    complete = of_a_launcher(name, rank)
    for missing in [None, *complete]:
        variables = environment({key: value for key, value in complete.items() if key != missing})
        try:
            ranks = launched_ranks(variables)
        except ValueError as e:
            assert missing or name not in RECOGNISED
            assert "not set: " in str(e), str(e)
        else:
            assert ranks is not None, f"alone without {missing}"
            assert (ranks.numbers["rank"], ranks.numbers["size"]) == (rank, 4)
            assert name in RECOGNISED, f"recognised without {missing}"


def test_process_with_the_four_variables_of_torch_alone_is_told_which_to_set() -> None:
    with pytest.raises(ValueError, match=r"RANK=0, WORLD_SIZE=2.*not set: LOCAL_RANK, LOCAL_WORLD_SIZE"):
        core.DistributedContext._of(
            detect_launcher(environment(of_torch(0, WORLD_SIZE="2")).launch), environment({}), None
        )
    with pytest.raises(ValueError, match="0 and 1 where it is the only one"):
        launched_ranks(environment(of_torch(1)))


def test_variables_that_torch_needs_of_a_process_alone_are_no_error() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for variables in (alone, {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, {"LOCAL_RANK": "1"}):
        assert launched_ranks(environment(variables)) is None


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


def test_processes_that_torch_has_spawned_are_refused(tmp_path: Path) -> None:
    """Without a variable, but with a process group."""
    pytest.importorskip("torch")
    with running(SPAWNED, 1, tmp_path, env=dict.fromkeys(TORCHRUN, ""), args=(str(free_port()),)) as ranks:
        assert ranks.wait() == [0], ranks.output(0)
    for how in ("detect", "init", "by hand"):
        expected = f"{how} torch.distributed was initialised with 2 ranks, but det_core would have 1: "
        assert ranks.output(0).count(expected) == 2, ranks.output(0)


def environment(variables: dict[str, str]) -> Environment:
    return Environment.read({"DET_CORE_HOME": "/tmp", **variables})


@pytest.mark.parametrize(
    "variables, name, chief_ip",
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
def test_each_launcher_is_recognised(variables: dict[str, str], name: str, chief_ip: str | None) -> None:
    launch = environment(variables).launch
    found = detect_launcher(launch)
    assert found is not None and found.constructor.startswith(f"from_{name}")
    ranks = found.ranks(launch)
    alone = {"local_rank": 0, "local_size": 1, "cross_rank": 3, "cross_size": 4}
    assert ranks.numbers == (PLACE | alone if name == "tf_config" else PLACE)
    assert ranks.chief_ip == chief_ip
    assert launched_ranks(environment(variables)) == ranks


@pytest.mark.parametrize("variables", [{}, SBATCH, {"RANK": "0"}, {"TORCHELASTIC_RUN_ID": "x"}])
def test_no_launcher(variables: dict[str, str]) -> None:
    assert launched_ranks(environment(variables)) is None


def test_one_process_of_a_launcher_is_no_several_ranks() -> None:
    alone = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    alone |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    assert launched_ranks(environment(alone)) is None


@pytest.mark.parametrize("name", ["torch_distributed", "deepspeed", "horovod", "mpi", "slurm"])
def test_the_line_to_add_is_one_that_exists(name: str) -> None:
    from det_core import core

    line = launcher_for(f"from_{name}", {}).line
    method = line.removeprefix("core.DistributedContext.").partition("(")[0]
    assert line.startswith("core.DistributedContext.") and callable(getattr(core.DistributedContext, method))


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
def test_two_jobs_are_told_apart(variables: dict[str, str], change: dict[str, str]) -> None:
    def job(launch: dict[str, str]) -> Any:
        found: Launcher | None = detect_launcher(environment(launch).launch)
        assert found is not None
        return found.job_of(launch)

    assert job(variables) == job({**variables, "RANK": "1"} if "RANK" in variables else variables)
    assert job(variables) != job({**variables, **change})


@pytest.mark.parametrize(
    "variables, name", [(TORCHRUN, "torch_distributed"), (SRUN, "slurm"), (DEEPSPEED, "deepspeed")]
)
def test_what_is_missing_is_named(variables: dict[str, str], name: str) -> None:
    for variable in launcher_for(f"from_{name}", {}).variables:
        launch = environment({k: v for k, v in variables.items() if k != variable}).launch
        with pytest.raises(ValueError, match=f"not set: {variable}"):
            launcher_for(f"from_{name}", {}).ranks(launch)


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="WORLD_SIZE='four'"):
        launched_ranks(environment({**TORCHRUN, "WORLD_SIZE": "four"}))


def a_rank_of_mpi(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, int]:
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    ranks = launched_ranks(environment({f"OMPI_COMM_WORLD_{name}": str(value) for name, value in numbers.items()}))
    assert ranks is not None
    return ranks.numbers


@pytest.mark.parametrize("size", [2, 5, 8])
@pytest.mark.parametrize("local_size", [1, 2, 3, 4])
def test_a_rank_of_mpi_never_takes_another_machine_for_the_chiefs(size: int, local_size: int) -> None:
    """Its number is a guess until the ranks have met; a rank that would look for the chief beside itself may hang."""
    for rank in range(size):
        for local_rank in range(min(local_size, size, rank + 1)):
            numbers = a_rank_of_mpi(rank, size, local_rank, min(local_size, size))
            if numbers["cross_rank"] == 0 and local_size < size:
                assert rank == local_rank, "all lower ranks are beside it, the chief too"


@pytest.mark.parametrize(
    "places, machines",
    [
        ([("a", 0, 2), ("a", 1, 2), ("b", 0, 2), ("b", 1, 2)], [0, 0, 1, 1]),
        ([("a", 0, 4), ("a", 1, 4), ("a", 2, 4), ("a", 3, 4), ("b", 0, 1), ("c", 0, 1)], [0, 0, 0, 0, 1, 2]),
        ([("b", 0, 1), ("a", 0, 3), ("a", 1, 3), ("a", 2, 3)], [0, 1, 1, 1]),
        ([("a", 0, 2), ("b", 0, 1), ("a", 1, 2)], [0, 1, 0]),
        ([("x", 0, 2), ("x", 1, 2), ("x", 0, 1), ("x", 0, 1)], [0, 0, 1, 2]),
    ],
)
def test_machines_are_numbered_by_their_lowest_ranks(places: list[tuple[str, int, int]], machines: list[int]) -> None:
    assert assign_nodes(places) == machines


def test_machines_that_cannot_be_told_apart() -> None:
    with pytest.raises(ValueError, match="Give the ranks yourself"):
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
        print("machine", distributed.cross_rank, "of", distributed.get_num_agents(), flush=True)
        print(distributed.allgather_local(rank), flush=True)
"""


def test_machines_of_different_sizes_under_mpirun(tmp_path: Path) -> None:
    """Each rank on its own would compute 4 / 2 machines on the first, 4 / 1 on the others."""
    variables = {"DET_CORE_SECRET": "x" * 32, "INTER_TRAIN_PROCESS_COMM_PORT_1": str(free_port())}
    with running(UNEQUAL, 4, tmp_path, env=variables) as ranks:
        assert ranks.wait() == [0] * 4, "".join(map(ranks.output, range(4)))
    told = [ranks.output(rank).splitlines()[:2] for rank in range(4)]
    assert [each[0] for each in told] == [f"machine {machine} of 3" for machine in (0, 0, 1, 2)]
    assert [each[1] for each in told] == ["[0, 1]", "[0, 1]", "[2]", "[3]"]


@pytest.mark.parametrize(
    "text, counts", [("4", [4]), ("2(x3)", [2, 2, 2]), ("2(x3),1", [2, 2, 2, 1]), ("1,2,1(x2)", [1, 2, 1, 1])]
)
def test_counts_per_node(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


def test_counts_that_are_none() -> None:
    with pytest.raises(ValueError, match="SLURM_STEP_TASKS_PER_NODE"):
        expand_counts("many")


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("node1", "node1"),
        ("node[1-2]", "node1"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("a,b", "a"),
        ("rack1-n[10-12]-ib,x", "rack1-n10-ib"),
        ("", None),
    ],
)
def test_the_first_host(nodes: str, first: str | None) -> None:
    launch = environment({**SRUN, "SLURM_STEP_NODELIST": nodes}).launch
    assert launcher_for("from_slurm", {}).ranks(launch).chief_ip == first

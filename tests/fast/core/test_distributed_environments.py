"""Which launcher started this process, from its variables as the real launchers set them."""

from __future__ import annotations

from typing import Any

import pytest

from det_core._env import Environment
from det_core.core._environments import Ranks, detector, expand_counts, find, first_host, launched_ranks

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
SBATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "17"}
PLACE = {"rank": 3, "size": 4, "local_rank": 1, "local_size": 2, "cross_rank": 1, "cross_size": 2}


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
    ],
)
def test_each_launcher_is_recognised(variables: dict[str, str], name: str, chief_ip: str | None) -> None:
    launch = environment(variables).launch
    found = find(launch)
    assert found is not None and found.name == name
    ranks = found.ranks(launch)
    assert ranks.numbers == PLACE
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

    line = detector(name).line
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
        ranks: Ranks | None = launched_ranks(environment(launch))
        assert ranks is not None
        return ranks.job

    assert job(variables) == job({**variables, "RANK": "1"} if "RANK" in variables else variables)
    assert job(variables) != job({**variables, **change})


@pytest.mark.parametrize(
    "variables, name", [(TORCHRUN, "torch_distributed"), (SRUN, "slurm"), (DEEPSPEED, "deepspeed")]
)
def test_what_is_missing_is_named(variables: dict[str, str], name: str) -> None:
    for variable in detector(name).needs:
        launch = environment({k: v for k, v in variables.items() if k != variable}).launch
        with pytest.raises(ValueError, match=f"not set: {variable}"):
            detector(name).ranks(launch)


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="WORLD_SIZE='four'"):
        launched_ranks(environment({**TORCHRUN, "WORLD_SIZE": "four"}))


def test_mpi_on_machines_of_different_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match="as many ranks"):
        launched_ranks(environment({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "5"}))


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
    assert first_host(nodes) == first

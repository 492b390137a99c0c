"""DistributedContext: numbers, constructors, collectives, closing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from det_core import core
from det_core.errors import CollectiveMismatch, CollectiveTimeout, ContextClosed, PeerLost, RendezvousError
from det_core.ipc import _membership
from support.checkpoints import Recorder
from support.processes import free_port
from support.ranks import running
from support.threads import as_ranks

NUMBERS = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1, "cross_rank": 0, "cross_size": 1}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_collectives_return_values_of_all_ranks(size: int) -> None:
    def work(distributed: core.DistributedContext) -> Any:
        rank = distributed.get_rank()
        return (
            (rank, distributed.get_local_rank(), distributed.get_size(), distributed.get_num_agents()),
            distributed.gather(rank),
            distributed.gather_local(rank),
            distributed.allgather({"rank": rank}),
            distributed.allgather_local(rank),
            distributed.broadcast(rank),
            distributed.broadcast_local(rank),
            distributed.channel("mine").allgather(rank),
            distributed.local_channel("mine").broadcast(rank),
            (distributed.communicator is None, distributed.check()),
        )

    for rank, out in enumerate(as_ranks(size, work)):
        everybody = list(range(size))
        assert out == (
            (rank, rank, size, 1),
            everybody if rank == 0 else None,
            everybody if rank == 0 else None,
            [{"rank": r} for r in everybody],
            everybody,
            0,
            0,
            everybody,
            0,
            (size == 1, None),
        )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rank": 1}, "rank=1"),
        ({"rank": -1}, "rank=-1"),
        ({"size": 0}, "size=0"),
        ({"size": 2, "local_rank": 1}, "local_rank=1"),
        ({"local_size": 2}, "local_size=2"),
        ({"size": 4, "local_size": 2, "cross_size": 2, "cross_rank": 2, "rank": 3}, "cross_rank=2"),
        ({"cross_size": 2}, "cross_size=2"),
        ({"size": 2, "local_size": 2, "cross_size": 2}, "cross_size=2"),
        ({"size": 2, "local_size": 2, "local_rank": 1}, "local_rank=1"),
        ({"size": 4, "local_size": 2, "cross_size": 2}, "chief_ip"),
    ],
)
def test_init_contradicting_numbers_are_rejected(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        core.DistributedContext(**{**NUMBERS, **change})


@pytest.mark.parametrize("argument, value", [("timeout", 0), ("timeout", -1.5), ("pub_port", 0), ("pub_port", 70000)])
def test_init_invalid_timeout_or_port_is_rejected(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{argument}={value}"):
        core.DistributedContext(**NUMBERS, **{argument: value})


@pytest.mark.parametrize("value", ["0", 0.0, None, True])
def test_init_numbers_of_other_types_are_rejected(value: Any) -> None:
    with pytest.raises(TypeError, match="local_rank"):
        core.DistributedContext(**{**NUMBERS, "local_rank": value})


def test_init_without_a_number_is_rejected() -> None:
    with pytest.raises(TypeError, match="cross_size"):
        core.DistributedContext(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0)  # type: ignore[call-arg]


def test_init_accepts_arguments_of_the_reference() -> None:
    with core.DistributedContext(
        **NUMBERS, chief_ip="10.0.0.1", pub_port=1, pull_port=2, port_offset=3, force_tcp=True
    ) as distributed:
        assert distributed.broadcast("x") == "x"


CALLS: list[Callable[[core.DistributedContext], Any]] = [
    lambda d: d.gather(1),
    lambda d: d.allgather(1),
    lambda d: d.broadcast(1),
    lambda d: d.gather_local(1),
    lambda d: d.allgather_local(1),
    lambda d: d.broadcast_local(1),
    lambda d: d.channel("x").broadcast(1),
    lambda d: d.local_channel("x").broadcast(1),
    lambda d: d.check(),
]


@pytest.mark.parametrize("size", [1, 2])
def test_calls_on_closed_context_raise(size: int) -> None:
    def work(distributed: core.DistributedContext) -> None:
        distributed.close()
        distributed.close()
        for call in CALLS:
            with pytest.raises(ContextClosed):
                call(distributed)
        assert distributed.get_rank() in range(size)

    as_ranks(size, work)


def test_close_passes_exit_info_and_failure_to_others() -> None:
    def work(distributed: core.DistributedContext) -> Any:
        distributed.allgather(0)
        if distributed.rank == 1:
            distributed.close(exit_info={"calls": 3}, failure=ValueError("bad batch"))
            return None
        with pytest.raises(PeerLost, match=r"rank 1 .*ValueError: bad batch"):
            distributed.allgather(1)
        assert distributed.communicator is not None
        return distributed.communicator.departed()[1]

    assert as_ranks(2, work)[0] == {"calls": 3}


def test_with_block_left_by_error_names_it_on_others() -> None:
    def work(distributed: core.DistributedContext) -> Any:
        distributed.allgather(0)
        if distributed.rank == 0:
            with pytest.raises(KeyError), distributed:
                raise KeyError("nowhere")
            return None
        with pytest.raises(PeerLost, match=r"rank 0 .*KeyError"):
            distributed.broadcast()

    as_ranks(2, work)


SCRIPT = """
    from det_core import core
    distributed = core.DistributedContext.{constructor}
    got = distributed.allgather(distributed.local_rank)
    print(f"{{distributed.rank}} {{distributed.size}} {{got}}\\n", end="", flush=True)
    distributed.close()
"""


def test_detect_torchrun_variables_returns_its_ranks(tmp_path: Path) -> None:
    with running(SCRIPT.format(constructor="detect()"), 3, tmp_path) as ranks:
        assert ranks.wait() == [0, 0, 0], [ranks.output(r) for r in range(3)]
        assert [ranks.output(r) for r in range(3)] == [f"{r} 3 [0, 1, 2]\n" for r in range(3)]


def test_detect_under_real_torchrun_returns_its_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(constructor="from_torch_distributed()")))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    done = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 [0, 1]", "1 2 [0, 1]"]


def test_from_horovod_reads_the_module() -> None:
    """Any object with horovod's six functions will do."""
    port = free_port()
    out: dict[int, Any] = {}

    def run(rank: int) -> None:
        numbers = {"rank": rank, "size": 2, "local_rank": rank, "local_size": 2, "cross_rank": 0, "cross_size": 1}
        hvd = SimpleNamespace(**{name: (lambda v=value: v) for name, value in numbers.items()})
        with core.DistributedContext.from_horovod(hvd) as distributed:
            out[rank] = distributed.allgather(rank)

    os.environ["INTER_TRAIN_PROCESS_COMM_PORT_1"] = str(port)
    try:
        threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        del os.environ["INTER_TRAIN_PROCESS_COMM_PORT_1"]
    assert out == {0: [0, 1], 1: [0, 1]}


def test_detect_without_launcher_returns_one_rank() -> None:
    with core.DistributedContext.detect() as distributed:
        assert (distributed.rank, distributed.size, distributed.communicator) == (0, 1, None)


def test_from_launcher_that_is_missing_names_it() -> None:
    with pytest.raises(ValueError, match=r"LOCAL_WORLD_SIZE.*torchrun"):
        core.DistributedContext.from_torch_distributed()
    with pytest.raises(ValueError, match=r"CROSS_RANK.*deepspeed"):
        core.DistributedContext.from_deepspeed()
    with pytest.raises(ValueError, match=r"OMPI_COMM_WORLD_RANK.*mpirun"):
        core.DistributedContext.from_mpi()
    with pytest.raises(ValueError, match=r"SLURM_PROCID.*srun"):
        core.DistributedContext.from_slurm()


def test_init_several_nodes_without_secret_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"rank": 3, "size": 4, "local_rank": 1, "local_size": 2, "cross_rank": 1, "cross_size": 2}
    monkeypatch.setenv("DET_CHIEF_IP", "127.0.0.1")
    with pytest.raises(RendezvousError, match="export DET_CORE_SECRET="):
        core.DistributedContext(**numbers)


def test_init_second_context_of_a_rank_names_the_first() -> None:
    port = free_port()

    def context(rank: int) -> core.DistributedContext:
        numbers = {"local_rank": rank, "local_size": 2, "cross_rank": 0, "cross_size": 1}
        return core.DistributedContext(rank=rank, size=2, pub_port=port, **numbers)

    with ThreadPoolExecutor() as threads:
        first = list(threads.map(context, range(2)))
        for rank, message in enumerate(["this process is already the chief", "rank 1 already has a"]):
            with pytest.raises(RendezvousError, match=message):
                context(rank)
        list(threads.map(core.DistributedContext.close, first))
        for again in list(threads.map(context, range(2))):
            threads.submit(again.close)


def test_timeout_defaults_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_CORE_TIMEOUT", "0.3")
    with pytest.raises(CollectiveTimeout, match="no chief"):
        core.DistributedContext(
            rank=1, size=2, local_rank=1, local_size=2, cross_rank=0, cross_size=1, pub_port=free_port()
        )


def test_barrier_returns_after_every_rank_has_called() -> None:
    come: list[int] = []

    def work(distributed: core.DistributedContext) -> tuple[int, int]:
        come.append(distributed.rank)
        distributed.barrier("here")
        first = len(come)
        distributed.barrier_local()
        return first, distributed.allgather(distributed.rank)[-1]

    assert as_ranks(3, work) == [(3, 2)] * 3
    assert core.DistributedContext.detect().barrier("alone") is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize("missing", [0, 1])
def test_barrier_warning_has_name_and_missing_rank(missing: int) -> None:
    said: list[str] = []

    def work(distributed: core.DistributedContext) -> None:
        if distributed.rank == missing:
            come.wait()
            return
        with pytest.raises(CollectiveTimeout) as e:
            distributed.channel("user").barrier("evaluation is done", timeout=0.3)
        said.append(str(e.value))
        come.set()

    come = threading.Event()
    as_ranks(2, work)
    assert said[0].startswith("barrier 'evaluation is done' (call 1) timed out after 0.3 s waiting for ")
    assert f"rank {missing} " in said[0]


def test_barrier_beside_another_call_raises_mismatch() -> None:
    def work(distributed: core.DistributedContext) -> None:
        distributed.barrier("mine") if distributed.rank else distributed.gather(1)

    with pytest.raises(CollectiveMismatch, match=r"rank 0 called gather \(call 1\), rank 1 called barrier \(call 1\)"):
        as_ranks(2, work)


@pytest.mark.parametrize("caller", [0, 1])
@pytest.mark.parametrize("call", ["restore_path", "store_path"])
def test_collective_of_one_rank_alone_names_the_others_call(
    tmp_path: Path, caller: int, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_membership, "WARN_AFTER", 0.2)
    monkeypatch.setenv("DET_CORE_TIMEOUT", "4")  # the chief has been asked many times by then

    def work(distributed: core.DistributedContext) -> str:
        checkpoint = Recorder().context(distributed, tmp_path)
        with pytest.raises(CollectiveTimeout) as e:
            if distributed.rank != caller:
                distributed.barrier()
            elif call == "store_path":
                checkpoint.store_path(shard=True).__enter__()
            else:
                checkpoint.restore_path("11111111-1111-4111-8111-111111111111").__enter__()
        all_have_raised.wait()  # if one closed earlier, the others would name that one
        return str(e.value)

    all_have_raised = threading.Barrier(3)
    calls = [f"checkpoint.{call}()" if rank == caller else "distributed.barrier()" for rank in range(3)]
    errors = as_ranks(3, work)
    for rank, error in enumerate(errors):
        other = caller or max(rank, 1)
        expected = f"rank {other} is in {calls[other]}, rank 0 in {calls[0]}: every rank has to call it"
        assert expected in error
        warnings = [m for m in caplog.messages if f"rank {rank} in " in m and "has waited for" in m]
        assert any(expected in warning for warning in warnings), warnings


LEFT = """
    import sys, threading
    from det_core import core
    from det_core.errors import PeerLost

    how, culprit = sys.argv[1], int(sys.argv[2])
    distributed = core.DistributedContext.detect()

    def work():
        with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
            try:
                ctx.distributed.barrier("all have begun")
                if distributed.rank == culprit:
                    raise ValueError("bad sample 4711")
                if how == "barrier":
                    ctx.distributed.barrier("evaluation")
                elif how == "gather":
                    ctx.distributed.gather(None)
                else:
                    ctx.distributed.raise_if_peer_failed(10)
            except PeerLost as e:
                print("raised", type(e).__name__, e, flush=True)

    threads = [threading.Thread(target=work)] if "thread" in sys.argv else []
    for thread in threads:
        thread.start()
        thread.join()
    if not threads:
        work()
"""


@pytest.mark.parametrize(
    ("how", "where", "culprit"),
    [
        ("barrier", "thread", 0),
        ("gather", "main", 1),
        ("raise_if_peer_failed", "main", 0),
        ("raise_if_peer_failed", "thread", 1),
    ],
)
def test_collective_with_failed_rank_raises_its_error(tmp_path: Path, how: str, where: str, culprit: int) -> None:
    with running(LEFT, 3, tmp_path, args=(how, str(culprit), where)) as ranks:
        status = ranks.wait()
    assert where == "thread" or (status[culprit] == 1 and status.count(0) == 2)
    for rank in {0, 1, 2} - {culprit}:
        said = ranks.output(rank)
        assert "raised PeerLost" in said and "ValueError: bad sample 4711" in said and f"rank {culprit} " in said, said


TORCH = """
    import sys
    import torch
    from det_core import core

    distributed = core.DistributedContext.detect()
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
        for step in range(100):
            if step == 20 and distributed.rank == 1:
                raise ValueError("bad sample 4711")
            try:
                model(torch.ones(2, 4)).sum().backward()
            except RuntimeError as e:
                ctx.distributed.raise_if_peer_failed()
                raise
"""


def test_raise_if_peer_failed_after_torch_collective_names_rank(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with running(TORCH, 2, tmp_path) as ranks:
        status = ranks.wait()
    # gloo's threads outlive their group, and may abort the interpreter at its end, all said
    assert status[0] != 0 and "PeerLost: rank 1 has left after ValueError: bad sample 4711" in ranks.output(0)


def test_raise_if_peer_failed_without_failure_returns() -> None:
    def work(distributed: core.DistributedContext) -> None:
        distributed.raise_if_peer_failed(within=0.05)
        distributed.barrier()

    as_ranks(2, work)
    alone = core.DistributedContext.detect()
    alone.raise_if_peer_failed()
    alone.close()
    with pytest.raises(ContextClosed):
        alone.raise_if_peer_failed()

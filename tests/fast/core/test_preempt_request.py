"""Stops that the script asks for: ``ctx.preempt.request()``."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from det_core import client, core
from det_core.core import PreemptContext
from det_core.errors import ContextClosed
from support.ours import config, opened, variables
from support.ranks import Ranks, running
from support.running_master import Running
from support.threads import as_ranks

ROUNDS = """
    import json, os, random, signal, sys
    from det_core import core

    rounds, signals, seed = map(int, sys.argv[1:])
    distributed = core.DistributedContext.from_torch_distributed()
    rank, size = distributed.rank, distributed.size

    def one_round(ctx, rng, round, calls, also):
        '''Steps with a collective each, until a call returns True; what this rank saw.'''
        asker, asks_at = rng.randrange(size), calls + rng.randint(1, 8)
        target, pause = rng.randrange(size), rng.random()
        while True:
            ctx.distributed.allgather(None)
            calls += 1
            if ctx.preempt.should_preempt():
                return calls, asks_at
            if calls == asks_at:
                if rank == asker:
                    ctx.preempt.request(f"round {round}, rank {rank}")
                if also and rank == target:
                    os.kill(os.getpid(), signal.SIGTERM)

    if signals:
        for round in range(rounds):
            rng = random.Random(seed + round)
            with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
                seen = []
                calls = 0
                while not seen or seen[-1][2] != "signal":
                    calls, asks_at = one_round(ctx, rng, round, calls, not seen)
                    seen.append([calls, asks_at, ctx.preempt.reason])
                    assert ctx.preempt.acknowledged == (rank == 0 and ctx.preempt.reason == "signal")
                assert ctx.preempt.should_preempt(), "a preemption stays"
                print("seen " + json.dumps(seen), flush=True)
            distributed = core.DistributedContext.from_torch_distributed()
        distributed.close()
    else:
        rng = random.Random(seed)
        with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
            calls = 0
            for round in range(rounds):
                calls, asks_at = one_round(ctx, rng, round, calls, False)
                print("seen " + json.dumps([[calls, asks_at, ctx.preempt.reason]]), flush=True)
            assert not ctx.preempt.acknowledged
"""


def seen(ranks: Ranks, rank: int) -> list[list[tuple[int, int, str]]]:
    return [json.loads(line[5:]) for line in ranks.output(rank).splitlines() if line.startswith("seen ")]


def requests(folder: Path, rounds: int, seed: int) -> None:
    """Stop all ranks at one call by a request on any rank, repeatedly."""
    with running(ROUNDS, 4, folder, args=(str(rounds), "0", str(seed))) as ranks:
        assert ranks.wait() == [0] * 4, ranks.output(0)
    told = [seen(ranks, rank) for rank in range(4)]
    assert len(told[0]) == rounds and all(each == told[0] for each in told)
    for round_, [[call, asked_at, reason]] in enumerate(told[0]):
        assert asked_at < call <= asked_at + 2
        assert reason.startswith(f"round {round_}, rank ")


def requests_and_signals(folder: Path, size: int, rounds: int, seed: int) -> None:
    """Whichever comes first, all ranks stop at the same calls for the same reasons, and the preemption is not lost."""
    with running(ROUNDS, size, folder, args=(str(rounds), "1", str(seed))) as ranks:
        assert ranks.wait() == [0] * size, ranks.output(0)
    told = [seen(ranks, rank) for rank in range(size)]
    assert len(told[0]) == rounds and all(each == told[0] for each in told), told
    for stops in told[0]:
        assert stops[0][0] <= stops[0][1] + 2
        assert [reason for *_, reason in stops[:-1]] != ["signal"]


def test_request_on_any_rank_stops_all_at_one_call(tmp_path: Path) -> None:
    requests(tmp_path, 20, seed=1)


@pytest.mark.parametrize("size", [1, 4])
def test_request_and_signal_at_one_moment_is_a_preemption(tmp_path: Path, size: int) -> None:
    requests_and_signals(tmp_path, size, 15, seed=1)


WITH_MASTER = """
    import json, random, sys, threading, time
    import requests
    from det_core import core

    seed, pause_url, token = int(sys.argv[1]), *sys.argv[2:]
    distributed = core.DistributedContext.from_torch_distributed()
    rank, rng = distributed.rank, random.Random(seed)

    def pause():
        headers = {"Grpc-Metadata-x-allocation-token": f"Bearer {token}"}
        assert requests.post(pause_url, headers=headers).status_code == 200

    with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
        asker, at, apart = rng.randrange(4), rng.randrange(2, 100), rng.random() * 0.03
        ctx.preempt.should_preempt()
        stops, calls = [], 1
        while "master" not in [reason for _, reason in stops]:
            ctx.distributed.allgather(None)
            calls += 1
            if ctx.preempt.should_preempt():
                stops.append([calls, ctx.preempt.reason])
            if rank == asker and calls == at:
                pausing = threading.Thread(target=pause)
                pausing.start()
                time.sleep(apart)  # about as long as the master's word takes
                ctx.preempt.request("mine")
        if rank == asker:
            pausing.join()
        print("seen " + json.dumps(stops), flush=True)
"""


def requests_and_pauses(folder: Path, rounds: int, seed: int) -> None:
    """Let the script and the master request a stop at one moment."""
    (folder / "home").mkdir()
    master = Running(folder / "home", 100 << 20)
    try:
        for round_ in range(rounds):
            here = folder / str(round_)
            here.mkdir()
            spec = replace(master.a_trial(config(here)), master_url=master.url)
            url = f"{master.url}/api/v1/experiments/{spec.experiment_id}/pause"
            args = (str(seed + round_), url, master.token)
            with running(WITH_MASTER, 4, here, env=variables(spec, here), args=args) as ranks:
                assert ranks.wait() == [0] * 4, ranks.output(0)
            told = [seen(ranks, rank) for rank in range(4)]
            assert all(each == told[0] for each in told) and told[0], told
            master.end(spec.allocation_id, 0)
            master.until(spec.experiment_id, "STATE_PAUSED")
    finally:
        master.close()


def test_request_and_masters_preemption_at_one_moment_agree(tmp_path: Path) -> None:
    requests_and_pauses(tmp_path, 2, seed=1)


def test_trial_that_stops_itself_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop is not acknowledged, so the master does not start the trial again."""
    (tmp_path / "home").mkdir()
    master = Running(tmp_path / "home", 100 << 20)
    try:
        spec = replace(master.a_trial(config(tmp_path)), master_url=master.url)
        with opened(spec, tmp_path, monkeypatch) as ctx:
            assert not ctx.preempt.should_preempt()
            ctx.preempt.request("early stopping")
            assert ctx.preempt.should_preempt() and not ctx.preempt.acknowledged
        master.end(spec.allocation_id, 0)
        master.until(spec.experiment_id, "STATE_COMPLETED")
        trial = master.ask("GET", f"trials/{spec.trial_id}").json["trial"]
        assert (trial["state"], trial["restarts"]) == ("STATE_COMPLETED", 0)
    finally:
        master.close()


def test_request_on_single_rank_stops_next_call(capfd: pytest.CaptureFixture[str]) -> None:
    with core.init() as ctx:
        preempt = ctx.preempt
        assert not preempt.should_preempt() and not preempt.requested and preempt.reason is None
        assert not preempt.is_preemption
        preempt.request("NaN in the loss")
        preempt.request("asked twice")
        assert preempt.requested
        assert preempt.should_preempt()
        assert preempt.reason == "NaN in the loss" and not preempt.acknowledged and not preempt.requested
        assert not preempt.should_preempt(), "a stop of the script's own is over once it is answered"
        preempt.request()
        assert preempt.should_preempt() and preempt.reason == "" and not preempt.is_preemption
        preempt.request("the last word")
        assert preempt.should_preempt()
    run = client.run(ctx.run_id)
    assert run.state == "stopped"
    said = capfd.readouterr().err
    assert f"run {ctx.run_id} stopped by the script: the last word; nothing was saved, " in said
    assert f"; to resume it: DET_CORE_RESUME={ctx.run_id} " in said


def test_run_that_continues_after_its_stop_is_completed() -> None:
    with core.init() as ctx:
        ctx.preempt.request()
        assert ctx.preempt.should_preempt()
        assert not ctx.preempt.should_preempt()
    assert client.run(ctx.run_id).state == "completed"


def test_signal_after_request_is_a_preemption() -> None:
    with core.init() as ctx:
        ctx.preempt.should_preempt()
        ctx.preempt.request("mine")
        os.kill(os.getpid(), signal.SIGUSR1)
        assert ctx.preempt.should_preempt() and ctx.preempt.reason == "signal" and ctx.preempt.acknowledged
        assert ctx.preempt.is_preemption
        assert ctx.preempt.should_preempt() and ctx.preempt.requested
        ctx.preempt.request("too late")
        assert ctx.preempt.should_preempt() and ctx.preempt.reason == "signal"


def test_preemption_requested_in_a_thread_stops_the_loop() -> None:
    with core.init() as ctx:
        for number in range(20):
            thread = threading.Thread(target=ctx.preempt.request, args=(str(number),))
            thread.start()
            while not ctx.preempt.should_preempt():
                time.sleep(0)
            thread.join()
            assert ctx.preempt.reason == str(number)


def test_request_invalid_reason_is_rejected() -> None:
    ctx = core.init()
    with pytest.raises(ValueError, match="reserved for preemptions"):
        ctx.preempt.request("signal")
    with pytest.raises(TypeError, match="reason must be a string, not int"):
        ctx.preempt.request(3)  # type: ignore[arg-type]
    ctx.close()
    with pytest.raises(ContextClosed, match="request"):
        ctx.preempt.request()


MODES = """
    import sys, time
    from det_core import core

    mode = core.PreemptMode[sys.argv[1]]
    asker = int(sys.argv[2])
    distributed = core.DistributedContext.from_torch_distributed()
    with core.init(distributed=distributed, preempt_mode=mode) as ctx:
        for round in range(5):
            distributed.barrier(f"round {round}")
            if distributed.rank == asker:
                distributed.communicator.call_soon(lambda: time.sleep(0.02))  # the next call comes before the decision
                ctx.preempt.request(f"round {round}")
            if mode is core.PreemptMode.ChiefOnly and distributed.rank:
                assert distributed.broadcast(None) == f"round {round}"
            else:
                while not ctx.preempt.should_preempt():
                    assert distributed.rank != asker or mode is core.PreemptMode.WorkersAskChief
                    time.sleep(0.002)
                assert ctx.preempt.reason == f"round {round}"
                if mode is core.PreemptMode.ChiefOnly:
                    distributed.broadcast(ctx.preempt.reason)
        distributed.barrier()
        if distributed.rank == 0 or mode is not core.PreemptMode.ChiefOnly:
            assert not ctx.preempt.should_preempt()
"""


@pytest.mark.parametrize(
    ("mode", "asker"), [("ChiefOnly", 1), ("WorkersAskMaster", 0), ("WorkersAskChief", 0), ("WorkersAskChief", 1)]
)
def test_request_in_every_mode_stops(tmp_path: Path, mode: str, asker: int) -> None:
    with running(MODES, 2, tmp_path, args=(mode, str(asker))) as ranks:
        assert ranks.wait() == [0, 0], ranks.output(0) + ranks.output(1)


@pytest.mark.parametrize("over", ["a socket", "tcp"])
def test_request_before_close_does_not_hang(tmp_path: Path, over: str) -> None:
    """And contexts one after another in the same processes are jobs of their own."""
    code = """
        import os, random, sys
        from det_core import core

        rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
        ranks = dict(rank=rank, size=3, local_rank=rank, local_size=3, cross_rank=0, cross_size=1)
        for round in range(15):
            rng = random.Random(round)
            distributed = core.DistributedContext(
                **ranks, chief_ip="127.0.0.1", pub_port=port, force_tcp=sys.argv[1] == "tcp", insecure=True
            )
            with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
                for _ in range(rng.randrange(3)):
                    ctx.preempt.should_preempt()
                if distributed.rank in (rng.randrange(3), rng.randrange(3)):
                    ctx.preempt.request("and leave")
        print("left", flush=True)
    """
    with running(code, 3, tmp_path, args=(over,)) as ranks:
        assert ranks.wait() == [0] * 3, "".join(map(ranks.output, range(3)))


ALONE = """
    import os, signal, sys
    from det_core import core

    distributed = core.DistributedContext.from_torch_distributed()
    before = signal.getsignal(signal.SIGTERM)
    preempt = core.PreemptContext(distributed)
    for step in range(1, 100):
        distributed.allgather(None)
        if step == 7 and distributed.rank == 1:
            preempt.request("patience is at its end")
        if preempt.should_preempt():
            break
    assert signal.getsignal(signal.SIGTERM) is before
    print("stopped", step, preempt.reason, flush=True)
    distributed.close()
    try:
        preempt.should_preempt()
    except Exception as e:
        print("closed:", e, flush=True)
"""


def test_preempt_context_alone_agrees(tmp_path: Path) -> None:
    with running(ALONE, 2, tmp_path, env={"DET_CORE_HOME": str(tmp_path / "none")}) as ranks:
        assert ranks.wait() == [0, 0], ranks.output(0)
    for rank in range(2):
        assert "closed: should_preempt() was called on a context that is closed" in ranks.output(rank)
    stopped = {line for rank in range(2) for line in ranks.output(rank).splitlines() if "stopped" in line}
    assert stopped <= {"stopped 7 patience is at its end", "stopped 8 patience is at its end"} and len(stopped) == 1
    assert not (tmp_path / "none").exists(), "it records nothing"


def test_preempt_contexts_in_sequence_do_not_mix() -> None:
    """A rank may be in the next one while another has not closed the last."""

    def work(distributed: core.DistributedContext) -> list[str | None]:
        found = []
        for round_ in range(20):
            preempt = PreemptContext(distributed)
            if distributed.rank == round_ % 3:
                preempt.request(f"round {round_}")
            while not preempt.should_preempt():
                distributed.allgather(None)
            found.append(preempt.reason)
            if distributed.rank == round_ % 2:
                time.sleep(0.005)
            preempt.close()
        return found

    assert as_ranks(3, work) == [[f"round {round_}" for round_ in range(20)]] * 3


def test_preempt_context_second_one_is_rejected() -> None:
    with core.DistributedContext.detect() as distributed:
        first = PreemptContext(distributed)
        with pytest.raises(RuntimeError, match="already has a PreemptContext"):
            PreemptContext(distributed)
        first.close()
        again = PreemptContext(distributed)
        again.request("x")
        assert again.should_preempt() and not again.should_preempt()

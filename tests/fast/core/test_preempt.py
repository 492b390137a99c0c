"""Preemption by signal, on real ranks."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from det_core import core
from det_core._standalone.stop_signals import STOP_SIGNALS
from det_core.errors import CollectiveTimeout, ContextClosed, DetCoreError
from support.commands import det_core
from support.processes import suspend, until
from support.ranks import running
from support.threads import as_ranks

ROUNDS = """
    import json, random, sys, time
    from det_core import core

    rounds = int(sys.argv[1])
    for round in range(rounds):
        distributed = core.DistributedContext.from_torch_distributed()
        rng = random.Random(round * 100 + distributed.rank)
        with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
            calls = 1
            stopped = ctx.preempt.should_preempt()
            print("ready", flush=True)
            while not stopped:
                if rng.random() < 0.3:
                    time.sleep(rng.random() * 0.004)
                calls += 1
                stopped = ctx.preempt.should_preempt()
            again = ctx.preempt.should_preempt()
            print("stopped " + json.dumps([calls, again]), flush=True)
"""


def signal_every_round(tmp_path: Path, size: int, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    with running(ROUNDS, size, tmp_path, args=(str(rounds),)) as ranks:
        for done in range(1, rounds + 1):
            ranks.wait_for("ready", times=done)
            time.sleep(rng.random() * 0.01)
            target = rng.randrange(size)
            os.kill(ranks.processes[target].pid, rng.choice(STOP_SIGNALS))
            ranks.wait_for("stopped", times=done)
        assert ranks.wait() == [0] * size
    told = [
        [json.loads(line.split(" ", 1)[1]) for line in ranks.output(rank).splitlines() if line.startswith("stopped")]
        for rank in range(size)
    ]
    for round_ in range(rounds):
        calls = {told[rank][round_][0] for rank in range(size)}
        assert len(calls) == 1, f"round {round_}: the ranks stopped at calls {[t[round_] for t in told]}"
        assert all(told[rank][round_][1] for rank in range(size)), "a later call returned False"


@pytest.mark.parametrize(("size", "rounds"), [(1, 5), (4, 12)])
def test_signal_to_any_rank_stops_all_at_one_call(tmp_path: Path, size: int, rounds: int) -> None:
    signal_every_round(tmp_path, size, rounds, seed=1)


def test_simultaneous_signals_are_one_request(tmp_path: Path) -> None:
    with running(ROUNDS, 4, tmp_path, args=("1",)) as ranks:
        ranks.wait_for("ready")
        for process in ranks.processes:
            os.kill(process.pid, signal.SIGTERM)
        assert ranks.wait() == [0] * 4
    assert len({ranks.output(rank).split("stopped ")[1].splitlines()[0] for rank in range(4)}) == 1


MODES = """
    import sys, time
    from det_core import core

    mode = core.PreemptMode[sys.argv[1]]
    distributed = core.DistributedContext.from_torch_distributed()
    with core.init(distributed=distributed, preempt_mode=mode) as ctx:
        if mode is core.PreemptMode.ChiefOnly and distributed.rank:
            try:
                ctx.preempt.should_preempt()
            except RuntimeError as e:
                print("refused", e)
            print("ready", flush=True)
            assert distributed.broadcast(None) == "stop"
        else:
            ctx.preempt.should_preempt()
            print("ready", flush=True)
            while not ctx.preempt.should_preempt():
                time.sleep(0.002)
            if mode is core.PreemptMode.ChiefOnly:
                distributed.broadcast("stop")
        print("stopped", flush=True)
"""


def test_workers_ask_master_stops_each_rank(tmp_path: Path) -> None:
    with running(MODES, 3, tmp_path, args=("WorkersAskMaster",)) as ranks:
        ranks.wait_for("ready")
        os.kill(ranks.processes[1].pid, signal.SIGTERM)
        assert ranks.wait() == [0, 0, 0]
    assert all("stopped" in ranks.output(rank) for rank in range(3))


def test_chief_only_allows_calls_on_rank_0(tmp_path: Path) -> None:
    with running(MODES, 2, tmp_path, args=("ChiefOnly",)) as ranks:
        ranks.wait_for("ready")
        os.kill(ranks.processes[0].pid, signal.SIGTERM)
        assert ranks.wait() == [0, 0]
    assert "refused rank 1 called should_preempt(), which the mode ChiefOnly allows on rank 0 alone" in ranks.output(1)


DEATH = """
    import sys, time
    from det_core import core

    distributed = core.DistributedContext.from_torch_distributed()
    with core.init(distributed=distributed) as ctx:
        ctx.preempt.should_preempt()
        print("ready", flush=True)
        while True:
            try:
                stopped = ctx.preempt.should_preempt()
            except Exception as e:
                print("raised", type(e).__name__, e, flush=True)
                assert not ctx.preempt.acknowledged
                sys.exit(3)
            if stopped:
                print("took it for a preemption", flush=True)
                sys.exit(4)
            time.sleep(0.001)
"""


@pytest.mark.parametrize("victim", [0, 2])
def test_signal_after_loss_of_a_rank_is_not_a_preemption(tmp_path: Path, victim: int) -> None:
    with running(DEATH, 3, tmp_path) as ranks:
        ranks.wait_for("ready")
        os.kill(ranks.processes[victim].pid, signal.SIGKILL)
        ranks.processes[victim].wait()  # torchrun leaves a tenth of a second more before its SIGTERM to the others
        for rank in range(3):
            if rank != victim:
                ranks.processes[rank].send_signal(signal.SIGTERM)  # unless it has ended by then
        status = ranks.wait()
    for rank in range(3):
        if rank != victim:
            # 3 is the script's own status; a SIGTERM may find the interpreter already shutting down, all said.
            assert status[rank] in (3, -signal.SIGTERM), (status, ranks.output(rank))
            assert "took it for a preemption" not in ranks.output(rank)
            assert "raised PeerLost" in ranks.output(rank)
            assert f"rank {victim}" in ranks.output(rank)


def test_signals_after_a_loss_ignore_one_sigterm(tmp_path: Path) -> None:
    code = """
        import os, signal, time
        from det_core import core

        distributed = core.DistributedContext.from_torch_distributed()
        distributed.communicator.on_abort(lambda: time.sleep(1))  # the gather raises before all callbacks have run
        try:
            with core.init(distributed=distributed) as ctx:
                ctx.preempt.should_preempt()
                if distributed.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                distributed.gather(None)
        except Exception as e:
            os.kill(os.getpid(), signal.SIGTERM)
            print("still here", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
    """
    with running(code, 2, tmp_path) as ranks:
        assert ranks.wait() == [-signal.SIGTERM, -signal.SIGKILL]
    assert "still here" in ranks.output(0)


ENDS = """
    import sys, time
    from det_core import core

    distributed = core.DistributedContext.from_torch_distributed()
    slow = int(sys.argv[1])
    with core.init(distributed=distributed) as ctx:
        for call in range(200):
            if ctx.preempt.should_preempt():
                print("stopped at", call, flush=True)
                break
            if call == 0:
                print("ready", flush=True)
            if distributed.rank == slow:
                time.sleep(0.005)
        else:
            print("finished", flush=True)
"""


@pytest.mark.parametrize(("slow", "target"), [(0, 1), (1, 1)])
def test_finished_rank_does_not_block_the_others(tmp_path: Path, slow: int, target: int) -> None:
    """The fast rank has made its last call when the signal comes: nobody stops early, nobody waits for ever."""
    with running(ENDS, 2, tmp_path, args=(str(slow),)) as ranks:
        ranks.wait_for("ready")
        ranks.wait_for("finished", ranks=[1 - slow])
        if ranks.processes[target].poll() is None:
            os.kill(ranks.processes[slow].pid, signal.SIGTERM)
        assert ranks.wait() == [0, 0]
    assert "finished" in ranks.output(slow)


HANDLERS = """
    import os, signal, sys
    from det_core import core
    from det_core.core import _signals

    seen = []
    signal.signal(signal.SIGUSR1, lambda *a: seen.append("mine"))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    with core.init() as ctx:
        assert not ctx.preempt.should_preempt()
        os.kill(os.getpid(), signal.SIGTERM)
        assert not ctx.preempt.should_preempt(), "an ignored signal stays ignored"
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGINT)
            os._exit(int(ctx.preempt.requested))
        assert os.waitpid(child, 0)[1] == 0
        os.kill(os.getpid(), signal.SIGUSR1)
        assert ctx.preempt.should_preempt()
        assert seen == ["mine"]
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # a scheduler's, which a launcher has passed on as well
        _signals.SAME_INTERRUPT = 0.0
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == before
    print("restored", flush=True)
"""


def test_handlers_are_chained_and_restored(tmp_path: Path) -> None:
    with running(HANDLERS, 1, tmp_path) as ranks:
        assert ranks.wait() == [0], ranks.output(0)
    said = ranks.output(0)
    assert "stopping at the next should_preempt(); Ctrl-C again to interrupt now" in said
    assert "interrupted" in said and "restored" in said


def test_forked_child_dies_of_sigterm(tmp_path: Path) -> None:
    code = """
        import os, signal
        from det_core import core

        with core.init() as ctx:
            ctx.preempt.should_preempt()
            for number in [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP] * 5:
                child = os.fork()
                if child == 0:
                    signal.pause()
                    os._exit(0)
                os.kill(child, number)  # at once: it may well be in the middle of its start
                _, status = os.waitpid(child, 0)
                assert os.WTERMSIG(status) == number
            print("children died", ctx.preempt.should_preempt(), flush=True)
    """
    with running(code, 1, tmp_path) as ranks:
        assert ranks.wait() == [0], ranks.output(0)
    assert "children died False" in ranks.output(0)


def test_should_preempt_without_auto_ack_leaves_acknowledgement_to_caller() -> None:
    with core.init() as ctx:
        ctx.preempt.should_preempt()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert ctx.preempt.should_preempt(auto_ack=False)
        assert not ctx.preempt.acknowledged
        ctx.preempt.acknowledge_preemption_signal()
        assert ctx.preempt.acknowledged


def test_should_preempt_outside_main_thread_installs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with core.init() as ctx:
        thread = threading.Thread(target=ctx.preempt.should_preempt)
        thread.start()
        thread.join()
        assert "not on the main thread" in caplog.text


def test_closed_context_raises() -> None:
    ctx = core.init()
    ctx.close()
    with pytest.raises(Exception, match="context that is closed"):
        ctx.preempt.should_preempt()


@pytest.mark.parametrize(("name", "size"), [("SIGTERM", 2), ("SIGHUP", 1), ("SIGINT", 2), ("SIGUSR1", 1)])
def test_stopped_rank_survives_further_signals(tmp_path: Path, name: str, size: int) -> None:
    """A scheduler signals every process, the launcher each rank once more; a stop may be quicker than both."""
    number = getattr(signal, name)
    code = f"""
        import os, signal, time
        from det_core import core

        number = signal.Signals.{name}

        distributed = core.DistributedContext.from_torch_distributed()
        for round in range(3):
            with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
                ctx.preempt.should_preempt()
                print("ready", flush=True)
                while not ctx.preempt.should_preempt():
                    time.sleep(0.001)
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            print("stopped", flush=True)
            distributed = core.DistributedContext.from_torch_distributed()
        distributed.close()
    """
    with running(code, size, tmp_path, env={"DET_CORE_COMMAND": "a launcher"}) as ranks:
        for round_ in range(1, 4):
            ranks.wait_for("ready", times=round_)
            os.kill(ranks.processes[0].pid, number)
            ranks.wait_for("stopped", times=round_)
        assert ranks.wait() == [0] * size


FOUND = """
    import signal, sys
    from det_core import core

    mine = lambda number, frame: None
    signal.signal(signal.SIGTERM, mine)
    signal.signal(signal.SIGUSR1, mine)
    distributed = core.DistributedContext.from_torch_distributed()
    with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
        ctx.preempt.should_preempt()
        assert signal.getsignal(signal.SIGTERM) is not mine
        print("ready", flush=True)
        while not ctx.preempt.should_preempt():
            distributed.allgather(None)
    assert signal.getsignal(signal.SIGTERM) is mine, "a handler of the script's does not wait for a late signal"
    assert signal.getsignal(signal.SIGUSR1) is mine
    print("restored", flush=True)
"""


def test_close_restores_the_handlers_found(tmp_path: Path) -> None:
    with running(FOUND, 2, tmp_path) as ranks:
        ranks.wait_for("ready")
        os.kill(ranks.processes[1].pid, signal.SIGUSR1)
        assert ranks.wait() == [0, 0], ranks.output(0) + ranks.output(1)


def test_handlers_of_context_closed_in_a_thread_give_way(tmp_path: Path) -> None:
    code = """
        import os, signal, threading
        from det_core import core

        seen = []
        mine = lambda number, frame: seen.append("mine")
        signal.signal(signal.SIGUSR1, mine)
        ctx = core.init()
        ctx.preempt.should_preempt()
        closing = threading.Thread(target=ctx.close)
        closing.start()
        closing.join()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == ["mine"] and signal.getsignal(signal.SIGUSR1) is mine
        print("given way", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    """
    with running(code, 1, tmp_path) as ranks:
        assert ranks.wait() == [-signal.SIGTERM], ranks.output(0)
    assert "given way" in ranks.output(0)


def test_forked_child_closes_its_copy_without_waiting(tmp_path: Path) -> None:
    code = """
        import os
        from det_core import core
        from det_core.core import _preemption

        _preemption.CLOSE_TIMEOUT = 3600.0
        distributed = core.DistributedContext.from_torch_distributed()
        preempt = core.PreemptContext(distributed)
        preempt.should_preempt()
        child = os.fork()
        if child == 0:
            preempt.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        distributed.barrier()
        distributed.close()
    """
    with running(code, 2, tmp_path) as ranks:
        assert ranks.wait() == [0, 0], ranks.output(0) + ranks.output(1)


STEPS = """
    import sys, time
    from det_core import core
    from det_core.ipc import _membership

    _membership.WARN_AFTER = float(sys.argv[1])
    distributed = core.DistributedContext.from_torch_distributed()
    with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
        ctx.preempt.should_preempt()
        distributed.barrier("all have begun")
        print("ready", flush=True)
        while not ctx.preempt.should_preempt():
            time.sleep(0.002)
        print("stopped", flush=True)
"""


@pytest.mark.parametrize("stopped", [0, 2])
def test_suspended_rank_is_named_while_others_wait_to_stop(tmp_path: Path, stopped: int) -> None:
    others = [rank for rank in range(3) if rank != stopped]
    with running(STEPS, 3, tmp_path, args=("1.5",)) as ranks:
        ranks.wait_for("ready")
        suspend(ranks.processes[stopped].pid)
        os.kill(ranks.processes[1].pid, signal.SIGTERM)
        ranks.wait_for(f" s for rank {stopped}", ranks=others if stopped == 2 else [1])
        os.kill(ranks.processes[stopped].pid, signal.SIGCONT)
        ranks.wait_for("responded after ", ranks=others if stopped == 2 else [1])
        assert ranks.wait() == [0, 0, 0]
    for rank in others:
        assert ranks.output(rank).count("has waited for") <= 1
    if stopped == 2:
        assert "rank 2 (last call: barrier" in ranks.output(0) and "rank 2 (last call: barrier" in ranks.output(1)


DEADLINE = """
    import time
    from det_core import core

    distributed = core.DistributedContext.from_torch_distributed()
    assert distributed.timeout == 3600
    with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
        ctx.preempt.should_preempt()
        distributed.barrier("all have begun")
        distributed.timeout = 1
        print("ready", flush=True)
        while not ctx.preempt.should_preempt():
            time.sleep(0.002)
"""


def test_agreement_respects_the_timeout(tmp_path: Path) -> None:
    with running(DEADLINE, 2, tmp_path, env={"DET_CORE_TIMEOUT": "3600"}) as ranks:
        ranks.wait_for("ready")
        suspend(ranks.processes[1].pid)
        os.kill(ranks.processes[0].pid, signal.SIGTERM)
        ranks.wait_for("CollectiveTimeout: should_preempt() call ", ranks=[0])
        assert "timed out after 1 s waiting for rank 1 (last call: barrier" in ranks.output(0)


def test_close_after_the_timeout_does_not_wait() -> None:
    blocked, closed = threading.Event(), threading.Event()

    def suspend() -> None:
        blocked.set()
        closed.wait()

    def work(distributed: core.DistributedContext) -> bool:
        preempt = core.PreemptContext(distributed)
        assert not preempt.should_preempt() and distributed.communicator is not None
        if distributed.rank == 1:
            distributed.communicator.call_soon(suspend)
            preempt.request("on rank 1")
        else:
            blocked.wait()
            distributed.timeout = 0.1
            preempt.request("on rank 0")
            with pytest.raises(CollectiveTimeout):
                preempt.should_preempt()
            distributed.timeout = None
            preempt.close()
            closed.set()
        stopped = distributed.rank == 1 and preempt.should_preempt()
        distributed.barrier()
        return stopped

    assert as_ranks(2, work) == [False, False]


ALONE = """
    from det_core import core
    from det_core.core import _preemption

    _preemption.WARN_AFTER = 0.3
    distributed = core.DistributedContext.from_torch_distributed()
    with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
        stop = False
        while not stop:
            stop = distributed.broadcast(distributed.rank == 0 and ctx.preempt.should_preempt())
"""


def test_ranks_that_never_call_should_preempt_are_named(tmp_path: Path) -> None:
    with running(ALONE, 3, tmp_path) as ranks:
        ranks.wait_for("rank 1, 2 never called", ranks=[0])
        assert "core.init(preempt_mode=core.PreemptMode.ChiefOnly)" in ranks.output(0)
        os.kill(ranks.processes[0].pid, signal.SIGTERM)
        assert ranks.wait() == [0, 0, 0]
    assert ranks.output(0).count("never called") == 1


DIES = """
    import os, signal, sys
    from det_core import core

    with core.init(name="dies", resume="latest") as ctx:
        if sys.argv[1] == "asks":
            ctx.preempt.should_preempt()
        os.kill(os.getpid(), signal.SIGKILL if sys.argv[1] == "asks" else signal.SIGTERM)
"""


def test_run_that_died_before_first_call_explains_it(tmp_path: Path) -> None:
    said = "before its first should_preempt() call"
    with running(DIES, 1, tmp_path, args=("dies",)) as ranks:
        assert ranks.wait() == [-signal.SIGTERM]
        assert said not in ranks.output(0)
    assert said in det_core("runs", "show", "latest").stdout
    with running(DIES, 1, tmp_path, args=("asks",)) as ranks:
        assert ranks.wait() == [-signal.SIGKILL]
        assert said in ranks.output(0), "the next start"
    assert said not in det_core("runs", "show", "latest").stdout
    with running(DIES, 1, tmp_path, args=("asks",)) as ranks:
        ranks.wait()
        assert said not in ranks.output(0)


SELDOM = """
    import os, signal, sys, threading
    from det_core import core

    with core.init(name="seldom", resume="latest") as ctx:
        ctx.preempt.should_preempt()
        os.kill(os.getpid(), signal.SIGTERM)
        while not ctx.preempt.requested:
            pass
        if sys.argv[1] == "asks late":
            threading.Event().wait(0.2)
        if sys.argv[1] != "never asks again":
            assert ctx.preempt.should_preempt()
        if sys.argv[1] != "asks late":
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_run_with_too_few_calls_explains_its_death(tmp_path: Path) -> None:
    said = "before its next should_preempt() call: call it after every batch"

    def start(how: str, grace: str = "60") -> str:
        with running(SELDOM, 1, tmp_path, args=(how,), env={"DET_CORE_GRACE": grace}) as ranks:
            ranks.wait()
            return ranks.output(0)

    assert said not in start("never asks again")
    assert said in det_core("runs", "show", "latest").stdout
    told = start("saves too long")
    assert said in told and "after the signal to stop" not in told
    assert said not in det_core("runs", "show", "latest").stdout
    assert "s after the signal to stop, and the grace period is 0.1 s" in start("asks late", grace="0.1")


class Broken:
    """A master whose answer makes the client stumble."""

    def preempted(self, timeout: float) -> bool:
        raise KeyError("preempt")

    def stop_waiting(self) -> None:
        pass


def test_poll_failure_is_raised_by_next_call() -> None:
    master: Any = Broken()
    with core.DistributedContext.detect() as distributed:
        preempt = core.PreemptContext(distributed, master=master)
        assert not preempt.should_preempt()
        preempt.start()
        until(lambda: "det-core-preempt" not in [thread.name for thread in threading.enumerate()])
        with pytest.raises(DetCoreError, match=r"preemption polling failed.*KeyError: 'preempt'"):
            preempt.should_preempt()
        assert not preempt.should_preempt(), "raised once"


def test_poll_failure_is_raised_by_close() -> None:
    master: Any = Broken()
    distributed = core.DistributedContext.detect()
    preempt = core.PreemptContext(distributed, master=master)
    preempt.start()
    until(lambda: "det-core-preempt" not in [thread.name for thread in threading.enumerate()])
    with pytest.raises(DetCoreError, match="KeyError: 'preempt'"):
        distributed.close()
    with pytest.raises(ContextClosed):
        distributed.check()

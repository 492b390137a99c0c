"""Workers of a DataLoader, and other children, when their job receives a stop signal."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.ranks import running
from support.worker_stops import stop, training

pytest.importorskip("torch")


# The other cells, and more tries of each: tests/long/test_core_worker_stops.py.
@pytest.mark.parametrize(
    ("method", "number", "to_each"), [("fork", signal.SIGTERM, False), ("forkserver", signal.SIGHUP, True)]
)
def test_loader_of_signalled_job_keeps_its_workers(method: str, number: int, to_each: bool) -> None:
    stopped = stop("bare", method, number, to_each=to_each)
    assert stopped.is_right, stopped.output


def test_stuck_worker_does_not_block_exit() -> None:
    stopped = stop("bare", "fork", signal.SIGTERM, to_each=False, form="stuck")
    assert stopped.is_right, stopped.output


@pytest.mark.parametrize("kind", ["accelerated", "trial"])
def test_trainer_whose_worker_dies_of_the_signal_saves(kind: str) -> None:
    with training(kind, "fork", FORM="dies") as started:
        stopped = started.end()
    assert stopped.is_right, stopped.output
    assert "the loader failed" in stopped.output and ": DataLoader worker" in stopped.output


def test_script_whose_worker_dies_of_the_signal_prints_the_loss() -> None:
    with training("bare", "fork", FORM="dies") as started:
        stopped = started.end()
    assert stopped.status == 1 and not stopped.saved and not stopped.left
    assert stopped.output.count("det_core: nothing was saved after the signal to stop: it also reached") == 1


OTHERS = """
    import multiprocessing, os, signal, sys, time
    from det_core import core

    def work(number):
        time.sleep(number)

    def stays():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        print("waits", flush=True)
        time.sleep(1000)

    def main():
        for method in ("fork", "spawn", "forkserver"):
            context = multiprocessing.get_context(method)
            with context.Pool(1) as pool:
                pool.apply_async(work, (1000,))  # terminated while it starts, or while it works
            own = context.Process(target=stays, daemon=True)
            own.start()
            while own.exitcode is None:
                own.terminate()
                own.join(0.1)
            print(method, own.exitcode, flush=True)

    if __name__ == "__main__":
        with core.init() as ctx:
            ctx.preempt.should_preempt()
            main()
            print("preempted" if ctx.preempt.should_preempt() else "went on", flush=True)
"""


def test_other_children_end_by_terminate(tmp_path: Path) -> None:
    with running(OTHERS, 1, tmp_path, cold=True) as ranks:
        assert ranks.wait() == [0], ranks.output(0)
    said = ranks.output(0)
    assert "went on" in said
    for method in ("fork", "spawn", "forkserver"):
        assert f"{method} 7" in said or f"{method} -15" in said, said

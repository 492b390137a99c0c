"""Trainings with ``core.resumable()``, killed, and loaders whose workers are started anew."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from support import scripts
from support.killed import Restarted, disturb
from support.resumable import TRAINING


def kills(folder: Path, ranks: int, times: int, seed: int, **env: str) -> None:
    """Kill a training so often, at random, and compare its rows with those of an undisturbed one."""
    print(f"seed {seed}")
    undisturbed = Restarted(folder / "undisturbed", TRAINING, ranks, env)
    undisturbed.finish()
    steps = len(undisturbed.rows())
    killed = disturb(
        lambda name: Restarted(folder / name, TRAINING, ranks, env), random.Random(seed), [signal.SIGKILL] * times,
        most=max(steps // times, 3),
    )  # fmt: skip
    assert [step for step, *_ in undisturbed.rows()] == list(range(1, 8 * 30 // ranks + 1))
    assert killed.rows() == undisturbed.rows()


@pytest.mark.parametrize(("ranks", "workers", "kind"), [(1, "2", "persistent"), (2, "0", "loaded")])
def test_training_that_is_killed_has_the_rows_of_an_undisturbed_one(
    tmp_path: Path, ranks: int, workers: str, kind: str
) -> None:
    kills(tmp_path, ranks, 2, seed=ranks, WORKERS=workers, KIND=kind)


def test_workers_of_a_forkserver_give_the_batches_of_the_loader(tmp_path: Path) -> None:
    script = """
        import multiprocessing
        from support.resumable import check
        if __name__ == "__main__":
            multiprocessing.set_forkserver_preload(["torch", "support.resumable"])
            workers = {"num_workers": 2, "multiprocessing_context": "forkserver", "persistent_workers": True}
            check("shuffled", every=9, epochs=2, **workers)
            print("equal")
    """
    done = scripts.run(script, tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["equal"]), done.stdout

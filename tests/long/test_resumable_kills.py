"""Trainings with ``core.resumable()``, killed a hundred times, and every form of loader with every kind of worker."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support import scripts
from support.resumable import DRAWING, FORMS, Plain, check
from trainings.test_resumable import kills


@pytest.mark.parametrize(
    ("ranks", "workers", "kind"),
    [(1, "2", "loaded"), (1, "2", "persistent"), (1, "0", "skipped"), (2, "0", "loaded")],
)
def test_training_that_is_killed_25_times_has_the_rows_of_an_undisturbed_one(
    tmp_path: Path, ranks: int, workers: str, kind: str
) -> None:
    kills(tmp_path, ranks, 25, seed=random.randrange(10**6), WORKERS=workers, KIND=kind)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("form", FORMS)
def test_form_gives_the_batches_of_the_loader_after_a_resume(form: str, workers: int) -> None:
    for persistent in {False, workers > 0 and form != "generators of the dataset"}:
        check(form, every=3, num_workers=workers, persistent_workers=persistent)


@pytest.mark.parametrize("form", ["shuffled", "own generator", "counting sampler", "odd batches", "single records"])
def test_form_that_skips_loading_in_workers_gives_the_batches_of_the_loader(form: str) -> None:
    check(form, every=2, skip_loading=True, dataset=Plain(), num_workers=2, persistent_workers=True)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("form", DRAWING)
def test_workers_of_each_start_method_give_the_batches_of_the_loader(tmp_path: Path, form: str, method: str) -> None:
    script = f"""
        import multiprocessing
        from support.resumable import check
        if __name__ == "__main__":
            multiprocessing.set_forkserver_preload(["torch", "support.resumable"])
            for persistent in (False, {form!r} != "generators of the dataset"):
                workers = {{"num_workers": 2, "multiprocessing_context": {method!r}, "persistent_workers": persistent}}
                check({form!r}, every=7, **workers)
            print("equal")
    """
    done = scripts.run(script, tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["equal"]), done.stdout

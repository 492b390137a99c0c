"""User actions on experiments: continue, warm start, retention, patch, delete."""

from __future__ import annotations

import asyncio
import errno
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from det_core import storage
from det_core.errors import StorageError
from det_core.master._errors import Conflict, Invalid, NotFound, WrongState
from det_core.master.service import _checkpoints, _continue, _create, _queries, _retention, _steering
from det_core.master.service._retention import due
from support.mastered import bench, config_of, experiments_of, train, trials_of
from support.scripted_trials import Script, Trial

SINGLE = {"name": "single", "max_length": 2}


async def test_a_canceled_search_goes_on_where_it_was(tmp_path: Path) -> None:
    async with bench(tmp_path, train) as b:
        number = await b.create({"name": "random", "max_length": 3, "max_trials": 4, "max_concurrent_trials": 2})
        await b.until(lambda: len(b.engine.launched) > 1)
        await _steering.cancel(b.service, number)
        assert await b.ended(number) == "CANCELED"
        view = await _continue.continue_experiment(b.service, number)
        assert view.state == "ACTIVE"
        assert await b.ended(number) == "COMPLETED"
        assert [t.state for t in await trials_of(b.service, number)] == ["COMPLETED"] * 4
        await b.check_replay(number)
        with pytest.raises(WrongState, match="complete"):
            await _continue.continue_experiment(b.service, number)


def keeping(folder: Path) -> Script:
    """Train, with files in a real store."""

    async def script(trial: Trial) -> int:
        for step in (1, 2, 3):
            await trial.report("validation", step, loss=abs(2 - step) + 0.1 * trial.spec.trial_id)
            uuid = await trial.checkpoint(step)
            (folder / uuid).mkdir(parents=True)
            (folder / uuid / "state").write_bytes(b"x")
        await trial.complete(2, 1.0)
        await trial.acknowledge()
        return 0

    return script


def stored(folder: Path) -> int:
    """Return the number of checkpoints in a store."""
    return sum(not path.name.startswith(".") for path in folder.iterdir())


async def test_retention_that_was_interrupted_is_taken_up(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    async with bench(tmp_path, keeping(folder)) as b:
        place = {"type": "directory", "container_path": str(folder)}
        number = await b.create(SINGLE, checkpoint_storage={**place, **config_of({})["checkpoint_storage"]})
        b.service.runner.retain = lambda experiment_id: None  # type: ignore[method-assign]
        assert await b.ended(number) == "COMPLETED"
        assert stored(folder) == 3
        b.dying.dead.set()
        await b.revive()
        while stored(folder):
            await asyncio.sleep(0.01)


async def test_a_checkpoint_that_cannot_be_deleted_fails_the_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"

    def refuse(self: Any, *_: Any) -> dict[str, int]:
        raise OSError("the disk is read-only")

    async with bench(tmp_path, keeping(folder)) as b:
        place = {"type": "directory", "container_path": str(folder), "save_trial_latest": 9}
        number = await b.create(SINGLE, checkpoint_storage=place)
        assert await b.ended(number) == "COMPLETED"
        with monkeypatch.context() as patched:
            patched.setattr(storage.DirectoryStore, "delete", refuse)
            await _retention.delete_experiment(b.service, number)
            while (view := await _queries.experiment(b.service, number)).state == "DELETING":
                await asyncio.sleep(0.01)
        assert view.state == "DELETE_FAILED" and "3 checkpoint(s)" in str(view.error)
        await _retention.delete_experiment(b.service, number)
        while await experiments_of(b.service):
            await asyncio.sleep(0.01)


async def test_delete_of_an_experiment_removes_event_files_from_every_storage_of_its_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One trial's script names a storage of its own. What other experiments have there stays."""
    configured, chosen = tmp_path / "configured", tmp_path / "chosen"

    def event_file(root: Path, experiment_id: int, trial_id: int) -> Path:
        return root / f"mine/tensorboard/experiment/{experiment_id}/trial/{trial_id}/rank-0/events"

    async def script(trial: Trial) -> int:
        root = configured
        if trial.spec.trial_id == 1:
            root, place = chosen, {"type": "directory", "container_path": str(chosen)}
            await trial.ask(lambda s: _checkpoints.prepare_run(s, 1, place))
        events = event_file(root, trial.spec.experiment_id, trial.spec.trial_id)
        events.parent.mkdir(parents=True)
        events.write_bytes(b"x")
        await trial.complete(2, 1.0)
        return 0

    def refuse(self: Any, *_: Any) -> None:
        raise StorageError(errno.EACCES, "the storage is read-only")

    async with bench(tmp_path, script, slots=1, cluster_id="mine") as b:
        place = {"type": "directory", "container_path": str(configured)}
        search = {"name": "random", "max_length": 2, "max_trials": 2}
        first, second = [await b.create(search, checkpoint_storage=place) for _ in range(2)]
        for number in (first, second):
            assert await b.ended(number) == "COMPLETED"
        with monkeypatch.context() as patched:
            patched.setattr(storage.DirectoryStore, "remove_folder", refuse)
            await _retention.delete_experiment(b.service, first)
            while (view := await _queries.experiment(b.service, first)).state == "DELETING":
                await asyncio.sleep(0.01)
        assert view.state == "DELETE_FAILED" and "event files could not be deleted: " in str(view.error)
        await _retention.delete_experiment(b.service, first)
        while len(await experiments_of(b.service)) > 1:
            await asyncio.sleep(0.01)
        assert chosen.is_dir()
        found = {path for root in (configured, chosen) for path in root.rglob("events")}
        assert found == {event_file(configured, second, trial) for trial in (3, 4)}


async def test_delete_beside_continue_does_one_of_them(tmp_path: Path) -> None:
    async with bench(tmp_path, train) as b:
        s = b.service
        delete = _retention.delete_experiment
        go_on = _continue.continue_experiment
        for first in (delete, go_on) * 2:
            number = await b.create(SINGLE)
            assert await b.ended(number) == "COMPLETED"
            second = go_on if first is delete else delete
            answers = await asyncio.gather(first(s, number), second(s, number), return_exceptions=True)
            assert [type(answer) for answer in answers].count(WrongState) == 1, answers
            deleted = number not in [view.id for view in await experiments_of(s)]
            assert deleted or (await _queries.experiment(s, number)).state in ("DELETING", "ACTIVE", "COMPLETED")


async def test_delete_is_refused_while_another_experiment_starts_from_a_checkpoint(tmp_path: Path) -> None:
    async with bench(tmp_path, train) as b:
        s = b.service
        source = await b.create(SINGLE, checkpoint_storage={"save_trial_latest": 1})
        assert await b.ended(source) == "COMPLETED"
        (trial,) = await trials_of(s, source)
        heir = await _create.create_experiment(s, config_of({**SINGLE, "source_trial_id": trial.id}), activate=False)
        number = heir.id
        with pytest.raises(WrongState, match=f"experiment {number} has not ended, and starts from its checkpoint"):
            await _retention.delete_experiment(s, source)
        assert (await _queries.experiment(s, source)).state == "COMPLETED"
        await _steering.kill(s, number)
        assert await b.ended(number) == "CANCELED"
        await _retention.delete_experiment(s, source)
        with pytest.raises((Invalid, NotFound)):
            await _create.create_experiment(
                s, config_of({**SINGLE, "source_checkpoint_uuid": str(trial.latest_checkpoint)})
            )


@pytest.mark.parametrize(("count", "stays"), [("save_trial_best", 3), ("save_trial_latest", 2)])
async def test_retention_at_the_end_counts_only_checkpoints_that_exist(tmp_path: Path, count: str, stays: int) -> None:
    """The best, or the latest, was removed from the storage, unknown to the master: the one that exists stays."""
    folder = tmp_path / "store"

    async def script(trial: Trial) -> int:
        status = await keeping(folder)(trial)
        shutil.rmtree(folder / f"{trial.spec.task_id}-1-{2 if count == 'save_trial_best' else 3}")
        return status

    async with bench(tmp_path, script) as b:
        place = {"type": "directory", "container_path": str(folder), "save_experiment_best": 0}
        keep = {"save_trial_best": 0, "save_trial_latest": 0, count: 1}
        number = await b.create(SINGLE, checkpoint_storage={**place, **keep})
        assert await b.ended(number) == "COMPLETED"
        while stored(folder) > 1:
            await asyncio.sleep(0.01)
        while await b.store.read(lambda conn: due(conn)):
            await asyncio.sleep(0.01)
        assert [path.name[-2:] for path in folder.iterdir() if not path.name.startswith(".")] == [f"-{stays}"]


async def test_what_can_be_changed_and_when(tmp_path: Path) -> None:
    async with bench(tmp_path, train) as b:
        s = b.service
        created = await _create.create_experiment(s, config_of(SINGLE), activate=False, external_id="mine")
        number = created.id
        assert created.state == "PAUSED" and not b.engine.launched
        with pytest.raises(Conflict, match="mine"):
            await _create.create_experiment(s, config_of(SINGLE), external_id="mine")
        for early in (_retention.delete_experiment, _continue.continue_experiment):
            with pytest.raises(WrongState):
                await early(s, number)
        view = await _steering.patch_experiment(s, number, name="new", description="d", priority=7)
        assert (view.name, view.description, view.priority) == ("new", "d", 7)
        with pytest.raises(Invalid, match="priority"):
            await _steering.set_priority(s, number, 0)
        with pytest.raises(Invalid, match="bucket"):
            await _steering.patch_experiment(s, number, checkpoint_storage={"bucket": "b"})
        await _steering.pause(s, number)
        await _steering.activate(s, number)
        assert await b.ended(number) == "COMPLETED"
        assert [e.id for e in await experiments_of(s, name="ne")] == [number]
        assert await _queries.context(s, number) == b""
        state = await _queries.search(s, number)
        assert (state.progress, state.trials_requested, state.trials_closed) == (1.0, 1, 1)


async def test_a_trial_that_is_to_pause_and_still_runs_is_told_with_its_time(tmp_path: Path) -> None:
    saved = asyncio.Event()

    async def slow(trial: Trial) -> int:
        await trial.should_preempt(60)
        await saved.wait()
        await trial.acknowledge()
        return 0

    async with bench(tmp_path, slow) as b:
        number = await b.create(SINGLE, preemption_timeout=600)
        await b.until(lambda: b.engine.running)
        assert (await _queries.experiment(b.service, number)).stopping_trials == 0
        await _steering.pause(b.service, number)
        view, (trial,) = await _queries.experiment(b.service, number), await trials_of(b.service, number)
        assert (view.state, trial.state, view.stopping_trials) == ("PAUSED", "PAUSED", 1)
        assert trial.allocation_id is not None and view.stop_by_time == trial.stop_by_time
        assert 0 < (trial.stop_by_time or 0.0) - time.time() <= 600
        saved.set()
        await b.until(lambda: not b.engine.running)
        while (trial := (await trials_of(b.service, number))[0]).allocation_id is not None:
            await asyncio.sleep(0.001)
        view = await _queries.experiment(b.service, number)
        assert (view.stopping_trials, view.stop_by_time, trial.stop_by_time) == (0, None, None)

"""Retention at work on a directory store: what goes, by which metric, and what a failing disk cannot lose."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from det_core import _clock, client, core
from det_core.core._checkpoint._retention import Retention, find_number
from det_core.errors import StorageError
from det_core.storage import DirectoryStore, Header, Owner, RetentionPolicy
from support.checkpoints import listed, nothing_is_left_over
from support.disks import FaultyDisk
from support.journals import open_journal
from support.stored import put


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """Return a directory in memory if possible."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def filled(tmp_path: Path, count: int = 4, root: str = "store") -> DirectoryStore:
    """Return a store with checkpoints c1, c2, … of steps 10, 20, …, and one of another run."""
    store = DirectoryStore(tmp_path / root)
    put(store, "another", 5, tmp_path, run_id="another")
    for ordinal in range(1, count + 1):
        put(store, f"c{ordinal}", 10 * ordinal, tmp_path, ordinal=ordinal)
    return store


def record(ordinal: int, restart: int = 0) -> dict[str, Any]:
    """Return the record of ``c<ordinal>`` after its commit."""
    head = Header("run", restart, ordinal, _clock.iso(_clock.now()), 10 * ordinal, f"c{ordinal}")
    return {**vars(head), "metadata": {}, "resources": {}}


def ids(store: DirectoryStore, run_id: str | None = "run") -> list[str]:
    return [header.storage_id for header in store.list(run_id)]


def test_what_a_policy_does_not_keep_goes_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "det_core.checkpoint")
    store = filled(tmp_path)
    told: list[tuple[str, Mapping[str, int]]] = []
    policy = core.KeepLatest(1) | core.KeepEvery(20)
    retention = Retention(policy, store, "run", deleted=lambda *which: told.append(which))
    assert [bool(v.reasons) for v in retention.evaluate_all()] == [False, True, False, True]
    assert len(ids(store)) == 4
    assert retention.apply(record(4)) == ["c1", "c3"]
    assert told == [("c1", {}), ("c3", {})]
    assert "deleted checkpoint c1 of step 10; kept: the latest, every 20 steps" in caplog.text
    assert ids(store, None) == ["another", "c2", "c4"]
    assert retention.apply(record(4)) == []
    nothing_is_left_over(Path(store.root))


def test_a_run_knows_its_own_checkpoints_without_listing_those_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, 0)
    listings = []
    really = store.list
    monkeypatch.setattr(store, "list", lambda run_id: listings.append(run_id) or really(run_id))
    retention = Retention(core.KeepLatest(2), store, "run")
    for ordinal in range(1, 6):
        put(store, f"c{ordinal}", 10 * ordinal, tmp_path, ordinal=ordinal)
        assert retention.apply(record(ordinal)) == ([f"c{ordinal - 2}"] if ordinal > 2 else [])
    assert listings == []
    later = Retention(core.KeepLatest(2), store, "run")
    for ordinal in (1, 2):
        put(store, f"c{5 + ordinal}", 60, tmp_path, restart=1, ordinal=ordinal)
        assert later.apply({**record(5 + ordinal, 1), "ordinal": ordinal}) == [f"c{ordinal + 3}"]
    assert listings == ["run"], "a later restart looks once what the earlier left"


@pytest.mark.parametrize("restart", [0, 1])
def test_retention_after_another_process_deleted_keeps_newest_n_that_exist(tmp_path: Path, restart: int) -> None:
    store = filled(tmp_path, 0)
    retention = Retention(core.KeepLatest(3), store, "run")
    for ordinal in (1, 2, 3):
        put(store, f"c{ordinal}", 10 * ordinal, tmp_path, restart=restart, ordinal=ordinal)
        assert retention.apply(record(ordinal, restart)) == []
    other = DirectoryStore(store.root)
    other.delete("c2")
    other.delete("c3")
    put(store, "c4", 40, tmp_path, restart=restart, ordinal=4)
    assert retention.apply(record(4, restart)) == [], "c1 and c4 are the newest of the two that exist"
    for ordinal in (5, 6):
        put(store, f"c{ordinal}", 10 * ordinal, tmp_path, restart=restart, ordinal=ordinal)
        assert retention.apply(record(ordinal, restart)) == (["c1"] if ordinal == 6 else [])
    assert ids(store) == ["c4", "c5", "c6"]


def test_retention_after_another_process_deleted_the_best_keeps_the_best_that_exists(tmp_path: Path) -> None:
    store = filled(tmp_path, 0)
    retention = Retention(core.KeepLatest(1) | core.KeepBest(1, "loss"), store, "run")

    def commit(ordinal: int, loss: float) -> list[str]:
        put(store, f"c{ordinal}", 10 * ordinal, tmp_path, ordinal=ordinal, metadata={"loss": loss})
        return retention.apply(record(ordinal))

    assert [commit(1, 0.1), commit(2, 0.5)] == [[], []]
    DirectoryStore(store.root).delete("c1")
    assert commit(3, 0.9) == [], "c2 is the best that exists"
    assert ids(store) == ["c2", "c3"]
    assert commit(4, 0.2) == ["c2", "c3"]


def test_retention_after_another_process_deleted_the_newest_keeps_a_whole_one(tmp_path: Path) -> None:
    """It goes between its commit and the look: of those before it the newest that is whole stays."""
    store = filled(tmp_path, 3)
    Path(store.root, "c3", "model.pt").unlink()
    retention = Retention(core.KeepLatest(1), store, "run")
    assert retention.apply(record(4)) == ["c1"]
    assert ids(store) == ["c2", "c3"]


def test_delete_of_what_was_to_go_when_judged_spares_what_is_to_stay_now(tmp_path: Path) -> None:
    store = filled(tmp_path)
    retention = Retention(core.KeepLatest(2), store, "run")
    going = {v.candidate.storage_id for v in retention.evaluate_all() if not v.reasons}
    assert going == {"c1", "c2"}
    DirectoryStore(store.root).delete("c4")
    put(store, "c5", 50, tmp_path, ordinal=5)
    assert retention.delete(going) == ["c1"], "of those that were judged, c2 and c3 are the newest that exist"
    assert ids(store) == ["c2", "c3", "c5"]


def test_one_in_use_stays_until_it_is_not(tmp_path: Path) -> None:
    store = filled(tmp_path)
    retention = Retention(core.KeepLatest(1), store, "run")
    with store.read_lease("c2", Owner.current("reader", 0)):
        assert retention.apply() == ["c1", "c3"]
        assert ids(store) == ["c2", "c4"]
    assert retention.apply() == ["c2"]


def test_one_that_a_reader_takes_while_others_go_stays(tmp_path: Path) -> None:
    store = filled(tmp_path)
    holding = store.read_lease("c3", Owner.current("reader", 0))
    retention = Retention(
        core.KeepLatest(1), store, "run", deleted=lambda i, _: holding.__enter__() if i == "c1" else None
    )
    assert retention.apply() == ["c1", "c2"]
    holding.__exit__(None, None, None)
    assert ids(store) == ["c3", "c4"]


def test_a_newest_that_is_damaged_keeps_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = filled(tmp_path)
    Path(store.root, "c4", "model.pt").unlink()
    Path(store.root, "c3", "empty").write_text("no more")
    retention = Retention(core.KeepLatest(1), store, "run")
    assert retention.apply() == ["c1", "c3"]
    assert ids(store) == ["c2", "c4"]
    assert "model.pt" in caplog.text and "empty" in caplog.text
    put(store, "c5", 50, tmp_path, ordinal=5)
    for name in ("c2", "c5"):
        Path(store.root, name, "sub", "optimizer.pt").unlink()
    assert retention.apply() == [], "where none is whole, all stay"
    assert Retention(core.KeepLatest(1), store, "run").apply(record(5)) == ["c2", "c4"], "just committed: whole"


def test_a_delete_that_fails_is_one_warning_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refused = {"c1", "c2"}

    class Refusing(DirectoryStore):
        def delete(self, storage_id: str, *more: Any) -> dict[str, int]:
            if storage_id in refused:
                raise StorageError(13, f"checkpoint store {self.root}: cannot delete {storage_id}: it is refused")
            return super().delete(storage_id, *more)

    filled(tmp_path)
    store = Refusing(tmp_path / "store")
    retention = Retention(core.KeepLatest(1), store, "run")
    for expected in (["c3"], [], []):
        assert retention.apply() == expected
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "2 older checkpoint(s) could not be deleted, and stay for now: c1: " in warnings[0]
    refused.clear()
    assert retention.apply() == ["c1", "c2"]
    refused.add("c4")
    put(store, "c5", 50, tmp_path, ordinal=5)
    assert retention.apply(record(5)) == []
    assert caplog.text.count("could not be deleted") == 2, "new trouble is a new warning"


def test_a_store_in_trouble_is_not_asked_for_each(tmp_path: Path) -> None:
    class Down(DirectoryStore):
        asked = 0

        def delete(self, storage_id: str, *more: Any) -> dict[str, int]:
            self.asked += 1
            raise StorageError(5, "down")

    filled(tmp_path, 9)
    store = Down(tmp_path / "store")
    assert Retention(core.KeepLatest(1), store, "run").apply() == []
    assert store.asked == 3


def test_a_store_that_cannot_be_listed_does_not_stop_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    dead = DirectoryStore(tmp_path / "store", disk=FaultyDisk(str(tmp_path / "store"), 1, "dead"))
    assert Retention(core.KeepLatest(1), dead, "run").apply() == []
    assert "older checkpoints of run run were not looked through, and stay for now" in caplog.text


def test_metric_without_any_validation_is_doubted_once_at_the_fourth_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = filled(tmp_path, 0)
    retention = Retention(core.KeepLatest(1) | core.KeepBest(1, "losss"), store, "run", folder=tmp_path)
    for ordinal in range(1, 6):
        assert ("no checkpoint has the metric losss, so retention deletes none" in caplog.text) == (ordinal > 4)
        put(store, f"c{ordinal}", 10 * ordinal, tmp_path, ordinal=ordinal)
        assert retention.apply(record(ordinal)) == []
    assert caplog.text.count("losss") == 1


@pytest.mark.parametrize("policy", [core.KeepBest(1, "accuracy"), core.KeepLatest(3) | core.KeepBest(1, "accuracy")])
def test_metric_that_validations_lack_is_doubted_once_at_the_second_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: RetentionPolicy
) -> None:
    store = filled(tmp_path, 0)
    journal = open_journal(tmp_path)
    retention = Retention(policy, store, "run", folder=tmp_path)
    for ordinal in range(1, 4):
        assert (caplog.text != "") == (ordinal > 2)
        put(store, f"c{ordinal}", 10 * ordinal, tmp_path, ordinal=ordinal)
        journal.metrics("validation", 10 * ordinal, {"acc": 0.5, "top": {"5": 0.9}})
        journal.flush()
        assert retention.apply(record(ordinal)) == []
    journal.close()
    said = "no checkpoint has the metric accuracy, so retention deletes none; validation metrics are acc, top.5"
    assert [r.getMessage() for r in caplog.records] == [said]


def test_metric_that_is_validated_after_the_second_checkpoint_is_not_doubted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = filled(tmp_path, 0)
    journal = open_journal(tmp_path)
    retention = Retention(core.KeepBest(1, "accuracy"), store, "run", folder=tmp_path)
    for ordinal in range(1, 4):
        put(store, f"c{ordinal}", 10 * ordinal, tmp_path, ordinal=ordinal)
        retention.apply(record(ordinal))
    journal.metrics("validation", 20, {"accuracy": float("nan")})
    journal.metrics("validation", 30, {"accuracy": 0.5})
    journal.flush()
    assert retention.apply(record(3)) == ["c1", "c2"]
    journal.close()
    assert caplog.text == ""


def test_what_is_no_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="expected a policy such as"):
        Retention(3, DirectoryStore(tmp_path), "run")


def every_call_of_a_gc_fails_once(how: str, committed: int | None, memory: Path) -> None:
    """Whichever call to the disk fails: what is listed is whole, the newest is there, and the rest is collectable."""
    struck = set()
    for at in range(1, 1000):
        folder = memory / f"{how}-{at}"
        folder.mkdir()
        filled(folder)
        root = folder / "store"
        disk = FaultyDisk(str(root), at, how)
        told: list[str] = []
        retention = Retention(
            core.KeepLatest(2), DirectoryStore(root, disk=disk), "run", deleted=lambda i, _, told=told: told.append(i)
        )
        gone = retention.apply(committed and record(committed))
        assert told == gone
        there = listed(root)
        assert {"another", "c3", "c4"} <= set(there) <= {"another", "c1", "c2", "c3", "c4"}
        assert not set(gone) & set(there), "checkpoints reported as deleted are deleted"
        struck.add(disk.struck)
        Retention(core.KeepLatest(2), DirectoryStore(root), "run").apply(record(4))
        assert listed(root) == ["another", "c3", "c4"], "the next time, all that is to go goes"
        nothing_is_left_over(root)
        if not disk.struck:
            break
    else:
        raise AssertionError("it never ends")
    assert {"rename", "remove", "remove folder", "list", "look at", "open", "sync", "read"} <= struck


def test_every_call_of_a_gc_fails_once(memory: Path) -> None:
    every_call_of_a_gc_fails_once("EIO", 4, memory)


def test_a_process_that_dies_in_a_gc_leaves_what_can_be_collected(memory: Path) -> None:
    die_in_a_gc(memory, every=4)  # at each call: tests/long/test_core_kills.py


def die_in_a_gc(memory: Path, every: int) -> None:
    """End a process at every so manieth call to the disk; what is listed is whole, and the rest is collectable."""
    for at in range(1, 1000, every):
        folder = memory / str(at)
        folder.mkdir()
        filled(folder)
        root = folder / "store"
        pid = os.fork()
        if pid == 0:
            store = DirectoryStore(root, disk=FaultyDisk(str(root), at, "exit"))
            Retention(core.KeepLatest(2), store, "run").apply(record(4))
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        there = listed(root)
        assert {"another", "c3", "c4"} <= set(there)
        nothing_is_left_over(root)
        if status == 0:
            return
        assert status == 77
    raise AssertionError("it never ends")


# The metrics of a checkpoint.


def header(steps: int, restart: int = 0) -> Header:
    return Header("run", restart, 1, "2026-11-21T12:00:00.000000+00:00", steps, f"r{restart}-{steps}")


def best(store: DirectoryStore, folder: Path | None, *names: str) -> Retention:
    """Goes by these metrics."""
    return Retention(
        core.AnyOf(core.KeepLatest(1), *(core.KeepBest(1, name) for name in names)), store, "run", folder=folder
    )


def metrics(folder: Path, *headers: Header, names: tuple[str, ...] = ("loss",)) -> list[dict[str, float]]:
    found = best(DirectoryStore(folder / "store"), folder, *names).candidates(headers)
    return [dict(c.metrics) for c in found]


def test_a_checkpoint_has_the_validation_of_its_step(tmp_path: Path) -> None:
    with_journal = open_journal(tmp_path)
    with_journal.metrics("training", 10, {"loss": 9.0})
    with_journal.metrics("validation", 10, {"loss": 0.5, "acc": {"top1": 3}, "name": "x", "ok": True})
    with_journal.metrics("validation", 20, {"acc.top1": 4, "loss": float("nan")})
    with_journal.close()
    with (tmp_path / "journal-0-0.jsonl").open("ab") as f:  # without a step, as earlier versions took it
        f.write(
            b'{"kind":"metrics","seq":3,"time":1,"group":"validation","steps_completed":null,"metrics":{"loss":7}}\n'
        )
    names = ("loss", "acc.top1", "name", "ok")
    ten, twenty, thirty = metrics(tmp_path, header(10), header(20), header(30), names=names)
    assert ten == {"loss": 0.5, "acc.top1": 3.0}
    assert twenty["acc.top1"] == 4.0 and twenty["loss"] != twenty["loss"]
    assert thirty == {}


def test_what_is_reported_later_is_found_later(tmp_path: Path) -> None:
    values = best(DirectoryStore(tmp_path / "store"), tmp_path, "loss")
    journal = open_journal(tmp_path)
    assert values.candidates([header(10)])[0].metrics == {}
    journal.metrics("validation", 10, {"loss": 0.5})
    journal.flush()
    assert values.candidates([header(10)])[0].metrics == {"loss": 0.5}
    journal.close()


def test_of_ranks_that_differ_the_lowest_counts(tmp_path: Path) -> None:
    for rank, found in ((1, {"loss": 1.0, "more": 2.0}), (0, {"loss": 0.0})):
        journal = open_journal(tmp_path, rank=rank)
        journal.metrics("validation", 10, found)
        journal.close()
    assert metrics(tmp_path, header(10), names=("loss", "more")) == [{"loss": 0.0, "more": 2.0}]


def test_a_restart_that_validates_what_it_restored_is_about_that_checkpoint(tmp_path: Path) -> None:
    """Killed between checkpoint and validation; and validated anew: the latest counts."""
    for restart, loss in ((0, 0.7), (1, 0.5)):
        journal = open_journal(tmp_path, restart=restart)
        if restart:
            journal.record("restore", {"storage_id": "r0-10", "run_id": "run", "steps_completed": 10})
        journal.metrics("validation", 10, {"loss": loss})
        journal.close()
    assert metrics(tmp_path, header(10), header(10, 1)) == [{"loss": 0.5}] * 2


def test_what_a_restart_from_before_reports_is_about_other_weights(tmp_path: Path) -> None:
    first = open_journal(tmp_path, restart=0)
    for step, loss in ((10, 0.9), (20, 0.8), (30, 0.1)):
        first.metrics("validation", step, {"loss": loss})
    first.close()
    second = open_journal(tmp_path, restart=1)
    second.record("restore", {"storage_id": "r0-10", "run_id": "run", "steps_completed": 10})
    second.metrics("validation", 20, {"loss": 0.6})
    second.close()
    assert metrics(tmp_path, header(10), header(20), header(20, 1), header(30), header(30, 1)) == [
        {"loss": 0.9}, {}, {"loss": 0.6}, {}, {},
    ]  # fmt: skip


def test_metadata_counts_where_no_report_does(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    for ordinal, (name, more) in enumerate({"a": {"loss": 0.3}, "b": {"loss": "low"}, "c": {}}.items(), 1):
        put(store, name, 10 * ordinal, tmp_path, ordinal=ordinal, metadata=more)
    journal = open_journal(tmp_path)
    journal.metrics("validation", 30, {"loss": 0.2})
    journal.close()
    values = best(store, tmp_path, "loss")
    found = {c.storage_id: dict(c.metrics) for c in values.candidates(store.list())}
    assert found == {"a": {"loss": 0.3}, "b": {}, "c": {"loss": 0.2}}
    assert {c.storage_id: dict(c.metrics) for c in best(store, None, "loss").candidates(store.list())} == {
        "a": {"loss": 0.3}, "b": {}, "c": {},
    }  # fmt: skip


def test_a_policy_that_needs_no_metrics_has_nothing_read(tmp_path: Path) -> None:
    store = filled(tmp_path)
    disk = FaultyDisk(store.root)
    watched = DirectoryStore(store.root, disk=disk)
    headers = watched.list()
    before = disk.calls
    best(watched, tmp_path).candidates(headers)
    assert disk.calls == before


def test_find_number() -> None:
    nested = {"a": {"b": {"c": 1}, "b.c": 2.0}, "a.b": {"c": 3}, "flag": True, "text": "1"}
    assert find_number(nested, "a.b.c") == 2.0, "the longest name first"
    assert find_number({"a": {"b": {"c": 1}}}, "a.b.c") == 1.0
    assert [find_number(nested, name) for name in ("a", "flag", "text", "no", "a.no", ".", "")] == [None] * 7


def test_the_policies_are_public() -> None:
    policy: RetentionPolicy = core.AnyOf(core.KeepLatest(1), core.KeepWithin("7d"))
    assert isinstance(policy, core.RetentionPolicy)


# In a whole run.


def train(length: int, **options: Any) -> tuple[str, str | None]:
    """Save and validate every step, worse each time but for step 3; returns the run's id and where it began."""
    with core.init(name="kept", max_length=length, **options) as ctx:
        began = ctx.latest_checkpoint
        start = ctx.checkpoint.get_metadata(began)["steps_completed"] if began else 0
        if began is not None:
            with ctx.checkpoint.restore_path(began):
                pass
        for step in range(start + 1, length + 1):
            ctx.train.report_validation_metrics(step, {"loss": 0.0 if step == 3 else float(step)})
            with ctx.checkpoint.store_path({"steps_completed": step}) as (path, _):
                (path / "f").write_text(str(step))
        return client.run("latest").run_id, began


def test_a_run_keeps_what_its_policy_says_also_after_a_resume(home: Path) -> None:
    policy = core.KeepLatest(2) | core.KeepBest(1, "loss")
    run_id, _ = train(6, retention=policy)
    assert [c.steps_completed for c in client.checkpoints()] == [3, 5, 6]
    assert [c["metadata"]["steps_completed"] for c in client.run(run_id).checkpoints()] == [3, 5, 6]
    again, began = train(8, retention=policy, resume=run_id[:-2])
    assert again == run_id
    assert began is not None
    assert [(c.restart, c.steps_completed) for c in client.checkpoints()] == [(0, 3), (1, 7), (1, 8)]
    assert [c["metadata"]["steps_completed"] for c in client.run(run_id).checkpoints()] == [3, 7, 8]


def test_a_run_leaves_the_checkpoints_of_others_in_its_storage(home: Path, tmp_path: Path) -> None:
    for _ in range(2):
        train(3, retention=core.KeepLatest(1), checkpoint_storage=tmp_path / "shared")
    every = client.checkpoints(storage=tmp_path / "shared")
    assert [c.steps_completed for c in every] == [3, 3]
    assert len(every.run_ids()) == 2


def test_a_store_that_refuses_every_delete_fails_no_run(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    def refuse(store: DirectoryStore, storage_id: str, *_: Any) -> None:
        raise StorageError(28, f"checkpoint store {store.root}: cannot delete {storage_id}: No space left on device")

    monkeypatch.setattr(DirectoryStore, "delete", refuse)
    run_id, _ = train(3, retention=core.KeepLatest(1))
    assert client.run(run_id).state == "completed"
    assert [c.steps_completed for c in client.checkpoints()] == [1, 2, 3]

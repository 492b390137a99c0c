"""Reports of the contract's own route, and the contract's rules for them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from det_core.errors import StoreConflict
from det_core.master.store import ingest, series

TRIAL = 1


def shown(session: Session, group: str = "training", **options: Any) -> dict[int | None, dict[str, Any]]:
    rows = series.read(session, TRIAL, group, **options)
    found = {row.steps_completed: row.metrics for row in rows}
    assert len(found) == len(rows)
    return found


class Model:
    """The contract's rules, as literally as they stand: rows that are archived, merged, refused."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, str, int], dict[str, float]] = {}
        self.archived: set[tuple[int, str, int]] = set()

    def report(self, run: int, group: str, step: int, values: dict[str, float]) -> None:
        known = self.rows.get((run, group, step), {})
        if any(known.get(key, value) != value for key, value in values.items()):
            raise StoreConflict
        self.rows[run, group, step] = {**known, **values}
        for row in self.rows:
            if row[0] < run and (row[2] >= step if row[1] == group else row[2] > step):
                self.archived.add(row)

    def visible(self, group: str) -> dict[int, dict[str, float]]:
        rows = sorted(row for row in self.rows if row[1] == group and row not in self.archived)
        return {step: self.rows[run, group, step] for run, _, step in rows}


VALUES = st.dictionaries(st.sampled_from("ab"), st.sampled_from([1.0, 2.0]), min_size=1)
REPORTS = st.lists(st.tuples(st.booleans(), st.sampled_from(["training", "own"]), st.integers(0, 5), VALUES))


def check(scratch: Engine, reports: Any) -> None:
    model, run = Model(), 1
    with Session(scratch) as session:
        for next_run, group, step, values in reports:
            run += next_run
            try:
                model.report(run, group, step, values)
            except StoreConflict:
                with pytest.raises(StoreConflict):
                    ingest.report(session, TRIAL, run, group, step, values)
                continue
            ingest.report(session, TRIAL, run, group, step, values)
            assert not ingest.report(session, TRIAL, run, group, step, values)
        for group in ("training", "own"):
            assert shown(session, group) == model.visible(group)
        session.rollback()

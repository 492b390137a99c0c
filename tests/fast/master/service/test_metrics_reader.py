"""Rows of metrics, read in parts: each row is read from the database once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from det_core.master._errors import NotFound
from det_core.master.service import _create, _queries, _reports, _unmanaged
from det_core.master.store import series
from fast.master.service.test_unmanaged import CONFIG, bench, train


async def test_parts_read_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = series.read
    counts: list[int] = []

    def counted(*args: Any, **options: Any) -> list[series.MetricRow]:
        rows = read(*args, **options)
        counts.append(len(rows))
        return rows

    monkeypatch.setattr(series, "read", counted)
    async with bench(tmp_path, train) as b:
        number = (await _create.create_experiment(b.service, CONFIG, unmanaged=True))["experiment"].id
        trials = [(await _unmanaged.create_trial(b.service, number, {})).id for _ in range(2)]
        for trial in trials:
            await _unmanaged.start_trial(b.service, trial, resume=False)
            for group in ("training", "validation"):
                for step in range(1, 8):
                    await _reports.report_metrics(b.service, trial, 1, group, step, {"loss": 1.0})
        counts.clear()
        reader = _queries.MetricsReader(b.service.store, trials)
        parts = []
        while rows := await reader.read(5):
            parts.append(rows)
        assert [len(rows) for rows in parts] == [5] * 5 + [3]
        expected = [(t, g, s) for t in trials for g in ("training", "validation") for s in range(1, 8)]
        views = [row for rows in parts for row in rows]
        assert [(row.trial_id, row.group, row.total_batches) for row in views] == expected
        assert [row.id for row in views] == list(range(1, 29))
        assert sum(counts) == 28
        rest = _queries.MetricsReader(b.service.store, trials, after=26)
        assert [row.id for row in await rest.read(5)] == [27, 28]
        with pytest.raises(NotFound):
            await _queries.MetricsReader(b.service.store, [trials[0], 99]).read(5)

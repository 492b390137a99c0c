"""The SDK under masters, over each fault of the network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fast.core.test_managed_ours import launched, master, rows
from fast.core.test_managed_processes import MIDDLE, NEW, every, gone, under_faults
from support.managed import TRAIN
from support.ours import variables
from support.proxy import BUSY, LOST, RESET, SLOW, TRUNCATED, proxy_before
from support.ranks import running
from support.running_master import Running

__all__ = ["master"]


@pytest.mark.parametrize("version", [MIDDLE, NEW])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("fault", [LOST, RESET, BUSY, TRUNCATED, SLOW])
@pytest.mark.parametrize("nth", [2, 3])
def test_trial_each_network_fault_loses_no_report(
    version: str, size: int, fault: str, nth: int, tmp_path: Path
) -> None:
    under_faults(version, size, tmp_path, every(nth, (fault,)))


@pytest.mark.parametrize("version", [MIDDLE, NEW])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("first", [1, 2, 5, 12, 30])
def test_trial_master_lost_at_any_request_loses_no_report(version: str, size: int, first: int, tmp_path: Path) -> None:
    under_faults(version, size, tmp_path, gone(first, 3.0))


def test_trial_of_four_ranks_over_faulty_network_loses_no_report(master: Running, tmp_path: Path) -> None:
    spec = launched(master, tmp_path, 10)
    faults = (LOST, RESET, BUSY, TRUNCATED)
    with proxy_before(master.url) as proxy:
        proxy.begin(lambda number, request: faults[number // 3 % len(faults)] if number % 3 == 0 else None)
        env = variables(replace(spec, master_url=proxy.url), tmp_path)
        with running(TRAIN, 4, tmp_path, env=env) as ranks:
            assert ranks.wait() == [0] * 4, ranks.output(0)
    steps = list(range(1, 11))
    for group in ("training", "rank0", "rank1", "rank2", "rank3"):
        assert [r["totalBatches"] for r in rows(master, spec.trial_id, group)] == steps, group
    found = master.ask("GET", f"trials/{spec.trial_id}/checkpoints").json["checkpoints"]
    assert sorted(c["metadata"]["steps_completed"] for c in found) == [5, 10]
    master.end(spec.allocation_id)
    master.until(spec.experiment_id, "STATE_COMPLETED")

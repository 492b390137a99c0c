"""``DET_CORE_MASTER_TIMEOUT``: how long a question is asked again while the master does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from det_core.errors import MasterUnreachable
from support.foreign_master import foreign_master
from support.managed import opened
from support.proxy import RESET, Request, proxy_before


def test_request_is_retried_until_the_master_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = 0

    def four_are_lost(number: int, request: Request) -> str | None:
        nonlocal lost
        lost += request.path.endswith("/metadata")
        return RESET if request.path.endswith("/metadata") and lost <= 4 else None

    with foreign_master("0.38.1") as master, proxy_before(master.url) as proxy:
        trial = master.add_trial()
        trial.metadata = {"note": "x"}
        for seconds, answers in (("0.001", False), ("600", True)):
            env = {"DET_CORE_MASTER_TIMEOUT": seconds}
            with opened(master, trial, tmp_path / seconds, monkeypatch, url=proxy.url, env=env) as ctx:
                lost = 0
                proxy.begin(four_are_lost)
                if answers:
                    assert ctx.train.get_metadata() == {"note": "x"} and lost == 5
                else:
                    with pytest.raises(MasterUnreachable):  # the reports before the question have as long
                        ctx.train.get_metadata()
                    assert lost <= 1
                proxy.begin()

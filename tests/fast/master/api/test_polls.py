"""Requests that wait: for the word to stop, for peers, for an end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from det_core.master.service import _queries
from support.processes import until
from support.running_master import Answer, Running


@contextmanager
def asking(master: Running, path: str, body: Any = None, token: str | None = None) -> Iterator[Any]:
    """Send a request in the background; yield a function that waits for its answer and returns the time of it."""
    method = "GET" if body is None else "POST"

    def ask() -> tuple[Answer, float]:
        answer = master.ask(method, path, body, token or master.token)
        return answer, time.monotonic()

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(ask).result


def waiting(master: Running) -> int:
    """Return the number of waiting requests."""
    return sum(map(len, list(master.service.subscriptions._waiting.values())))


def test_a_poll_ends_after_its_time_and_one_for_nothing_is_not_answered_at_once(master: Running) -> None:
    spec = master.a_trial()
    path = "allocations/{}/signals/preemption?timeout_seconds=0.2"
    began = time.monotonic()
    assert master.ask("GET", path.format(spec.allocation_id)).json == {"preempt": False}
    assert 0.2 <= time.monotonic() - began < 100
    master.end(spec.allocation_id)
    master.until(spec.experiment_id, "STATE_COMPLETED")
    began = time.monotonic()
    assert master.ask("GET", path.format(spec.allocation_id)).json == {"preempt": False}
    assert time.monotonic() - began >= 0.2, "whatever asks for it in a loop does not spin"


def test_who_waits_for_an_experiment_hears_of_its_end(master: Running) -> None:
    spec = master.a_trial()
    path = f"experiments/{spec.experiment_id}/wait?timeout_seconds="
    assert master.ask("GET", path + "0").json["experiment"]["state"] == "STATE_ACTIVE"
    with asking(master, path + "60") as result:
        master.end(spec.allocation_id)
        answer, _ = result()
    assert answer.json["experiment"]["state"] == "STATE_COMPLETED"


def test_a_failure_of_the_masters_own_says_so_and_hides_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    master = Running(tmp_path, limit=1 << 20)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_queries, "find_experiments", _fail)
            broken = master.ask("GET", "experiments")
        assert (broken.status, broken.error["code"]) == (500, 13)
        assert "ZeroDivisionError" in broken.error["error"]
        until(lambda: "in _fail" in caplog.text)  # the log has the whole of it
        master.run(master.store.close())
        refused = master.ask("GET", "experiments")
        assert (refused.status, refused.error["code"], refused.headers["Retry-After"]) == (503, 14, "1")
    finally:
        master.close()


async def _fail(*_hub: Any, **_filters: Any) -> None:
    raise ZeroDivisionError


def test_a_server_that_stops_lets_its_polls_go(tmp_path: Path) -> None:
    master = Running(tmp_path, limit=1 << 20)
    try:
        spec = master.a_trial()
        path = f"allocations/{spec.allocation_id}/signals/preemption?timeout_seconds=60"
        with asking(master, path, token=spec.session_token) as poll:
            until(lambda: waiting(master) == 1)
            url, shown = f"{master.url}/api/v1/trials/{spec.trial_id}/logs?follow=true", f"Bearer {master.token}"
            with requests.get(url, headers={"Authorization": shown}, stream=True) as log:
                assert log.status_code == 200
                until(lambda: waiting(master) == 2)
                closing = threading.Thread(target=master.close)
                closing.start()
                assert log.content == b""
            answer, _ = poll()
        assert (answer.status, answer.json) == (200, {"preempt": False}), "the trial goes on"
        closing.join()
        assert spec.allocation_id in master.engine.running
    finally:
        master.close()

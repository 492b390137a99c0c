"""Output of a follower: each line once, in order, and the outcome of the trials; on a terminal and elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import click
import pytest

from det_core._clock import iso
from det_core.cli import _follow, app
from det_core.cli._follow import Queue
from det_core.cli._views import (
    exit_status,
    experiment_state,
    line_text,
    print_line,
    saving_trials,
    trial_state,
)
from det_core.client import Experiment, Master, Trial
from det_core.client._master import Address
from det_core.errors import MasterUnreachable
from support.running_master import CONFIG, Running


def test_a_line_has_its_rank_and_its_level_back() -> None:
    assert line_text({"log": "hello\n", "level": "LOG_LEVEL_INFO"}) == "hello"
    assert line_text({"log": "  oh\n", "level": "LOG_LEVEL_ERROR", "rank_id": 3}) == "[rank=3] ERROR:   oh"


def test_what_is_to_pause_and_still_runs_is_pausing() -> None:
    def experiment(**more: Any) -> Experiment:
        return Experiment(master, {"id": 1, "state": "STATE_PAUSED", "config": {}, **more})

    def trial(**more: Any) -> Trial:
        return Trial(master, {"id": 5, "experimentId": 1, "state": "STATE_PAUSED", **more})

    master = Master(Address("http://x", None, None))
    until = iso(time.time() + 3605)
    one = experiment(stoppingTrials=1, stopByTime=until)
    assert (one.state, experiment_state(one), trial_state(trial(allocationId="1.a.1"))) == (
        "PAUSED",
        "PAUSING",
        "PAUSING",
    )
    assert saving_trials(one) == "1 trial to save; killed in 1 h 0 min at the latest (preemption_timeout)"
    done = experiment(stoppingTrials=0)
    assert (experiment_state(done), saving_trials(done), trial_state(trial())) == ("PAUSED", "", "PAUSED")


def test_a_search_that_cannot_say_what_was_best_has_failed() -> None:
    def ended(**more: Any) -> int:
        told = {"id": 1, "state": "STATE_COMPLETED", "config": {}, "searcherType": "random", "remarks": ["why"]}
        return exit_status(Experiment(Master(Address("http://x", None, None)), {**told, **more}))

    assert (ended(), ended(bestTrialId=3), ended(remarks=[]), ended(searcherType="single")) == (1, 0, 0, 0)
    assert (ended(state="STATE_ERROR"), ended(state="STATE_CANCELED")) == (3, 4)


class Told:
    """An experiment with one trial, as a master tells it at each look."""

    def __init__(self, *looks: tuple[str, str, list[str]]) -> None:
        """Take ``looks``: the experiment's state, the trial's, and the lines that are new."""
        self._looks = list(looks)
        self._count = 0

    def get(self, path: str, **_query: Any) -> dict[str, Any]:
        """Answer the routes of a master that a follower uses."""
        if path == "experiments/1":
            state = self._looks[0][0]
            if state == "away":
                self._looks.pop(0)
                raise MasterUnreachable("no master answers")
            return {"experiment": {"id": 1, "name": "e", "state": state, "config": {}, "searcherMetric": "loss"}}
        trial = {"id": 5, "experimentId": 1, "state": self._looks[0][1], "trialRunId": 1, "hparams": {"lr": 1}}
        return {"trials": [{**trial, "totalBatchesProcessed": 3, "restarts": 0}]}

    def lines(self, _path: str, query: dict[str, Any], **_more: Any) -> Any:
        """Return the lines of a log; the next look begins when they were read."""
        assert query["after"] == (str(self._count) if self._count else "")
        lines = self._looks[0][2]
        if len(self._looks) > 1:
            self._looks.pop(0)
        self._count += len(lines)
        found = [{"trialId": 5, "log": text, "stdtype": "stdout"} for text in lines]
        if found:
            found[-1]["cursor"] = str(self._count)
        return contextlib.nullcontext(iter(found))


def follow(experiment: Experiment, **options: str) -> int:
    """Follow an experiment from a command with these options; return the exit status."""
    context = click.Context(app)
    context.params = options
    with context:
        try:
            _follow.follow(experiment, print_line, with_states=True)
        except click.exceptions.Exit as e:
            return e.exit_code
    return 0


def told(*looks: tuple[str, str, list[str]]) -> Experiment:
    master: Any = Told(*looks)
    return Experiment(master, {"id": 1, "state": "STATE_ACTIVE", "searcherMetric": "loss"})


LOOKS = (
    ("ACTIVE", "RUNNING", ["one\n"]),
    ("away", "", []),
    ("ACTIVE", "RUNNING", ["two\n", "three\n"]),
    ("COMPLETED", "COMPLETED", ["four\n"]),
)


def test_every_line_is_given_once_also_if_the_master_is_away_for_a_moment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_follow.time, "sleep", lambda _seconds: None)
    assert follow(told(*LOOKS)) == 0
    done = capsys.readouterr()
    assert done.out == "".join(f"[trial 5] {word}\n" for word in ("one", "two", "three", "four"))
    assert "no master answers; trials go on, and it is asked again for 120 s" in done.err
    assert [line for line in done.err.splitlines() if "trial 5" in line] == [
        "det-core: trial 5 RUNNING: lr=1",
        "det-core: trial 5 COMPLETED",
    ]


def test_a_master_that_stays_away_ends_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_follow, "MASTER_TIMEOUT", -1.0)
    monkeypatch.delenv("DET_MASTER", raising=False)
    assert follow(told(("away", "", []), ("COMPLETED", "COMPLETED", [])), master="gpu1:80") == 1
    how = "trials go on without the master; to watch again: det-core experiment logs 1 -f --master gpu1:80"
    assert capsys.readouterr().err.splitlines()[-2:] == ["det-core: error: no master answers", f"det-core: {how}"]


def test_ctrl_c_says_how_to_come_back(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_follow.time, "sleep", interrupt)
    assert follow(told(*LOOKS), master="gpu1:80") == 130
    said = capsys.readouterr().err
    assert "to watch it: det-core experiment logs 1 -f --master gpu1:80\n" in said
    assert "to stop it: det-core experiment cancel 1 --master gpu1:80\n" in said


def test_sigterm_does_as_ctrl_c(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_follow.time, "sleep", lambda _seconds: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert follow(told(*LOOKS)) == 130
    assert "experiment 1 goes on; to watch it: det-core experiment logs 1 -f\n" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_why_nothing_runs_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_follow, "QUEUE_DELAY", 0.0)
    running = Running(tmp_path, limit=1 << 20)
    try:
        with Master(Address(running.url, running.token)) as master:
            wide = {"overrides": ["resources.slots_per_trial=200"], "config": CONFIG, "activate": True}
            first, second = (
                Experiment(
                    master,
                    master.post("experiments", {**wide, "overrides": [*wide["overrides"], f"name={n}"]})["experiment"],
                )
                for n in ("first", "second")
            )
            running.launched(first.id)
            queue = Queue()
            assert queue.explain(first.refresh(), first.trials()) == ""
            assert queue.explain(second.refresh(), second.trials()) == (
                "queued: a trial of experiment 2 needs 200 slot(s), and 200 of 256 are in use"
            )
            assert queue.explain(second, second.trials()) == ""
            second.pause()
            assert queue.explain(second, second.trials()) == (
                "experiment 2 is paused; to resume it: det-core e activate 2"
            )
            first.kill()
            second.kill()
            for launched in list(running.engine.running):
                running.end(launched)
    finally:
        running.close()

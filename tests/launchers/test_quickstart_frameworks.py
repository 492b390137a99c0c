"""The quickstart with DeepSpeed and Horovod: what is tried of FSDP2 in ``tests/trainings``, in their venv, and warm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from support import frameworks, warm
from support.person import Person
from trainings import test_quickstart_frameworks as tried
from trainings.test_quickstart_frameworks import DEEPSPEED, HOROVOD, Framework, person

__all__ = ["person"]


@dataclass(frozen=True)
class Warm(Framework):
    """One whose launcher and ranks are forked from a process that has the framework."""

    @property
    def python(self) -> str:
        return warm.python(frameworks.WARM)


FRAMEWORKS = pytest.mark.parametrize("framework", [Warm(**vars(f)) for f in (DEEPSPEED, HOROVOD)], ids=lambda f: f.name)


@FRAMEWORKS
def test_two_ranks_that_are_resumed_go_on_exactly(framework: Framework, tmp_path: Path) -> None:
    tried.test_two_ranks_that_are_resumed_go_on_exactly(framework, tmp_path)


@FRAMEWORKS
def test_one_process_alone_stops_and_goes_on(framework: Framework, tmp_path: Path) -> None:
    tried.test_one_process_alone_stops_and_goes_on(framework, tmp_path)


@FRAMEWORKS
def test_a_model_that_was_kept_is_trained_on(framework: Framework, tmp_path: Path) -> None:
    tried.test_a_model_that_was_kept_is_trained_on(framework, tmp_path)


@FRAMEWORKS
def test_a_trial_is_paused_and_goes_on(framework: Framework, person: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", frameworks.variables()["PATH"])  # where DeepSpeed's ninja is
    tried.test_a_trial_is_paused_and_goes_on(framework, person)

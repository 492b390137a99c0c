"""Each page of docs/ on the wheel, in a new environment with the extras and packages it speaks of alone.

``trainings/test_pages.py`` plays the same pages on this checkout, with torch at hand.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support import ROOT, pages
from support.environments import dist, install, wheel

__all__ = ["dist", "wheel"]
EXTRAS = ("torch", "accelerate", "metrics", "master", "optuna", "profiler", "tensorboard", "data", "examples")
PAGES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md") if "reference" not in path.name)


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of that environment."""
    return install(wheel, tmp_path_factory.mktemp("pages"), *EXTRAS, more=("pytest",))


@pytest.mark.parametrize("name", PAGES)
def test_the_page_runs(name: str, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [variable for variable in os.environ if variable.startswith("PYTHON")]:
        monkeypatch.delenv(variable)
    pages.play(pages.blocks(name), tmp_path, python)

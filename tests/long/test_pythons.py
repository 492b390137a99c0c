"""The oldest Python that README names and the newest that is tried: the ground rooms' own tests, without torch.

A test that needs torch says so and is skipped: the count stands in the output, with the reasons.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib.metadata import requires
from pathlib import Path

import pytest

from support import ROOT
from support.environments import dist, install, wheel
from support.hosts import skip_or_fail

__all__ = ["dist", "wheel"]
ROOMS = ("core", "ipc", "journal", "storage", "cli")
WITHOUT = {"torch", "accelerate", "metrics", "examples"}
"""Extras that bring torch or are for what needs it."""
GOOGLE = "ignore:You are using a non-supported Python version:FutureWarning"
"""Warning of Google's packages about 3.10."""
OTHER_ROOMS = ("build", "griffe", "mypy", "ruff", "schemathesis", "setuptools")
"""Tools that the ground rooms' tests do not need."""


@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_the_ground_rooms(version: str, wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    folder.mkdir()
    extras, tools = developers()
    python = install(wheel, folder, *extras, python=interpreter(version), more=tools)
    rooms = [f"tests/fast/{room}" for room in ROOMS]
    options = ["-n", "2", "--dist", "worksteal", "-q", "-p", "no:cacheprovider", "-W", GOOGLE]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "DET_"))}
    words = [str(word) for word in (python, "-m", "pytest", *options, *rooms)]
    done = subprocess.run(words, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout[-20_000:])
    assert done.returncode == 0
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 500


def developers() -> tuple[list[str], tuple[str, ...]]:
    """Return the extras and the tools of the developers' environment, but for those that bring torch."""
    asked = [each.partition(";") for each in requires("det-core") or []]
    asked = [what.strip() for what, _, marker in asked if marker.strip() == 'extra == "dev"']
    (ours,) = (each for each in asked if each.startswith("det-core["))
    extras = sorted(set(re.findall(r"[\w-]+", ours.partition("[")[2])) - WITHOUT)
    return extras, tuple(each for each in asked if each != ours and not each.startswith(OTHER_ROOMS))


def interpreter(version: str) -> Path:
    """Return a Python of that version.

    pyenv's shims are not tried where pyenv has it, as they need its version set.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser()
    for found in (shutil.which(f"python{version}"), *pyenv.glob(f"versions/{version}.*/bin/python{version}")):
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return Path(found)
    skip_or_fail(f"Python {version} is not installed")
    raise AssertionError

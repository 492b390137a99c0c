"""What the words after the options mean."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from det_core.launch._words._command import script_command
from det_core.launch._words._options import UsageError


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "train.py").touch()
    (tmp_path / "data.txt").touch()
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    os.chmod(tmp_path / "run.sh", 0o755)
    os.chmod(tmp_path / "train.py", 0o755)
    (tmp_path / "python3").symlink_to(sys.executable)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        patch.chdir(tmp_path)
        yield


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "--lr", "1", "--", "x"], [sys.executable, "train.py", "--lr", "1", "--", "x"]),
        (["python3", "train.py", "a"], ["HERE/python3", "train.py", "a"]),
        (["./python3", "-u", "train.py"], ["./python3", "-u", "train.py"]),
        ([sys.executable, "-c", "pass"], [sys.executable, "-c", "pass"]),
        (["./run.sh", "a"], ["HERE/run.sh", "a"]),
        (["run.sh"], ["HERE/run.sh"]),
        (["data.txt"], [sys.executable, "data.txt"]),
        (["env", "A=1"], [shutil.which("env"), "A=1"]),
    ],
)
def test_a_script_a_python_or_a_command(words: list[str], expected: list[str], tmp_path: Path) -> None:
    expected = [word.replace("HERE", str(tmp_path)) for word in expected]
    assert script_command(words[0], words[1:]) == expected


def test_module_and_no_python(tmp_path: Path) -> None:
    assert script_command("a.b", ["-x"], module=True) == [sys.executable, "-m", "a.b", "-x"]
    assert script_command("train.py", [], no_python=True) == [str(tmp_path / "train.py")]
    assert script_command("python3", ["nowhere.py"], no_python=True) == [str(tmp_path / "python3"), "nowhere.py"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nowhere.py"], "nowhere.py"),
        (["nowhere"], "nowhere"),
        (["python3", "nowhere.py"], "nowhere.py"),
        (["python9.9", "train.py"], "python9.9"),
    ],
)
def test_what_is_not_there_is_named(words: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=named.replace(".", r"\.")) as error:
        script_command(words[0], words[1:])
    assert "\n" not in str(error.value)


def test_a_module_is_not_run_without_python() -> None:
    with pytest.raises(UsageError, match="--no-python"):
        script_command("a.b", [], module=True, no_python=True)

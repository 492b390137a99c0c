from __future__ import annotations

import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

import pytest

from det_core._notices import print_notice, write_quietly
from det_core._training.progress_line import ProgressLine


class Unwritable(StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def isatty(self) -> bool:
        return True


def closed() -> TextIO:
    stream = StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, Unwritable(), closed(), object()])
def test_notice_that_cannot_be_written_is_dropped(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    print_notice("text")
    write_quietly("text", stream)


@pytest.mark.parametrize("stream", [None, Unwritable(), closed()])
def test_progress_line_that_cannot_be_written_is_dropped(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    line = ProgressLine()
    line.update(1, 2)
    line.say("text")
    line.close()


def test_notice_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    print_notice("text")
    assert capsys.readouterr() == ("", "det_core: text\n")


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["det_core.cli", "runs", "list"], 0),
        (["det_core.cli", "runs", "list", "--help"], 0),
        (["det_core.cli", "runs", "show", "nosuch"], 1),
        (["det_core.cli", "runs", "nosuch"], 2),
        (["det_core.launch.torch_distributed", "--help"], 0),
        (["det_core.launch.torch_distributed", "--nproc-per-node", "none"], 2),
    ],
)
@pytest.mark.parametrize("redirection", [">&- 2>&-", ">/dev/full 2>/dev/full"])
def test_command_without_a_reader_ends_with_its_own_status(
    command: list[str], status: int, redirection: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    (home / "runs").mkdir(parents=True)
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", *command]
    assert subprocess.run(shell, env=os.environ).returncode == status

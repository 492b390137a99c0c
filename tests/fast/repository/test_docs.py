"""The reference of the command line is what the commands say; what the page on the Core API shows runs, and holds."""

from __future__ import annotations

import importlib.util
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT
from support.killed import Restarted, digest, disturb

DOCS = ROOT / "docs"


@pytest.mark.skipif(
    sys.version_info[:2] not in ((3, 11), (3, 12)), reason="other versions of argparse lay help out anew"
)
def test_the_reference_of_the_command_line_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("cli_reference", DOCS / "cli_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "cli.md").read_text() == module.reference(), "run `make docs`"


def blocks(page: str) -> list[str]:
    """The blocks of Python on a page."""
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


EXACT, *SHORT = blocks("core-api.md")
SHOWN = [("core-api.md", code) for code in SHORT]
SHOWN += [(page, code) for page in ("trials.md", "accelerated.md") for code in blocks(page)]


@pytest.mark.parametrize("number", range(len(SHOWN)))
def test_every_block_of_python_runs(number: int, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "block.py"
    script.write_text(SHOWN[number][1])
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_loop_is_one_of_twenty_lines_or_so() -> None:
    loop = EXACT[EXACT.index("    for step in range(") :]
    assert 15 <= len(loop.splitlines()) <= 24


def kills(tmp_path: Path, ranks: int, times: int) -> None:
    pytest.importorskip("torch")
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    straight = Restarted(tmp_path / "straight", EXACT, ranks)
    straight.finish()
    other = disturb(
        lambda name: Restarted(tmp_path / name, EXACT, ranks), random.Random(seed), [signal.SIGKILL] * times,
        most=min(250, 1000 // times),  # so that the 600 steps last for as many kills
    )  # fmt: skip
    assert [step for step, *_ in straight.rows()] == list(range(1, 601))
    assert other.rows() == straight.rows()
    ends = [script.state() for script in (straight, other)]
    for end in ends:
        end["random"] = [each["torch"] for each in end["random"]]  # the script seeds no other generator
    assert digest(ends[0]) == digest(ends[1])

"""Each page of docs/, and those for coding agents, runs from its first block to its last."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import ROOT, pages

PAGES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md") if "reference" not in path.name)
FOR_AGENTS = ("llms.txt", "skills/port-a-training-script/SKILL.md")


@pytest.mark.parametrize("name", [*PAGES, *FOR_AGENTS, "CONTRIBUTING.md"])
def test_the_page_runs(name: str, tmp_path: Path) -> None:
    pages.play(pages.blocks(name), tmp_path)

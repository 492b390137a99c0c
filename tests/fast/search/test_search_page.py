"""What docs/search.md shows works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support import ROOT

PAGE = (ROOT / "docs" / "search.md").read_text()
YAML = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
PYTHON = re.findall(r"^```python( file=\S+)?\n(.*?)^```", PAGE, re.M | re.S)


@pytest.mark.parametrize("text", YAML)
def test_each_file_previews(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pydantic")
    from det_core.cli import main

    _write_files(tmp_path)
    (tmp_path / "search.yaml").write_text(text)
    assert main(["search", "preview", str(tmp_path / "search.yaml")]) == 0


def test_the_method_on_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for name, code in PYTHON:
        if not name:
            exec(compile(code, "docs/search.md", "exec"), names)
    suite = names["TestByThirds"]()  # type: ignore[operator]
    tests = [test for test in dir(suite) if test.startswith("test_")]
    assert len(tests) > 5
    for test in tests:
        getattr(suite, test)()


def _write_files(folder: Path) -> None:
    for name, code in PYTHON:
        if name:
            (folder / name.removeprefix(" file=")).write_text(code)

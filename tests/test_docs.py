"""The reference of the command line is what the commands say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.skipif(
    sys.version_info[:2] not in ((3, 11), (3, 12)), reason="other versions of argparse lay help out anew"
)
def test_the_reference_of_the_command_line_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("cli_reference", DOCS / "cli_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "cli.md").read_text() == module.reference(), "run `make docs`"

"""Records of runs that cannot be read, and what they may not break: lists, and the resume of other runs."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_core.journal import RunFolder, list_runs, read_run
from support.commands import det_core

NAME = "mine"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
START = {"restart": 0, "time": 1.0, "host": "a", "pid": 1, "argv": ["python", "fit.py"], "cwd": "/", "git": None}
RECORD = {"run_id": "x", "name": "other", "created": 1.0, "restarts": [START]}


@st.composite
def records(draw: st.DrawFn) -> bytes:
    """Draw a record with one value of any shape, or arbitrary bytes."""
    record: Any = json.loads(json.dumps(RECORD))
    match draw(st.sampled_from(["field", "field of a start", "start", "whole", "bytes"])):
        case "field":
            record[draw(st.sampled_from([*RECORD, "argv", "cwd"]))] = draw(JSON)
        case "field of a start":
            record["restarts"][0][draw(st.sampled_from(list(START)))] = draw(JSON)
        case "start":
            record["restarts"].append(draw(JSON))
        case "whole":
            record = draw(JSON)
        case _:
            return draw(st.binary(max_size=20))
    return json.dumps(record).encode()


def check(record: bytes) -> str:
    """Put a record beside that of a whole run; what the list of runs shows of both."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        whole = RunFolder.create(home, name=NAME)
        whole.begin_restart()
        whole.release()
        odd = home / "runs" / "20990101-000000-aaaaaa"
        odd.mkdir()
        (odd / "run.json").write_bytes(record)
        found = RunFolder.latest(home, NAME)
        assert found is not None
        assert found.run_id == whole.run_id or b"mine" in record
        assert len(list_runs(home)) == 2
        listed = det_core("runs", "list", "--home", home)
        assert whole.run_id in listed.stdout
        assert odd.name in listed.stdout
        for words in (["list", "--json"], ["show", odd.name], ["show", odd.name, "--json"]):
            det_core("runs", *words, "--home", home)
        again = RunFolder.open(home, odd.name)
        restart = again.begin_restart({"argv": []})
        assert read_run(odd).starts == restart + 1
        again.release()
        return listed.stderr


@given(records())
def test_run_json_of_any_shape_breaks_no_list_and_no_resume(record: bytes) -> None:
    check(record)


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        ({"restarts": [{}]}, "unexpected restarts: [{}]"),
        ({"created": None}, "unexpected created: null"),
        ({"created": 1e300}, "unexpected created: 1e+300"),
        ({"name": ["a"]}, 'unexpected name: ["a"]'),
        ({"restarts": [{**START, "argv": "python"}]}, "unexpected restarts: "),
        ([], "expected an object, found []"),
    ],
)
def test_run_json_of_unexpected_shape_is_ignored_with_its_cause(record: Any, cause: str) -> None:
    said = check(json.dumps(record).encode())
    assert said.count("ignoring ") == 1
    assert f"run.json: {cause}" in said


def test_run_json_nested_too_deep_is_ignored() -> None:
    assert check(b"[" * 100_000).count("ignoring ") == 1


def test_run_name_that_is_not_utf8_is_listed(home: Path) -> None:
    """Earlier versions recorded it."""
    folder = RunFolder.create(home, name=os.fsdecode(b"/caf\xe9.py"))
    folder.begin_restart({"argv": ["python", os.fsdecode(b"caf\xe9.py")]})
    folder.release()
    assert "/caf\\udce9.py" in det_core("runs", "list").stdout
    assert "python 'caf\\udce9.py'" in det_core("runs", "show", "latest").stdout
    assert json.loads(det_core("runs", "list", "--json").stdout)[0]["name"] == folder.name

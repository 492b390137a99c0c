"""Trial classes that entrypoints name, and that a module's source defines."""

from __future__ import annotations

import pytest

from det_core.config import defines_name, entrypoint_trial


@pytest.mark.parametrize(
    ("entrypoint", "expected"),
    [
        ("model_def:MyTrial", ("model_def", "MyTrial")),
        ("deep.er.module:MyTrial", ("deep.er.module", "MyTrial")),
        ("python3 -m det_core.launch.torch_distributed -- --trial model_def:MyTrial", ("model_def", "MyTrial")),
        (["python", "-m", "det_core.exec.harness", "m:T", "--config", "x"], ("m", "T")),
        ("python train.py", None),
        (["python", "-m", "module"], None),
    ],
)
def test_entrypoint_trial_returns_trial_class(entrypoint: str | list[str], expected: tuple[str, str] | None) -> None:
    assert entrypoint_trial(entrypoint) == expected


@pytest.mark.parametrize(
    "source",
    [
        "class T: ...", "from other import T", "from other import X as T", "import T", "T = make()", "T, other = a, b",
        "from other import *", "if x:\n  class T: ...\nelse:\n  T = None", "try:\n  pass\nexcept E:\n  T = 1",
        "class T(:",
    ],
)  # fmt: skip
def test_defines_name_in_defining_source_is_true(source: str) -> None:
    assert defines_name(source, "T")


@pytest.mark.parametrize("source", ["", "class Other: ...", "def f():\n  T = 1", "import T.x as y", "print(T)"])
def test_defines_name_in_other_source_is_false(source: str) -> None:
    assert not defines_name(source, "T")

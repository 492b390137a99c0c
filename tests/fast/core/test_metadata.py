from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_core._metadata import validate_metadata

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
keys = st.text("abcXYZ_0 é", min_size=1, max_size=50)
trees = st.recursive(leaves, lambda t: st.lists(t, max_size=3) | st.dictionaries(keys, t, max_size=3), max_leaves=20)


@given(st.dictionaries(keys, trees, max_size=3))
def test_what_fits_comes_back_equal(metadata: dict[str, Any]) -> None:
    assert validate_metadata(metadata) == metadata


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"a": "x" * 5001}, "metadata['a'] is a string of 5001"),
        ({"a": {"b.c": 1}}, "metadata['a'] has the key 'b.c'"),
        ({"k" * 51: 1}, "1 to 50 characters"),
        ({1: 2}, "has the key 1"),
        ({"a": [0] * 101}, "metadata['a'] has 101 items"),
        ({"a": [1, {"b": float("nan")}]}, "metadata['a'][1]['b'] is nan"),
        ({"a": object()}, "metadata['a'] is a object"),
        ({"a": 2**70}, "beyond 64 bits"),
        ({str(i): list(range(100)) for i in range(11)}, "1100 values"),
    ],
)
def test_what_does_not_fit_is_named(metadata: Any, said: str) -> None:
    with pytest.raises(ValueError) as e:
        validate_metadata(metadata)
    assert said in str(e.value)


def test_depth() -> None:
    fits: Any = 1
    for _ in range(10):
        fits = {"a": fits}
    assert validate_metadata(fits) == fits
    with pytest.raises(ValueError, match="deeper than 10"):
        validate_metadata({"a": fits})


def test_every_problem_is_said_at_once() -> None:
    with pytest.raises(ValueError) as e:
        validate_metadata({"a": float("inf"), "b": {"$": 1}})
    assert "metadata['a']" in str(e.value) and "'$'" in str(e.value)


def test_no_mapping() -> None:
    with pytest.raises(TypeError, match="not list"):
        validate_metadata([1])  # type: ignore[arg-type]


def test_the_copy_is_not_shared() -> None:
    mine = {"a": [1]}
    checked = validate_metadata(mine)
    mine["a"].append(2)
    assert checked == {"a": [1]}

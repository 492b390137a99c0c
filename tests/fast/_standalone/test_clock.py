"""Times as text."""

from __future__ import annotations

import pytest

from det_core import _clock


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01T00:00:01Z", 1.0),
        ("1970-01-01T00:00:01", 1.0),
        ("1970-01-01t01:00:01.5+01:00", 1.5),
        ("1969-12-31 23:00:00.123-01:00", 0.123),
        ("1970-01-01T00:00:00.123456789z", 0.123456),
    ],
)
def test_parse_time_accepts_every_form_of_rfc_3339(text: str, seconds: float) -> None:
    assert _clock.parse_time(text) == seconds


def test_parse_time_returns_what_iso_was_given() -> None:
    assert _clock.parse_time(_clock.iso(1764313200.123457)) == 1764313200.123457


@pytest.mark.parametrize("text", ["", "yesterday", "2026-11-28", "2026-13-28T00:00:00Z", "2026-11-28T00:00:00.Z"])
def test_parse_time_rejects_other_texts(text: str) -> None:
    with pytest.raises(ValueError, match=r"time|month"):
        _clock.parse_time(text)

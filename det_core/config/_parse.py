"""From the text of an experiment file to an :class:`Experiment`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from det_core.config._experiment import Experiment
from det_core.config._merge import complete, override
from det_core.config._mistakes import mistakes
from det_core.config._model import ExperimentFile
from det_core.config._name import made_up_name
from det_core.config._plain import plain
from det_core.config._remarks import remarks
from det_core.config._searchers import with_a_searcher
from det_core.config._text import read_text
from det_core.errors import ConfigError, ConfigErrors


def parse(
    text: str | Mapping[str, Any],
    overrides: Sequence[str],
    defaults: Mapping[str, Any] | None,
    default_seed: int | None,
    managed: bool,
) -> Experiment:
    """See :func:`det_core.config.parse_experiment`."""
    given, errors = plain(read_text(text) if isinstance(text, str) else text)
    if not isinstance(given, dict):
        raise ConfigErrors([ConfigError("", "empty" if given is None else "no object", "an object with sections")])
    errors += override(given, overrides)
    given = complete(_without_empty_sections(given), plain(defaults or {})[0])
    if managed and given.get("entrypoint") is None:
        errors.append(ConfigError("entrypoint", None, "a command: a text for sh, or a list of texts"))
    try:
        made = ExperimentFile.model_validate(given)
    except ValidationError as e:
        raise ConfigErrors(errors + _with_those_of_the_searcher(given, mistakes(e))) from None
    if errors:
        raise ConfigErrors(errors)
    data = made.model_dump(by_alias=True)
    digest = _digest([given, default_seed])
    if data["name"] is None:
        data["name"] = made_up_name(digest)
    if data["reproducibility"]["experiment_seed"] is None:
        data["reproducibility"]["experiment_seed"] = digest % 2**31 if default_seed is None else default_seed
    return Experiment(data, tuple(remarks(made)))


def _with_those_of_the_searcher(given: Mapping[str, Any], found: list[ConfigError]) -> list[ConfigError]:
    """The mistakes, with those under a searcher whose name is wrong: it is taken for the one that was meant."""
    guess = with_a_searcher(given)
    if guess is None:
        return found
    try:
        ExperimentFile.model_validate(guess)
    except ValidationError as e:
        others = mistakes(e)
        return [one for one in found if one not in others] + others
    return found


def _without_empty_sections(given: dict[str, Any]) -> dict[str, Any]:
    """What is given, less sections with nothing below them: ``data:`` alone in a line is null."""
    fields = ExperimentFile.model_fields
    return {
        key: value
        for key, value in given.items()
        if value is not None
        or key not in fields
        or not isinstance(fields[key].get_default(call_default_factory=True), (dict, list))
    }


def _digest(value: Any) -> int:
    text = json.dumps(value, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

"""The experiment file: read, checked, completed. Pure: no file is opened here, no clock read.

``docs/reference-experiment.md`` is its reference.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from det_core._optional import require
from det_core.config._entrypoint import (
    binds,
    entrypoint_command,
    entrypoint_needs,
    entrypoint_script,
    entrypoint_trial,
)
from det_core.config._experiment import Experiment
from det_core.errors import ConfigError, ConfigErrors

__all__ = [
    "ConfigError",
    "ConfigErrors",
    "Experiment",
    "binds",
    "entrypoint_command",
    "entrypoint_needs",
    "entrypoint_script",
    "entrypoint_trial",
    "parse_experiment",
    "read_changes",
    "read_overrides",
]
_PURPOSE = "reading an experiment file"


def parse_experiment(
    text: str | Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    default_seed: int | None = None,
    managed: bool = True,
) -> Experiment:
    """Read an experiment file, check all of it, and fill in what it leaves out.

    Args:
        text: YAML or JSON; or what such a text means.
        overrides: changes as ``searcher.max_trials=8``; the value is read as YAML.
        defaults: what the master adds where the file says nothing, such as its ``checkpoint_storage``.
        default_seed: the seed if the file gives none: the time, say. None: one that follows from the content.
        managed: whether the master is to run it. Only then there must be an ``entrypoint``.

    Raises:
        ConfigErrors: it has mistakes; ``errors`` are all of them.
        MissingExtra: pydantic or PyYAML is not installed; the message is the command that installs it.
    """
    for module in ("pydantic", "yaml"):
        require(module, extra="master", purpose=_PURPOSE)
    from det_core.config._parse import parse

    return parse(text, overrides, defaults, default_seed, managed)


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Changes as ``searcher.max_trials=8`` as one object of nested sections.

    Raises:
        ConfigErrors: some of them cannot be read.
        MissingExtra: PyYAML is not installed; the message is the command that installs it.
    """
    require("yaml", extra="master", purpose=_PURPOSE)
    from det_core.config._merge import override

    changes: dict[str, Any] = {}
    if errors := override(changes, overrides):
        raise ConfigErrors(errors)
    return changes


def read_changes(text: str) -> dict[str, Any]:
    """A part of an experiment file, that is to be laid over a whole one: read, but not checked. Empty text: nothing.

    Raises:
        ConfigErrors: it is no object in YAML or JSON.
        MissingExtra: PyYAML is not installed; the message is the command that installs it.
    """
    require("yaml", extra="master", purpose=_PURPOSE)
    from det_core.config._plain import plain
    from det_core.config._text import read_text

    changes, errors = plain(read_text(text))
    if errors:
        raise ConfigErrors(errors)
    if changes is None:
        return {}
    if not isinstance(changes, dict):
        raise ConfigErrors([ConfigError("", "no object", "an object with sections")])
    return changes

"""The experiment file: read, checked, completed. Pure: no file is opened here, no clock read.

``docs/experiment.md`` is its reference.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from det_core._errors import ConfigError, ConfigErrors
from det_core._optional import require
from det_core.config._entrypoint import entrypoint_command
from det_core.config._experiment import Experiment

__all__ = ["ConfigError", "ConfigErrors", "Experiment", "entrypoint_command", "parse_experiment"]


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
        require(module, extra="master", purpose="reading an experiment file")
    from det_core.config._parse import parse

    return parse(text, overrides, defaults, default_seed, managed)

"""Experiment files: read, checked and completed, without opening a file or reading a clock.

``docs/reference-experiment.md`` is its reference. Pydantic and ruamel.yaml, which a bare script does not have, are
imported on the first read.
"""

from det_core.config._entrypoint import defines_name, entrypoint_command, entrypoint_scripts, entrypoint_trial
from det_core.config._experiment import Experiment
from det_core.config._parse import parse_experiment, read_changes, read_overrides
from det_core.errors import ConfigError, ConfigProblem

__all__ = [
    "ConfigError",
    "ConfigProblem",
    "Experiment",
    "defines_name",
    "entrypoint_command",
    "entrypoint_scripts",
    "entrypoint_trial",
    "parse_experiment",
    "read_changes",
    "read_overrides",
]

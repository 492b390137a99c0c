"""The experiment file: read, checked, completed. Pure: no file is opened here, no clock read.

``docs/reference-experiment.md`` is its reference. Pydantic and ruamel.yaml, which a bare script does not have, are
imported when something is read.
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

"""The experiment file: read, checked, completed. Pure: no file is opened here, no clock read."""

from det_core._errors import ConfigError, ConfigErrors
from det_core.config._entrypoint import entrypoint_command
from det_core.config._experiment import Experiment

__all__ = ["ConfigError", "ConfigErrors", "Experiment", "entrypoint_command"]

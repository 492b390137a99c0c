"""Commands that create an experiment, as ``det-core check-resume`` takes them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from det_core.cli._commands import ALIASES
from det_core.cli._config_file import is_there, tell_mistakes
from det_core.cli._say import error, note
from det_core.cli._session import master_options

if TYPE_CHECKING:
    from det_core.check_resume._trial import ExperimentSource


def read_experiment(words: Sequence[str]) -> ExperimentSource | None:
    """Read the experiment that a ``det-core`` command would create.

    Args:
        words: the command's, without ``det-core`` itself.

    Returns:
        The experiment; None if it cannot be checked, which was printed.
    """
    from det_core.check_resume._trial import ExperimentSource
    from det_core.config import parse_experiment
    from det_core.errors import ConfigError

    asked = _arguments(words)
    if asked is None:
        return None
    args, config, shown = asked
    if args.master or args.home:
        error("check-resume starts a master of its own: leave out --master and --home")
        return None
    if args.slots is not None:
        args.config.append(f"resources.slots_per_trial={args.slots}")
    try:
        experiment = parse_experiment(config, overrides=args.config)
    except ConfigError as e:
        tell_mistakes(e.errors, shown)
        return None
    for warning in experiment.warnings:
        note(f"warning: {warning}")
    if (name := experiment.searcher["name"]) != "single":
        error(f"searcher.name is {name}: check-resume checks an experiment with one trial, searcher.name: single")
        return None
    return ExperimentSource(experiment.data, args.DIR)


def _arguments(words: Sequence[str]) -> tuple[argparse.Namespace, str | Mapping[str, Any], object] | None:
    """Return the arguments of the command, the configuration that it would send, and the name of that for people."""
    from det_core.cli import _run
    from det_core.cli.experiment import _create

    group = ALIASES.get(words[0], words[0]) if words else ""
    if group == "run":
        parser = argparse.ArgumentParser(prog="det-core run")
        _run.configure(parser)
        args = parser.parse_args(words[1:])
        if (script := _run.script_of(args)) is None:
            return None
        return args, _run.config_of(args, script), None
    if group == "experiment" and words[1:2] == ["create"]:
        parser = argparse.ArgumentParser(prog="det-core experiment create")
        _create.configure(parser)
        master_options(parser)
        args = parser.parse_args(words[2:])
        if not is_there(args.CONFIG) or (args.DIR is not None and not is_there(args.DIR, folder=True)):
            return None
        return args, Path(args.CONFIG).read_text(encoding="utf-8"), args.CONFIG
    error(f"`det-core {' '.join(words[:2])}` trains nothing: give the command of a training, or `det-core run`")
    return None

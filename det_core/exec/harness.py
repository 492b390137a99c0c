"""``python -m det_core.exec.harness model_def:MyTrial``: train a trial class, bare or in an experiment."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from det_core._info import get_cluster_info
from det_core._length import split_length
from det_core._notices import write_quietly
from det_core.errors import ConfigError, DetCoreError, MissingExtra

PROG = "python -m det_core.exec.harness"
EXAMPLES = """\
examples:
  python -m det_core.exec.harness model_def:MyTrial --config experiment.yaml
  python -m det_core.exec.harness model_def:MyTrial --max-length epochs=10 --hparam lr=0.1 --hparam hidden=64
  python -m det_core.launch.torch_distributed --nproc-per-node 2 --trial model_def:MyTrial --config experiment.yaml
  DET_CORE_RESUME=latest python -m det_core.exec.harness model_def:MyTrial --config experiment.yaml

The class is imported from the current folder. In a trial of an experiment, whose configuration says
`entrypoint: model_def:MyTrial`, everything comes from there, and options are not looked at."""
PERIODS = {"batches": "Batch", "epochs": "Epoch", "records": "Batch"}


class UsageError(ValueError):
    """A mistake in the arguments or the experiment file, with a message of one line."""


@dataclass(frozen=True)
class Plan:
    """Arguments of a training. Units are pairs of the name of a class in ``det_core.pytorch`` and a number.

    Attributes:
        hparams, config: hyperparameters and configuration for ``pytorch.init()``.
        init: further arguments of ``pytorch.init()``.
        fit: arguments of ``Trainer.fit()``.
        gradients: whether to compress gradients, and whether to average aggregated ones.
    """

    hparams: dict[str, Any]
    config: dict[str, Any] | None
    init: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    gradients: tuple[bool, bool] = (False, True)


def plan_of(config: Mapping[str, Any], hparams: dict[str, Any]) -> Plan:
    """Return the plan for one trial of a complete experiment configuration.

    Raises:
        UsageError: If a period does not have exactly one of batches, epochs and records, or has records without
            ``global_batch_size``.
    """
    optimizations = config.get("optimizations") or {}
    fit = {
        "checkpoint_period": period(config.get("min_checkpoint_period"), "min_checkpoint_period", hparams),
        "validation_period": period(config.get("min_validation_period"), "min_validation_period", hparams),
        "reporting_period": ("Batch", int(config.get("scheduling_unit") or 100)),
        "checkpoint_policy": config.get("checkpoint_policy"),
        "step_zero_validation": bool(config.get("perform_initial_validation")),
        "profiling_enabled": bool((config.get("profiling") or {}).get("enabled")),
    }
    init = {"aggregation_frequency": int(optimizations.get("aggregation_frequency") or 1)}
    average = optimizations.get("average_aggregated_gradients") is not False
    given = {name: value for name, value in fit.items() if value is not None}
    return Plan(hparams, dict(config), init, given, (bool(optimizations.get("gradient_compression")), average))


def period(value: Any, name: str, hparams: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the unit for a value such as ``{"batches": 100}``, or None for no period."""
    if value is None:
        return None
    if isinstance(value, int):
        value = {"batches": value}
    if len(value) != 1 or next(iter(value)) not in PERIODS:
        raise UsageError(f"{name}={value!r}: expected exactly one of batches, epochs and records")
    unit, number = next(iter(value.items()))
    if number < 1:
        return None
    if unit == "records":
        batch = hparams.get("global_batch_size")
        if not batch:
            raise UsageError(f"{name} in records requires the hyperparameter global_batch_size")
        number = max(number // batch, 1)
    return PERIODS[unit], number


def bare_plan(text: str | None, given: Sequence[str], length: str | None) -> Plan:
    """Return the plan for an experiment file and options, without a master.

    Args:
        text: content of the file, or None.
        given: options ``name=value`` with values in YAML or JSON, and dots in names of nested ones.
        length: ``100``, ``batches=100`` or ``epochs=10``. Defaults to the length in the file.

    Raises:
        UsageError: If a hyperparameter is a range without a value, no length is given, or an option is invalid.
        ConfigError: mistakes in the file.
    """
    values: dict[str, Any] = {}
    for option in given:
        name, equals, value = option.partition("=")
        if not equals or not name:
            raise UsageError(f"--hparam {option}: expected NAME=VALUE, as in --hparam lr=0.1")
        _put(values, name.split("."), _value(value))
    plan = Plan(values, None)
    if text is not None:
        from det_core.config import parse_experiment

        config = parse_experiment(text, managed=False).data
        ranges: list[str] = []
        plan = plan_of(config, _constants(config["hyperparameters"], values, "", ranges))
        if ranges:
            options = " ".join(f"--hparam {name}=…" for name in ranges)
            raise UsageError(f"the file searches over {', '.join(ranges)}: to train bare, set each value: {options}")
        length = length or _length(config["searcher"].get("max_length"))
        plan.init["searcher_metric"] = config["searcher"]["metric"]
        plan.init["smaller_is_better"] = config["searcher"]["smaller_is_better"]
    if length is None:
        raise UsageError(
            "length missing: pass --max-length epochs=10 or batches=1000, or set searcher.max_length in --config FILE"
        )
    plan.fit["max_length"] = _unit(length)
    return plan


def _constants(space: Any, given: Mapping[str, Any], prefix: str, ranges: list[str]) -> Any:
    """Return the hyperparameters of one trial; add names of ranges without a value to ``ranges``."""
    if not isinstance(space, Mapping):
        return space
    if isinstance(space.get("type"), str):
        if space["type"] == "const":
            return space["val"]
        ranges.append(prefix)
        return None
    constants = {}
    for name in [*space, *(name for name in given if name not in space)]:
        path = f"{prefix}.{name}".removeprefix(".")
        if name in given and not isinstance(given[name], Mapping):
            constants[name] = given[name]
        else:
            constants[name] = _constants(space.get(name, given.get(name)), given.get(name) or {}, path, ranges)
    return constants


def _put(into: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        into = into.setdefault(name, {})
    into[path[-1]] = value


def _value(text: str) -> Any:
    """Parse a value as an experiment file does, or as JSON if ruamel.yaml is not installed."""
    try:
        return json.loads(text)
    except ValueError:
        pass  # YAML has more forms of numbers, such as .2
    from det_core.config import read_changes  # needs ruamel.yaml

    try:
        return read_changes(f"value: {text}")["value"]
    except (ConfigError, MissingExtra):
        return text


def _length(value: Any) -> str | None:
    number, unit = split_length(value)
    if unit in ("batches", "epochs"):
        return f"{unit}={number}"
    if unit is not None or number is None or isinstance(number, Mapping):
        return None  # a length in records has no meaning without a batch size
    return str(number)


def _unit(text: str) -> tuple[str, int]:
    unit, equals, number = text.partition("=")
    if not equals:
        unit = "batches"
        number = text
    if unit not in ("batches", "epochs") or not number.isdigit() or int(number) < 1:
        raise UsageError(f"--max-length {text}: expected batches=N or epochs=N")
    return PERIODS[unit], int(number)


def found_class(spec: str) -> Any:
    """Import the class ``module:Class`` from the current directory.

    Raises:
        UsageError: If it does not exist or is not a trial class. Errors raised by the module are not changed.
    """
    module, colon, name = spec.partition(":")
    if not colon or not module or not name:
        raise UsageError(f"{spec}: expected MODULE:CLASS, as in model_def:MyTrial")
    sys.path.insert(0, os.getcwd())  # first, as in `python script.py`
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name is None or not (module == e.name or module.startswith(f"{e.name}.")):
            raise  # the module itself imports a missing one
        raise UsageError(f"no module {module} in {os.getcwd()}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{module} ({getattr(found, '__file__', module)}) has no class {name}")
        found = getattr(found, part)
    from det_core.pytorch import PyTorchTrial
    from det_core.pytorch.deepspeed import DeepSpeedTrial

    if not (isinstance(found, type) and issubclass(found, PyTorchTrial | DeepSpeedTrial)):
        raise UsageError(
            f"{spec}: expected a subclass of det_core.pytorch.PyTorchTrial or det_core.pytorch.deepspeed.DeepSpeedTrial"
        )
    return found


def train(cls: Any, plan: Plan) -> None:
    """Train a class according to a plan."""
    from det_core import pytorch

    fit = dict(plan.fit)
    for name, value in plan.fit.items():
        if isinstance(value, tuple):
            unit, number = value
            fit[name] = getattr(pytorch, unit)(number)
    if not issubclass(cls, pytorch.PyTorchTrial):
        _train_engines(cls, plan, fit)
        return
    with pytorch.init(hparams=plan.hparams, exp_conf=plan.config, **plan.init) as context:
        context._fp16_compression_default, context._average_gradients_default = plan.gradients
        _quiet(context.distributed.rank)
        pytorch.Trainer(cls(context), context).fit(**fit)


def _train_engines(cls: Any, plan: Plan, fit: Mapping[str, Any]) -> None:
    """Train a DeepSpeedTrial."""
    from det_core.pytorch import deepspeed

    options = {name: value for name, value in plan.init.items() if name != "aggregation_frequency"}
    if plan.init.get("aggregation_frequency", 1) != 1:
        logging.warning(
            "ignoring optimizations.aggregation_frequency: a DeepSpeedTrial uses gradient_accumulation_steps of "
            "DeepSpeed's configuration"
        )
    with deepspeed.init(hparams=plan.hparams, exp_conf=plan.config, **options) as context:
        _quiet(context.distributed.rank)
        deepspeed.Trainer(cls(context), context).fit(**fit)


def _quiet(rank: int) -> None:
    """Log only warnings on workers."""
    if rank != 0:  # the chief logs the same
        logging.getLogger().setLevel(logging.WARNING)


def main(words: Sequence[str] | None = None) -> int:
    """Train the class that the command line names, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog=PROG, description="Train a trial class.", epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("SPEC", help="MODULE:CLASS, as model_def:MyTrial")
    parser.add_argument("--config", metavar="FILE", help="experiment file with hyperparameters, lengths and periods")
    parser.add_argument(
        "--hparam", metavar="NAME=VALUE", action="append", default=[], help="set a hyperparameter; overrides the file"
    )
    parser.add_argument("--max-length", metavar="UNIT=N", help="length of the training: epochs=10 or batches=1000")
    parser.add_argument("--name", help="name of the run for DET_CORE_RESUME=latest (default: MODULE:CLASS)")
    args = parser.parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    try:
        info = get_cluster_info()
        if info is not None and info.task_type == "TRIAL":
            plan = plan_of(info.trial.config, info.trial.hparams)
        else:
            text = None
            if args.config is not None:
                if not os.path.isfile(args.config):
                    raise UsageError(f"file not found: {args.config}")
                with open(args.config, encoding="utf-8") as file:
                    text = file.read()
            plan = bare_plan(text, args.hparam, args.max_length)
            plan.init["name"] = args.name or args.SPEC
        cls = found_class(args.SPEC)
    except UsageError as e:
        write_quietly(f"error: {e}\n", sys.stderr)
        return 2
    except ConfigError as e:
        write_quietly("".join(f"error: {args.config}: {error}\n" for error in e.errors), sys.stderr)
        return 2
    try:
        train(cls, plan)
    except (DetCoreError, TypeError, ValueError) as e:
        _print_error(e)
        return 1
    return 0


def _print_error(error: Exception) -> None:
    """Print an error of det_core as one line with its place in the user's code, others with their traceback."""
    # An error raised below another package, such as torch, needs its frames.
    frames = traceback.extract_tb(error.__traceback__)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not frames[-1].filename.startswith(package):
        traceback.print_exception(error)
        return
    message = str(error)
    for frame in reversed(frames):
        if not frame.filename.startswith(package):
            message = f"{os.path.relpath(frame.filename)}:{frame.lineno}: {message}"
            break
    write_quietly(f"error: {message}\n", sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())

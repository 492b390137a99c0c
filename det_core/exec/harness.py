"""``python -m det_core.exec.harness model_def:MyTrial``: train a class, in a trial of an experiment or bare."""

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


class Mistake(ValueError):
    """A person's; the message is one line."""


@dataclass(frozen=True)
class Plan:
    """What a configuration says of a training. Units are pairs of a class of ``det_core.pytorch`` and a number.

    Attributes:
        hparams, config: for ``pytorch.init()``.
        init: its further arguments.
        fit: arguments of ``Trainer.fit()``.
        gradients: whether to compress and to average aggregated gradients.
    """

    hparams: dict[str, Any]
    config: dict[str, Any] | None
    init: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    gradients: tuple[bool, bool] = (False, True)


def plan_of(config: Mapping[str, Any], hparams: dict[str, Any]) -> Plan:
    """What an experiment's configuration, complete, says of the training of one trial.

    Raises:
        Mistake: a period that has not exactly one of batches, epochs and records; or records without
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
    """A unit from ``{"batches": 100}``; None: never."""
    if value is None:
        return None
    given = {"batches": value} if isinstance(value, int) else dict(value)
    if len(given) != 1 or next(iter(given)) not in PERIODS:
        raise Mistake(f"{name} is {value!r}: expected exactly one of batches, epochs and records")
    unit, number = next(iter(given.items()))
    if number < 1:
        return None
    if unit == "records":
        batch = hparams.get("global_batch_size")
        if not batch:
            raise Mistake(f"{name} is in records, which needs the hyperparameter global_batch_size")
        number = max(number // batch, 1)
    return PERIODS[unit], number


def bare_plan(text: str | None, given: Sequence[str], length: str | None) -> Plan:
    """What an experiment file and options say, where there is no master.

    Args:
        text: the file; None: there is none.
        given: ``name=value``, the value as YAML or JSON has it; names of nested ones with dots.
        length: ``100``, ``batches=100`` or ``epochs=10``; None: as the file says.

    Raises:
        Mistake: hyperparameters that are a range and were given no value; no length; an option that cannot be read.
        ConfigError: mistakes in the file.
    """
    values: dict[str, Any] = {}
    for option in given:
        name, equals, value = option.partition("=")
        if not equals or not name:
            raise Mistake(f"--hparam {option}: expected NAME=VALUE, as in --hparam lr=0.1")
        _put(values, name.split("."), _value(value))
    plan = Plan(values, None)
    if text is not None:
        from det_core.config import parse_experiment

        config = parse_experiment(text, managed=False).data
        ranges: list[str] = []
        plan = plan_of(config, _constants(config["hyperparameters"], values, "", ranges))
        if ranges:
            options = " ".join(f"--hparam {name}=…" for name in ranges)
            raise Mistake(f"the file searches over {', '.join(ranges)}: give each a value to train bare: {options}")
        length = length or _length(config["searcher"].get("max_length"))
        plan.init["searcher_metric"] = config["searcher"]["metric"]
        plan.init["smaller_is_better"] = config["searcher"]["smaller_is_better"]
    if length is None:
        raise Mistake("how long? --max-length epochs=10 or batches=1000, or searcher.max_length in --config FILE")
    plan.fit["max_length"] = _unit(length)
    return plan


def _constants(space: Any, given: Mapping[str, Any], prefix: str, ranges: list[str]) -> Any:
    """The hyperparameters of one trial; names of those that are a range, and not given, go into ``ranges``."""
    if not isinstance(space, Mapping):
        return space
    if isinstance(space.get("type"), str):
        if space["type"] == "const":
            return space["val"]
        ranges.append(prefix)
        return None
    found = {}
    for name in [*space, *(name for name in given if name not in space)]:
        path = f"{prefix}.{name}" if prefix else name
        if name in given and not isinstance(given[name], Mapping):
            found[name] = given[name]
        else:
            found[name] = _constants(space.get(name, given.get(name)), given.get(name) or {}, path, ranges)
    return found


def _put(into: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        into = into.setdefault(name, {})
    into[path[-1]] = value


def _value(text: str) -> Any:
    """A value as an experiment file would have it: ``.2`` is a number there; without ruamel.yaml, as JSON has it."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    from det_core.config import read_changes

    try:
        return read_changes(f"value: {text}")["value"]
    except (ConfigError, MissingExtra):
        return text


def _length(value: Any) -> str | None:
    number, unit = split_length(value)
    if unit is not None:
        return f"{unit}={number}" if unit in ("batches", "epochs") else None
    return None if number is None or isinstance(number, Mapping) else str(number)


def _unit(text: str) -> tuple[str, int]:
    unit, equals, number = text.partition("=")
    unit, number = (unit, number) if equals else ("batches", text)
    if unit not in ("batches", "epochs") or not number.isdigit() or int(number) < 1:
        raise Mistake(f"--max-length {text}: expected batches=N or epochs=N")
    return PERIODS[unit], int(number)


def found_class(spec: str) -> Any:
    """The class that ``module:Class`` names, from the current folder.

    Raises:
        Mistake: it is not there, or is no PyTorchTrial. An error of the module's own comes out as it is.
    """
    module, colon, name = spec.partition(":")
    if not colon or not module or not name:
        raise Mistake(f"{spec}: expected MODULE:CLASS, as in model_def:MyTrial")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name is None or not (module == e.name or module.startswith(f"{e.name}.")):
            raise
        raise Mistake(f"there is no module {module} in {os.getcwd()}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise Mistake(f"{module} ({getattr(found, '__file__', module)}) has no class {name}")
        found = getattr(found, part)
    from det_core.pytorch import PyTorchTrial
    from det_core.pytorch.deepspeed import DeepSpeedTrial

    if not (isinstance(found, type) and issubclass(found, PyTorchTrial | DeepSpeedTrial)):
        raise Mistake(f"{spec} is no det_core.pytorch.PyTorchTrial, and no det_core.pytorch.deepspeed.DeepSpeedTrial")
    return found


def train(cls: Any, plan: Plan) -> None:
    """Train a class by a plan."""
    from det_core import pytorch

    fit = {
        name: getattr(pytorch, value[0])(value[1]) if isinstance(value, tuple) else value
        for name, value in plan.fit.items()
    }
    if not issubclass(cls, pytorch.PyTorchTrial):
        _train_engines(cls, plan, fit)
        return
    with pytorch.init(hparams=plan.hparams, exp_conf=plan.config, **plan.init) as context:
        context._fp16_compression_default, context._average_gradients_default = plan.gradients
        _quiet(context.distributed.rank)
        pytorch.Trainer(cls(context), context).fit(**fit)


def _train_engines(cls: Any, plan: Plan, fit: Mapping[str, Any]) -> None:
    """Train a DeepSpeedTrial, whose engines have a configuration of their own."""
    from det_core.pytorch import deepspeed

    options = {name: value for name, value in plan.init.items() if name != "aggregation_frequency"}
    if plan.init.get("aggregation_frequency", 1) != 1:
        logging.warning(
            "optimizations.aggregation_frequency does not count for a DeepSpeedTrial: DeepSpeed's configuration has "
            "gradient_accumulation_steps"
        )
    with deepspeed.init(hparams=plan.hparams, exp_conf=plan.config, **options) as context:
        _quiet(context.distributed.rank)
        deepspeed.Trainer(cls(context), context).fit(**fit)


def _quiet(rank: int) -> None:
    """Other ranks than the chief only warn."""
    if rank != 0:
        logging.getLogger().setLevel(logging.WARNING)


def main(words: Sequence[str] | None = None) -> int:
    """Train the class that the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=PROG, description="Train a trial class.", epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("SPEC", help="MODULE:CLASS, as model_def:MyTrial")
    parser.add_argument("--config", metavar="FILE", help="an experiment file: hyperparameters, lengths, periods")
    parser.add_argument(
        "--hparam", metavar="NAME=VALUE", action="append", default=[], help="a hyperparameter; over that of the file"
    )
    parser.add_argument("--max-length", metavar="UNIT=N", help="how long: epochs=10, or batches=1000")
    parser.add_argument("--name", help="what DET_CORE_RESUME=latest goes by (default: MODULE:CLASS)")
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
                    raise Mistake(f"there is no file {args.config}")
                with open(args.config, encoding="utf-8") as file:
                    text = file.read()
            plan = bare_plan(text, args.hparam, args.max_length)
            plan.init["name"] = args.name or args.SPEC
        cls = found_class(args.SPEC)
    except Mistake as e:
        write_quietly(f"error: {e}\n", sys.stderr)
        return 2
    except ConfigError as e:
        write_quietly("".join(f"error: {args.config}: {error}\n" for error in e.errors), sys.stderr)
        return 2
    try:
        train(cls, plan)
    except (DetCoreError, TypeError, ValueError) as e:
        _tell(e)
        return 1
    return 0


def _tell(error: Exception) -> None:
    """A mistake that our own checks found is one line, which names that of the user's code, if it came by there.

    An error out of the user's code has its frames.
    """
    frames = traceback.extract_tb(error.__traceback__)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not frames[-1].filename.startswith(package):
        traceback.print_exception(error)
        return
    theirs = [frame for frame in frames if not frame.filename.startswith(package)]
    where = f"{os.path.relpath(theirs[-1].filename)}:{theirs[-1].lineno}: " if theirs else ""
    write_quietly(f"error: {where}{error}\n", sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())

"""``det-core search preview``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from det_core.cli._config_file import is_there, tell_mistakes
from det_core.cli._say import error, note, print_json, print_table
from det_core.cli._status import NOT_UNDERSTOOD

_EXAMPLES = """\
examples:
  det-core search preview search.yaml
  det-core search preview search.yaml --config searcher.max_trials=64

Nothing is trained: the search is run several times with trials that are better and worse by chance. `trials` in the
table is how many of them reach a rung, from the least to the most. A unit is what the configuration counts
lengths in."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EXAMPLES
    parser.add_argument("CONFIG", help="the experiment file")
    parser.add_argument(
        "--config", metavar="K=V", action="append", default=[], help="change a value, as searcher.max_trials=64"
    )
    parser.add_argument("--json", action="store_true", help="an object")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Preview a search."""
    from det_core.config import parse_experiment
    from det_core.errors import ConfigError
    from det_core.search._preview import preview

    if not is_there(args.CONFIG):
        return NOT_UNDERSTOOD
    path = Path(args.CONFIG)
    try:
        experiment = parse_experiment(path.read_text(encoding="utf-8"), overrides=args.config)
    except UnicodeDecodeError:
        error(f"{path} is no text: name the experiment's configuration, a YAML or JSON file")
        return NOT_UNDERSTOOD
    except ConfigError as e:
        tell_mistakes(e.errors, args.CONFIG)
        return NOT_UNDERSTOOD
    found = preview(
        experiment.searcher, experiment.hyperparameters, experiment.seed, folder=str(path.absolute().parent)
    )
    if args.json:
        print_json(found)
        return 0
    _show_space(experiment.hyperparameters)
    _show(found, experiment.searcher)
    for text in [*experiment.warnings, *found["warnings"]]:
        note(f"warning: {text}")
    return 0


def _show_space(hyperparameters: dict[str, Any]) -> None:
    """The values as the scripts get them: of a logarithmic range, the powers and not the exponents."""
    from det_core.search._space import Space

    rows = []
    for parameter in Space(hyperparameters).parameters:
        spec = parameter.spec
        if parameter.kind in ("const", "categorical"):
            rows.append([parameter.name, ", ".join(str(value) for value in parameter.axis())])
            continue
        low, high = spec["minval"], spec["maxval"]
        if parameter.kind == "log":
            low, high = (spec["base"] ** exponent for exponent in (low, high))
        rows.append([parameter.name, f"{low:g} to {high:g}" + (", logarithmic" if parameter.kind == "log" else "")])
    if rows:
        print_table(["hyperparameter", "values"], rows)
        print()


def _show(found: dict[str, Any], searcher: Any) -> None:
    rows = [
        [
            str(bracket["bracket"]) if rung["rung"] == 0 else "",
            str(bracket["max_trials"]) if rung["rung"] == 0 else "",
            str(bracket["max_concurrent_trials"]) if rung["rung"] == 0 else "",
            str(rung["rung"]),
            f"{rung['length']:,}",
            _span(*rung["trials_range"]),
        ]
        for bracket in found["brackets"]
        for rung in bracket["rungs"]
    ]
    if rows:
        print_table(["bracket", "max_trials", "at a time", "rung", "length", "trials"], rows)
        print()
    best = "smallest" if searcher["smaller_is_better"] else "largest"
    print(f"{found['method']}, the {best} {searcher['metric']} is best: {found['trials']:,} trials", end="")
    if found["units"] is None:
        print(", each as long as its script trains")
        return
    least, most = found["units_range"]
    print(f", {_span(least, most)} units in all", end="")
    full = found["units_if_all_trained_fully"]
    if full and full != least:
        share = f"{least / full:.1%}" if least == most else f"{least / full:.1%} to {most / full:.1%}"
        print(f" ({share} of {full:,}, what training all of them fully takes)", end="")
    print()


def _span(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"

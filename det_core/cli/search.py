"""``det-core search``: what a search will do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from det_core.cli._groups import Group
from det_core.cli._options import config_file_argument, config_option, json_option
from det_core.cli._output import note, print_json, print_table, say

_EXAMPLES = """\
examples:
  det-core search preview search.yaml
  det-core search preview search.yaml --config searcher.max_trials=64

Nothing is trained: the search is run several times with trials that are better and worse by chance. `trials` in the
table is how many of them reach a rung, from the least to the most. A unit is what the configuration counts lengths
in."""


@click.group("search", cls=Group)
def command() -> None:
    """Preview a search before it runs."""


@command.command(epilog=_EXAMPLES)
@config_file_argument
@config_option
@json_option
def preview(config_file: str, config: Sequence[str], as_json: bool) -> int:
    """Print the brackets, rungs and budget of the search that the file CONFIG describes."""
    from det_core.cli.experiment import parse_config
    from det_core.search._preview import preview

    experiment = parse_config(config_file, config)
    # A search method of a user's is found as in the context, which is most often this directory.
    folder = str(Path(config_file).absolute().parent)
    found = preview(experiment.searcher, experiment.hyperparameters, experiment.seed, folder=folder)
    if as_json:
        print_json(found)
        return 0
    if space := list(_space_rows(experiment.hyperparameters)):
        print_table(["hyperparameter", "values"], space)
        print()
    if rungs := list(_rung_rows(found["brackets"])):
        print_table(["bracket", "max_trials", "at a time", "rung", "length", "trials"], rungs)
        print()
    say(_summary(found, experiment.searcher))
    for text in [*experiment.warnings, *found["warnings"]]:
        note(f"warning: {text}")
    return 0


def _space_rows(hyperparameters: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the values as scripts get them: of a logarithmic range, the powers and not the exponents."""
    from det_core.search._space import Space

    for parameter in Space(hyperparameters).parameters:
        spec = parameter.spec
        if parameter.kind in ("const", "categorical"):
            yield parameter.name, ", ".join(str(value) for value in parameter.axis())
        elif parameter.kind == "log":
            low, high = (spec["base"] ** spec[bound] for bound in ("minval", "maxval"))
            yield parameter.name, f"{low:g} to {high:g}, logarithmic"
        else:
            yield parameter.name, f"{spec['minval']:g} to {spec['maxval']:g}"


def _rung_rows(brackets: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    for bracket in brackets:
        head: tuple[object, ...] = tuple(bracket[name] for name in ("bracket", "max_trials", "max_concurrent_trials"))
        for rung in bracket["rungs"]:
            yield (*head, rung["rung"], f"{rung['length']:,}", _span(*rung["trials_range"]))
            head = ("", "", "")


def _summary(found: dict[str, Any], searcher: Any) -> str:
    best = "smallest" if searcher["smaller_is_better"] else "largest"
    text = f"{found['method']}, the {best} {searcher['metric']} is best: {found['trials']:,} trials"
    if found["units"] is None:
        return f"{text}, each as long as its script trains"
    least, most = found["units_range"]
    text += f", {_span(least, most)} units in all"
    full = found["units_if_all_trained_fully"]
    if not full or full == least:
        return text  # nothing is saved: of a grid or a random search
    shares = list(dict.fromkeys([f"{least / full:.1%}", f"{most / full:.1%}"]))
    return f"{text} ({' to '.join(shares)} of {full:,}, what training all of them fully takes)"


def _span(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"

"""Print the reference of the experiment file: ``make docs`` writes it to ``docs/reference-experiment.md``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from det_core.config._hyperparameters import KINDS
from det_core.config._mistakes import allowed_of, sections_below
from det_core.config._model import ExperimentFile
from det_core.config._rules import Rule
from det_core.config._searchers import SEARCHERS
from det_core.config._section import marked
from det_core.config._storage import STORAGES

INTRODUCTION = """\
# The experiment file

Written by `make docs` from the models that read it.

An experiment file says what to run, with which hyperparameters, for how long, and where. It is YAML, or JSON. Two
keys are needed, `entrypoint` and `searcher`:

```yaml
entrypoint: python3 train.py
hyperparameters:
  learning_rate: {type: log, base: 10, minval: -4, maxval: -1}
  layers: {type: int, minval: 1, maxval: 4}
  optimizer: {type: categorical, vals: [adam, sgd]}
  batch_size: 64
searcher:
  name: adaptive_asha
  metric: validation_loss
  max_trials: 16
  max_length: {epochs: 27}
resources:
  slots_per_trial: 1
```

- All mistakes in a file are said at once, a line for each: where, what is there, and what may be there.
- Keys without effect on this master (marked so below) are accepted, so that files of clusters run unchanged; one
  warning names those that are given.
- `--config searcher.max_trials=8` changes a value for one time; the value is read as YAML.
- Numbers and words are those of YAML 1.2: `1e-4` is a number, `012` is twelve, `no` and dates are texts. A key that is
  given twice is a mistake.
- `determined.launch.torch_distributed` in `entrypoint` becomes `det_core.launch.torch_distributed`, with a notice.
"""
HYPERPARAMETERS = """\
Each hyperparameter is one of the kinds below. A value alone is a constant: a text, a number, true, false, null, or
a list. An object without `type` is an object of hyperparameters again, so none of those can be called `type`. The
one that is called `global_batch_size` takes integers only. A grid has at most 100,000 points; of `int` it takes no
more values than there are.
"""
SEARCHER = """\
How long trials train, `max_length`, is an integer, or one with its unit as in `{batches: 100}`, `{records: 1000}` or
`{epochs: 3}`. For `async_halving` and `adaptive_asha` give either that, and the scripts follow
`ctx.searcher.operations()`; or `time_metric` and `max_time`, and trials are stopped by the validations that they
report.
"""
STORAGE = """\
Without a `type`, checkpoints go where the master's default says; how many stay can be said nevertheless. In each kind,
what stays when the experiment has ended is what one of the three numbers `save_…` keeps.
"""


def table(section: type[BaseModel]) -> str:
    """A section's keys, each with what it may be, its default, and what it is for."""
    rows = [
        f"| `{info.alias or name}` | {may_be(info)} | {default(info)} | {about(info)} |"
        for name, info in section.model_fields.items()
    ]
    return "\n".join(["| key | what it may be | default | |", "| --- | --- | --- | --- |", *rows]) + "\n"


def about(info: FieldInfo) -> str:
    """What a key is for."""
    if info.description == may_be(info):
        return ""
    return f"{info.description}{'; no effect here' if marked(info, 'unused') else ''}"


def may_be(info: FieldInfo) -> str:
    """What a key may be."""
    below = sections_below(info)
    if below:
        return "an object"
    text = allowed_of(info)
    if str(info.annotation).startswith("typing.Literal"):
        text = str(info.description)
    text = f"a list, each {text}" if allowed_in_list(info) else text
    return text.replace("|", "\\|")


def allowed_in_list(info: FieldInfo) -> bool:
    """Whether it is a list, and the rule is about what is in it."""
    return str(info.annotation).startswith("list[") and not any(isinstance(part, Rule) for part in info.metadata)


def default(info: FieldInfo) -> str:
    """What a key is if it is left out."""
    if info.is_required():
        return "needed"
    value = info.get_default(call_default_factory=True)
    return "" if value in ({}, []) and sections_below(info) else f"`{json.dumps(value)}`"


def kinds(which: Mapping[str, Any], word: str) -> Iterator[str]:
    """A section for each kind."""
    for name, section in which.items():
        if name not in ("", "nested", "default"):
            yield f"### `{word}: {name}`\n"
            yield f"{section.__doc__.splitlines()[0]}\n"
            yield table(section)


def reference() -> str:
    """The whole reference, as Markdown."""
    parts = [INTRODUCTION, "## All keys\n", table(ExperimentFile)]
    parts += ["## `searcher`\n", SEARCHER, *kinds(SEARCHERS, "name")]
    parts += ["## `hyperparameters`\n", HYPERPARAMETERS, *kinds(KINDS, "type")]
    parts += ["## `checkpoint_storage`\n", STORAGE, *kinds(STORAGES, "type")]
    for name, info in ExperimentFile.model_fields.items():
        below = sections_below(info)
        if below and name not in ("searcher", "hyperparameters", "checkpoint_storage"):
            parts += [f"## `{name}`\n", f"{below[0].__doc__}\n", table(below[0])]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(reference())

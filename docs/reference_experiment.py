"""Print the reference of the experiment file: ``make docs`` writes it to ``docs/reference-experiment.md``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from det_core.config._fields import IGNORED, SectionUnion, sections_of
from det_core.config._model import HYPERPARAMETERS, SEARCHERS, STORAGES, ExperimentFile

WORDS = {
    "integer": "int",
    "number": "float",
    "string": "text",
    "boolean": "true or false",
    "array": "list",
    "object": "object",
}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}

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

- All mistakes in a file are said at once, a line for each: where, what is there, and what is wrong. Keys that do not
  fit together are told once each of them is right. No value below `checkpoint_storage` or `environment`, nor one of an
  override, is ever repeated.
- `true` and `false` may be written as `yes`, `no`, `on` and `off`, and an integer as `1e3`.
- Keys without effect on this master (marked so below) are accepted, so that files of clusters run unchanged; one
  warning names those that are given.
- `--config searcher.max_trials=8` changes a value for one time; the value is read as YAML.
- Numbers and words are those of YAML 1.2: `1e-4` is a number, `012` is twelve, `no` and dates are texts. A key that is
  given twice is a mistake.
- `determined.launch.torch_distributed` in `entrypoint` becomes `det_core.launch.torch_distributed`, with a notice.
"""
SPACE = """\
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
    schemas = section.model_json_schema(mode="serialization")["properties"]
    rows = [
        f"| `{key}` | {may_be(schemas[key]) if not sections_of(info) else 'object'} | {default(info)} | {about(info)} |"
        for name, info in section.model_fields.items()
        if (key := info.alias or name) in schemas
    ]
    return "\n".join(["| key | what it may be | default | |", "| --- | --- | --- | --- |", *rows]) + "\n"


def may_be(schema: Mapping[str, Any]) -> str:
    """What a key may be, in words."""
    if "anyOf" in schema:
        return " or ".join(may_be(one) for one in schema["anyOf"] if one != {"type": "null"})
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{name}`" for name in schema.get("enum") or [schema["const"]])
    if schema.get("type") == "array" and schema["items"]:
        return f"list of {may_be(schema['items'])}"
    bounds = [f"{sign} {schema[bound]}" for bound, sign in BOUNDS.items() if bound in schema]
    return " ".join([WORDS.get(schema.get("type", ""), "anything"), ", ".join(bounds)]).strip()


def about(info: FieldInfo) -> str:
    """What a key is for."""
    return f"{info.description or ''}{'; no effect here' if info.json_schema_extra == IGNORED else ''}"


def default(info: FieldInfo) -> str:
    """What a key is if it is left out."""
    if info.is_required():
        return "needed"
    value = info.get_default(call_default_factory=True)
    return "" if isinstance(value, BaseModel) else f"`{json.dumps(value)}`"


def kinds(which: SectionUnion, key: str) -> Iterator[str]:
    """The sections of each kind."""
    for name, section in which.sections.items():
        yield f"### `{key}: {name}`\n"
        yield f"{str(section.__doc__).splitlines()[0]}\n"
        yield table(section)


def reference() -> str:
    """The whole reference, as Markdown."""
    parts = [INTRODUCTION, "## All keys\n", table(ExperimentFile)]
    parts += ["## `searcher`\n", SEARCHER, *kinds(SEARCHERS, "name")]
    parts += ["## `hyperparameters`\n", SPACE, *kinds(HYPERPARAMETERS, "type")]
    parts += ["## `checkpoint_storage`\n", STORAGE, *kinds(STORAGES, "type")]
    for name, info in ExperimentFile.model_fields.items():
        below = sections_of(info)
        if len(below) == 1:
            parts += [f"## `{name}`\n", f"{below[0].__doc__}\n", table(below[0])]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(reference())

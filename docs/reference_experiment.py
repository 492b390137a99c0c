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

- All mistakes in a file are reported together, one line for each: the key, its value, and the problem. Keys that
  contradict each other are reported once each of them is valid. Values below `checkpoint_storage` and `environment`,
  and values of overrides, are never printed.
- `true` and `false` may be written as `yes`, `no`, `on` and `off`, and an integer as `1e3`.
- Keys without effect on this master (marked below) are accepted, so that files of clusters run unchanged; one warning
  names them.
- `--config searcher.max_trials=8` overrides a value; it is parsed as YAML.
- The format is YAML 1.2: `1e-4` is a number, `012` is twelve, `no` and dates are strings. A duplicate key is an error.
- `determined.launch.torch_distributed` in `entrypoint` becomes `det_core.launch.torch_distributed`, with a notice.
"""
SPACE = """\
Each hyperparameter has one of the kinds below. A plain value is a constant: a string, a number, true, false, null or a
list. An object without `type` contains nested hyperparameters, so none of them can be named `type`. `global_batch_size`
must be an integer. A grid has at most 100,000 points, and no more values of an `int` than its range has.
"""
SEARCHER = """\
`max_length`, the length of trials, is an integer, or one with its unit as in `{batches: 100}`, `{records: 1000}` or
`{epochs: 3}`. For `async_halving` and `adaptive_asha`, set either `max_length`, and the scripts follow
`ctx.searcher.operations()`; or `time_metric` and `max_time`, and trials are stopped by the validations they report.
"""
STORAGE = """\
Without a `type`, checkpoints go to the default storage of the master. In each kind, the three numbers `save_…` decide
which checkpoints stay after the end of the experiment; they apply without a `type` too.
"""


def table(section: type[BaseModel]) -> str:
    """Yield the keys of a section with type, default and description."""
    schemas = section.model_json_schema(mode="serialization")["properties"]
    rows = []
    for name, info in section.model_fields.items():
        key = info.alias or name
        if key not in schemas:
            continue
        # A section has a table of its own, and its schema names no type.
        kind = "object"
        if not sections_of(info):
            kind = may_be(schemas[key])
        rows.append(f"| `{key}` | {kind} | {default(info)} | {about(info)} |")
    return "\n".join(["| key | what it may be | default | |", "| --- | --- | --- | --- |", *rows]) + "\n"


def may_be(schema: Mapping[str, Any]) -> str:
    """Describe the type of a key."""
    if "anyOf" in schema:
        return " or ".join(may_be(one) for one in schema["anyOf"] if one != {"type": "null"})
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{name}`" for name in schema.get("enum") or [schema["const"]])
    if schema.get("type") == "array" and schema["items"]:
        return f"list of {may_be(schema['items'])}"
    bounds = [f"{sign} {schema[bound]}" for bound, sign in BOUNDS.items() if bound in schema]
    return " ".join([WORDS.get(schema.get("type", ""), "anything"), ", ".join(bounds)]).strip()


def about(info: FieldInfo) -> str:
    """Return the description of a key."""
    text = info.description or ""
    if info.json_schema_extra == IGNORED:
        text += "; no effect here"
    return text


def default(info: FieldInfo) -> str:
    """Return the default of a key."""
    if info.is_required():
        return "needed"
    value = info.get_default(call_default_factory=True)
    # The defaults of a section stand in its own table.
    if isinstance(value, BaseModel):
        return ""
    return f"`{json.dumps(value)}`"


def kinds(which: SectionUnion, key: str) -> Iterator[str]:
    """Return the sections of each kind."""
    for name, section in which.sections.items():
        yield f"### `{key}: {name}`\n"
        yield f"{str(section.__doc__).splitlines()[0]}\n"
        yield table(section)


def reference() -> str:
    """Return the reference as Markdown."""
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

"""Reference of the experiment file: generated from the models, with valid examples."""

from __future__ import annotations

import importlib.util
import re

from det_core.config import parse_experiment
from support import ROOT

DOCS = ROOT / "docs"


def test_the_reference_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("reference_experiment", DOCS / "reference_experiment.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "reference-experiment.md").read_text() == module.reference(), "run `make docs`"


def test_experiment_reference_examples_parse() -> None:
    examples = re.findall(r"^```yaml\n(.*?)^```", (DOCS / "reference-experiment.md").read_text(), re.M | re.S)
    assert examples
    for example in examples:
        assert parse_experiment(example).warnings == ()

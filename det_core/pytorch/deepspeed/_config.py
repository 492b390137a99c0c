"""``overwrite_deepspeed_config()``: a DeepSpeed configuration with values of another, such as hyperparameters."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("det_core.pytorch")


def overwrite_deepspeed_config(
    base_ds_config: str | dict[str, Any], source_ds_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """A DeepSpeed configuration in which the values of another one count.

    Example:
        ::

            config = overwrite_deepspeed_config("ds_config.json", context.get_hparams().get("overwrite", {}))
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    Args:
        base_ds_config: a configuration, or the path of a JSON file with one.
        source_ds_dict: what to overwrite; dictionaries in it are merged into those of the base, everything else takes
            the place of what the base has under its name, or is added.

    Returns:
        a new dictionary that shares nothing with the arguments.

    Raises:
        TypeError: something else than a path or dictionaries; or a dictionary is to overwrite what is none.
        ValueError: the file is no JSON, or has a key twice.
        OSError: the file cannot be read.
    """
    base = _read(os.fspath(base_ds_config)) if isinstance(base_ds_config, str | os.PathLike) else base_ds_config
    for option, given, takes in (
        ("base_ds_config", base, "a path or a dict"), ("source_ds_dict", source_ds_dict, "a dict"),
    ):  # fmt: skip
        if not isinstance(given, Mapping):
            raise TypeError(f"overwrite_deepspeed_config({option}=) takes {takes}, not a {type(given).__name__}")
    return _merged(base, source_ds_dict, "")


def _merged(base: Mapping[str, Any], source: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A copy of ``base`` with ``source`` over it; ``where`` is the path of both, with a dot at its end."""
    found = {name: _copied(value) for name, value in base.items()}
    for name, value in source.items():
        old = base.get(name)
        if name not in base and (parent := str(name).partition(".")[0]) in base and parent != name:
            logger.warning("%s%s is added as one key, which DeepSpeed ignores: nest it, below %s", where, name, parent)
        if not isinstance(value, Mapping) or name not in base:
            found[name] = _copied(value)
        elif isinstance(old, Mapping):
            found[name] = _merged(old, value, f"{where}{name}.")
        else:
            raise TypeError(
                f"{where}{name} is {old!r} in the DeepSpeed configuration, which a dictionary cannot overwrite"
            )
    return found


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copied(each) for name, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _read(path: str) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{path} has the key(s) {', '.join(twice)} twice")
        return dict(pairs)

    with open(path, encoding="utf-8") as file:
        try:
            found = json.load(file, object_pairs_hook=without_duplicates)
        except json.JSONDecodeError as e:
            raise ValueError(f"{path} is no JSON: {e}") from e
    if not isinstance(found, dict):
        raise TypeError(f"{path} holds a {type(found).__name__}: expected a DeepSpeed configuration, {{…}}")
    return found

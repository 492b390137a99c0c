"""``overwrite_deepspeed_config()``: apply hyperparameters to a DeepSpeed configuration."""

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
    """Return a DeepSpeed configuration with the values of another one applied.

    Example:
        ::

            config = overwrite_deepspeed_config("ds_config.json", context.get_hparams().get("overwrite", {}))
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    Args:
        base_ds_config: a configuration, or the path of a JSON file with one.
        source_ds_dict: values to apply. Dictionaries are merged, other values replace those of the base or are added.

    Returns:
        a new dictionary that shares nothing with the arguments.

    Raises:
        TypeError: For other types of arguments, or if a dictionary would replace another type.
        ValueError: If the file is not JSON, or has a duplicate key.
        OSError: If the file cannot be read.
    """
    base: Any = base_ds_config
    if isinstance(base, str | os.PathLike):
        base = _read(os.fspath(base))
    for option, value, expected in (
        ("base_ds_config", base, "a path or a dict"), ("source_ds_dict", source_ds_dict, "a dict"),
    ):  # fmt: skip
        if not isinstance(value, Mapping):
            raise TypeError(
                f"overwrite_deepspeed_config({option}=): expected {expected}, found a {type(value).__name__}"
            )
    return _merge(base, source_ds_dict, "")


def _merge(base: Mapping[str, Any], source: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a copy of ``base`` with ``source`` applied; ``where`` is the path of both, with a trailing dot."""
    merged = {name: _copy(value) for name, value in base.items()}
    for name, value in source.items():
        old = base.get(name)
        if name not in base and (parent := str(name).partition(".")[0]) in base and parent != name:
            logger.warning("%s%s is added as one key, which DeepSpeed ignores: nest it below %s", where, name, parent)
        if not isinstance(value, Mapping) or name not in base:
            merged[name] = _copy(value)
        elif isinstance(old, Mapping):
            merged[name] = _merge(old, value, f"{where}{name}.")
        else:
            raise TypeError(f"{where}{name} is {old!r} in the DeepSpeed configuration: a dictionary cannot replace it")
    return merged


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copy(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def _read(path: str) -> dict[str, Any]:
    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{path} has duplicate key(s) {', '.join(duplicates)}")
        return dict(pairs)

    with open(path, encoding="utf-8") as file:
        try:
            config = json.load(file, object_pairs_hook=reject_duplicates)
        except json.JSONDecodeError as e:
            raise ValueError(f"{path} is not JSON: {e}") from e
    if not isinstance(config, dict):
        raise TypeError(f"{path} has a {type(config).__name__}: expected a DeepSpeed configuration, {{…}}")
    return config

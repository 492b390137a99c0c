"""State of the random number generators, as plain lists, numbers and tensors."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Mapping
from typing import Any

DEVICES = ("cuda", "xpu", "mps")
"""Modules of torch whose devices have their own generators."""


def random_state() -> dict[str, Any]:
    """Return the state of the global generators of python, numpy and torch in this process.

    Libraries that are not imported are left out, and so are devices that torch has not used. In a job of several ranks,
    each rank stores its own.

    Returns:
        State by generator: ``python``, ``numpy``, ``torch`` (a uint8 tensor), and ``cuda``, ``xpu`` or ``mps`` (a list
        of tensors, one for each device). ``torch.load(weights_only=True)`` reads all of it.
    """
    state: dict[str, Any] = {"python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    if (torch := sys.modules.get("torch")) is not None:
        state["torch"] = torch.get_rng_state()
        for name in DEVICES:
            if (states := _device_states(torch, name)) is not None:
                state[name] = states
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the global generators. Accepts lists instead of tuples, as JSON makes them.

    Args:
        state: result of :func:`random_state`, here or in another process. Its libraries are imported if necessary. If
            it has more devices than this machine, the first ones are used.

    Raises:
        ValueError: If the state of python is missing, so that it is something else.
    """
    if "python" not in state:
        raise ValueError(f"expected what core.random_state() returns, found the keys {', '.join(map(repr, state))}")
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in state:
        importlib.import_module("numpy").random.set_state(tuple(state["numpy"]))
    if "torch" not in state:
        return
    torch = importlib.import_module("torch")
    torch.set_rng_state(state["torch"].cpu())
    for name in DEVICES:
        if name in state and getattr(torch, name).is_available():
            _set_device_states(getattr(torch, name), state[name])


def _device_states(torch: Any, name: str) -> list[Any] | None:
    """Return a state for each device, or None if torch has not used such a device."""
    module = getattr(torch, name, None)
    if module is None or not module.is_available():
        return None
    if not hasattr(module, "is_initialized"):  # mps, which has its one device from the start
        return [module.get_rng_state()]
    # The states of a device that is not initialized would initialize it, and take its memory.
    if not module.is_initialized():
        return None
    return list(module.get_rng_state_all())


def _set_device_states(module: Any, states: list[Any]) -> None:
    # The generators take a ByteTensor of the CPU; torch.load(map_location="cuda") has put it elsewhere.
    if not hasattr(module, "is_initialized"):
        module.set_rng_state(states[0].cpu())
        return
    for device, state in enumerate(states[: module.device_count()]):
        module.set_rng_state(state.cpu(), device)

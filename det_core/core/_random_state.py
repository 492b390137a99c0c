"""The state of the random number generators, as plain lists, numbers and tensors."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Mapping
from typing import Any

DEVICES = ("cuda", "xpu", "mps")
"""The modules of torch whose devices have generators of their own."""


def random_state() -> dict[str, Any]:
    """The state of the global generators of python, numpy and torch with its devices, of what is imported.

    Only this process's; a job of several ranks keeps one state for each. A device counts once torch has used it.

    Returns:
        By generator: ``python``, ``numpy``, ``torch`` (a uint8 tensor), and ``cuda``, ``xpu`` or ``mps`` (a list of
        them, one for each device). All of it is what ``torch.load(weights_only=True)`` reads.
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
    """Put the generators back to where they were. Lists in place of tuples will do, as JSON makes them.

    Args:
        state: what :func:`random_state` has returned, here or in another process. A library that is in it, and not
            imported yet, is imported. Of more devices than there are here, the first ones count.

    Raises:
        ValueError: it has no state of python, so it is something else.
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
    """A state for each device; None: torch has not used such a device."""
    module = getattr(torch, name, None)
    if module is None or not module.is_available():
        return None
    if not hasattr(module, "is_initialized"):  # mps, which is there from the start
        return [module.get_rng_state()]
    return list(module.get_rng_state_all()) if module.is_initialized() else None


def _set_device_states(module: Any, states: list[Any]) -> None:
    # The generators take a ByteTensor of the CPU; torch.load(map_location="cuda") has put it elsewhere.
    if not hasattr(module, "is_initialized"):
        module.set_rng_state(states[0].cpu())
        return
    for device, state in enumerate(states[: module.device_count()]):
        module.set_rng_state(state.cpu(), device)

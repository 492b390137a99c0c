"""States that a checkpoint can hold: what ``torch.load(weights_only=True)`` reads again, which runs no code."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from det_core._torch_states import why_unreadable
from det_core.errors import CheckpointError


def readable_states(
    kind: str, states: Mapping[str, Any], load: Callable[[IO[bytes]], Any], log: logging.Logger, warned: set[str]
) -> dict[str, Any]:
    """Return the states that can be read back from a checkpoint, without those that would make it unreadable.

    Args:
        kind: what has a state, for the warning.
        states: states by the name of their owner.
        load: reads what ``torch.save()`` has written, as a resume does.
        log: logger of a warning that names an owner whose state is left out.
        warned: owners that were named before; extended.
    """
    kept = {}
    for name, state in states.items():
        reason = why_unreadable(state, load)
        if not reason:
            kept[name] = state
        elif name not in warned:
            warned.add(name)
            log.warning(
                "the state of %s %r is not part of checkpoints, as it could not be read back (%s): keep to tensors, "
                "numbers, strings, lists and dictionaries", kind, name, reason,
            )  # fmt: skip
    return kept


@contextmanager
def naming_damage(path: Any) -> Iterator[None]:
    """Say which file it is while torch reads one, whose errors do not.

    Raises:
        CheckpointError: If the file is damaged.
        pickle.UnpicklingError: If it holds what ``weights_only`` refuses.
        OSError: If it cannot be opened.
    """
    try:
        yield
    except pickle.UnpicklingError:
        raise
    except Exception as e:  # flipped bits let torch raise nearly anything, an OSError of a seek before the file too
        if isinstance(e, OSError) and e.filename is not None:
            raise
        raise CheckpointError(f"{path} is damaged or of another kind: {type(e).__name__}: {e}") from e

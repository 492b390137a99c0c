"""Optional dependencies: imported where they are used, with the command to install what is missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from det_core._errors import MissingExtra


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import ``module``, or say how to install it.

    Args:
        module: dotted module name, such as ``"pandas"``.
        extra: the extra of det-core that brings it.
        purpose: what needs it, as the start of a sentence ("export to parquet").

    Raises:
        MissingExtra: the module, or something it imports, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise MissingExtra(f"{purpose} needs {module} ({e}). Install it: pip install 'det-core[{extra}]'") from e

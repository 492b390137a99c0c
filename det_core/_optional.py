"""Optional dependencies: imported where they are used, with the command to install what is missing."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from det_core.errors import MissingExtra


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
        why = "which is not installed" if e.name == module.partition(".")[0] else f"and: {e}"
        raise MissingExtra(f"{purpose} needs {module}, {why}. Install it: {install_command(extra)}") from e


def check_installed(*modules: str, extra: str, purpose: str) -> None:
    """As :func:`require`, for modules that another process will import: this one only looks whether they are there.

    Raises:
        MissingExtra: one is not.
    """
    for module in modules:
        if not is_installed(module):
            raise MissingExtra(
                f"{purpose} needs {module}, which is not installed. Install it: {install_command(extra)}"
            )


def is_installed(module: str) -> bool:
    """Whether ``module`` can be imported here; it is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


def install_command(extra: str) -> str:
    """The command that installs an extra: from the folder that det-core was installed from, if that is still there."""
    import json
    import os
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    try:
        told = json.loads(distribution("det-core").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        told = {}
    url = urlsplit(told.get("url", ""))
    folder = unquote(url.path)
    if url.scheme != "file" or not os.path.isfile(os.path.join(folder, "pyproject.toml")):
        return f"pip install '.[{extra}]' in the folder of det_core's sources"
    editable = "-e " if told.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}'{folder}[{extra}]'"

"""Optional dependencies: imported where they are used, with an install command as the error."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from det_core.errors import MissingExtra


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import and return a module.

    Args:
        module: Dotted module name, such as ``"pandas"``.
        extra: Extra of det-core that installs it.
        purpose: Start of the message's sentence, such as "export to parquet".

    Raises:
        MissingExtra: If the module, or a module that it imports, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        why = f"and: {e}"
        if e.name == module.partition(".")[0]:
            why = "which is not installed"
        raise MissingExtra(f"{purpose} needs {module}, {why}. Install it: {install_command(extra)}") from e


def check_installed(*modules: str, extra: str, purpose: str) -> None:
    """Check that modules are installed which another process will import; arguments as of :func:`require`.

    Raises:
        MissingExtra: If one is not installed.
    """
    for module in modules:
        if not is_installed(module):
            raise MissingExtra(
                f"{purpose} needs {module}, which is not installed. Install it: {install_command(extra)}"
            )


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its package
        return False


def install_command(extra: str) -> str:
    """Return the command that installs an extra, from the directory that det-core was installed from if it exists."""
    import json
    import os
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    try:
        source = json.loads(distribution("det-core").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        source = {}
    url = urlsplit(source.get("url", ""))
    folder = unquote(url.path)
    if url.scheme != "file" or not os.path.isfile(os.path.join(folder, "pyproject.toml")):
        return f"pip install '.[{extra}]' in the folder of det_core's sources"
    command = "pip install"
    if source.get("dir_info", {}).get("editable"):
        command += " -e"
    return f"{command} '{folder}[{extra}]'"

"""Finding the class of a custom search method."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

from det_core.errors import SearchError
from det_core.search._method import SearchMethod


def find_class(name: Any, folder: str | None) -> type[SearchMethod]:
    """The class that ``"module:Class"`` names.

    Args:
        name: the value of ``searcher.class``.
        folder: where the module is looked for first. From there it is loaded anew each time, under a name of its own,
            so that experiments whose modules have one name do not get each other's; it may import modules beside it.

    Raises:
        SearchError: it does not exist, cannot be imported, or is no :class:`SearchMethod`.
    """
    if not isinstance(name, str) or name.count(":") != 1:
        raise SearchError(f"searcher.class is {name!r}; it must be 'module:Class'")
    module_name, class_name = name.split(":")
    try:
        file = None if folder is None else _file(Path(folder), module_name)
        module = importlib.import_module(module_name) if file is None else _loaded(module_name, file, str(folder))
    except Exception as e:
        raise SearchError(f"searcher.class {name!r} cannot be imported: {type(e).__name__}: {e}") from e
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type) or not issubclass(cls, SearchMethod):
        raise SearchError(f"searcher.class {name!r} must be a class that inherits from det_core.search.SearchMethod")
    return cls


def _file(folder: Path, module_name: str) -> Path | None:
    stem = folder.joinpath(*module_name.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


def _loaded(module_name: str, file: Path, folder: str) -> ModuleType:
    name = f"_det_core_search_{zlib.crc32(str(file).encode()):08x}_{module_name.replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python module")
    module = importlib.util.module_from_spec(spec)
    standing = set(sys.modules) | {name}
    sys.modules[name] = module
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
        for other in set(sys.modules) - standing:  # what it has imported from its folder is not for anybody else
            origin = getattr(sys.modules[other], "__file__", None)
            if origin and Path(origin).is_relative_to(folder):
                del sys.modules[other]
    return module

"""What a user should know of an experiment file that has no mistakes."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from det_core.config._entrypoint import foreign_launchers
from det_core.config._model import ExperimentFile
from det_core.config._searchers import Halving
from det_core.config._section import marked


def remarks(file: ExperimentFile) -> Iterator[str]:
    """One sentence for each thing to know."""
    if names := list(_unused(file, "")):
        yield f"these have no effect here, and are kept as they are: {', '.join(names)}"
    if launchers := foreign_launchers(file.entrypoint or ""):
        said = ", ".join(f"determined.launch.{name} by det_core.launch.{name}" for name in launchers)
        yield f"in entrypoint, a launcher is replaced by ours of the same name: {said}"
    searcher = file.searcher
    if isinstance(searcher, Halving) and searcher.time_metric is not None:
        ignored = [key for key in ("max_length", "stop_once") if getattr(searcher, key)]
        if ignored:
            said = " and ".join(f"searcher.{key}" for key in ignored)
            yield f"{said} {'has' if len(ignored) == 1 else 'have'} no effect, as there is searcher.time_metric"


def _wants(value: object) -> bool:
    """Whether a value asks for anything: a number does, 0 as well; what is off or empty does not."""
    return bool(value) or (isinstance(value, int | float) and not isinstance(value, bool))


def _unused(section: BaseModel, path: str) -> Iterator[str]:
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        as_without = (info.get_default(call_default_factory=True), marked(info, "anyway"))
        if marked(info, "unused") and _wants(value) and value not in as_without:
            yield path + name
        elif isinstance(value, BaseModel):
            yield from _unused(value, f"{path}{name}.")

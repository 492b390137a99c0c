"""Processes and files for code that runs around other people's scripts.

Standard library alone, and nothing here imports the rest of det_core: launchers import it as they do any package, and a
program that is started as ``python -I -S`` puts this folder's parent on its path and imports ``_standalone``.
"""

from __future__ import annotations

__all__: list[str] = []

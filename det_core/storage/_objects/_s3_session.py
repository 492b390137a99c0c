"""Sessions of aiobotocore that read what botocore ships of the services once per process.

Each session would read megabytes of JSON anew: 0.1 s of Python before the first request of every store.
"""

from __future__ import annotations

import functools
from typing import Any


def new_session() -> Any:
    """A session as aiobotocore makes it, which reads keys and configuration of its own at its first use."""
    from aiobotocore.session import AioSession

    session = AioSession()
    session.lazy_register_component("data_loader", lambda: _loader(session.get_config_variable("data_path")))
    return session


@functools.cache
def _loader(folders: str | None) -> Any:
    """Reads and keeps the models below botocore's own folder and ``folders`` (AWS_DATA_PATH)."""
    from botocore.loaders import create_loader

    return create_loader(folders)

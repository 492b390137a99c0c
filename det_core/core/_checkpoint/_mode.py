"""Who downloads."""

from __future__ import annotations

import enum


class DownloadMode(enum.Enum):
    """The calling rules of ``download()`` and ``restore_path()``."""

    LocalWorkersShareDownload = "LOCAL_WORKERS_SHARE_DOWNLOAD"
    """Every rank of the job calls. The ranks of a machine share the work, and none returns before all is there."""
    NoSharedDownload = "NO_SHARED_DOWNLOAD"
    """Any rank calls, when it likes; each does all the work by itself, so no two may use one folder at a time."""

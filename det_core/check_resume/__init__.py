"""Check of a port: whether a training that is stopped or killed and resumed ends as one that is never disturbed.

It is what ``det-core check-resume`` runs. The command is started in homes of its own; a probe, which ``core.init()``
loads there, stops it at an exact moment and notes what it saves, loads and trains on.
"""

from det_core.check_resume._check import Report, check_resume
from det_core.check_resume._diagnosis import Finding
from det_core.check_resume._report import as_json, as_markdown

__all__ = ["Finding", "Report", "as_json", "as_markdown", "check_resume"]

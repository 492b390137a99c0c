"""The exit statuses of ``det-core``, for scripts to rely on."""

from __future__ import annotations

DONE = 0
FAILED = 1
NOT_UNDERSTOOD = 2
ENDED_IN_ERROR = 3
CANCELED = 4
NOT_ENDED = 5
INTERRUPTED = 130

MEANINGS = """\
exit status:
  0  done; with --follow and `wait`: the experiment is COMPLETED
  1  failed: one line on stderr says why
  2  the command line was not understood, or the configuration has mistakes
  3  the experiment ended in ERROR
  4  the experiment was canceled or killed
  5  `wait --timeout`: the experiment has not ended by then
  130  interrupted by Ctrl-C or SIGTERM; experiments go on"""

_OF_STATE = {"COMPLETED": DONE, "CANCELED": CANCELED}


def of_state(state: str) -> int:
    """The exit status for the state that an experiment has ended in."""
    return _OF_STATE.get(state, ENDED_IN_ERROR)

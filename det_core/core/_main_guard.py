"""The main guard, without which each child of spawn and forkserver does the script's work again."""

from __future__ import annotations

import multiprocessing

from det_core._notices import print_notice


def exit_if_importing_script(call: str) -> None:
    """End a child process that is importing the script of its parent, and so would train on its own account.

    The exit is a SystemExit behind one printed line: multiprocessing shows an error with a page of its own frames, and
    its forkserver shows nothing of a SystemExit's text.

    Args:
        call: the script's call, for the line.
    """
    # the mark by which multiprocessing itself refuses to start processes there
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        print_notice(
            f"{call} is called while a child process imports this script, as spawn and forkserver do, so it makes no "
            'run: put the lines that train under `if __name__ == "__main__":`'
        )
        raise SystemExit(1)

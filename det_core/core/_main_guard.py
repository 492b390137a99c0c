"""Main guard: without it, each child of spawn and forkserver repeats the work of the script."""

from __future__ import annotations

import multiprocessing

from det_core._notices import print_notice


def exit_if_importing_script(call: str) -> None:
    """Exit a child process that is importing the script of its parent, and would train a second time.

    Args:
        call: the call of the script, for the message.

    Raises:
        SystemExit: If this process is such a child.
    """
    # The flag by which multiprocessing itself refuses to start processes there.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # multiprocessing shows an error with a page of its own frames; its forkserver drops the text of a SystemExit.
        print_notice(
            f"{call} is called while a child process imports this script, as spawn and forkserver do, so it starts "
            'no run: put the lines that train under `if __name__ == "__main__":`'
        )
        raise SystemExit(1)

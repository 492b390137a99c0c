"""A master whose trials run on a machine that does not share its folders, over a link that can be cut."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from det_core.master._options import Options
from det_core.master._server import run
from support import TESTS
from support.chaos import TRIAL, Machine
from support.proxy import RESET, proxy_before
from support.remote_engine import Link, RemoteEngine

_PROGRAM = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from support.remote_master import serve
serve(*sys.argv[1:])
"""
_AT_THE_END = """
    open(os.environ["REACHED"], "w").close()
    while not os.path.exists(os.environ["FREE"]):
        time.sleep(0.01)
    print("the end", flush=True)
"""
"""Further lines of the script of chaos, for its end."""


class RemoteMachine(Machine):
    """A master, and another machine that runs its trials.

    Attributes:
        elsewhere: Home of the other machine.
        reached: File that is there once a script has reached its end.
        free: File for which scripts wait there.
    """

    def __init__(self, folder: Path, slots: int) -> None:
        super().__init__(folder, slots, random.Random(0), TRIAL)
        (self.context / "train.py").write_text(TRIAL.read_text() + _AT_THE_END)
        self.cut_file = folder / "cut"
        self.reached = folder / "reached"
        self.free = folder / "free"
        self.elsewhere = folder / "elsewhere"
        self.homes.append(self.elsewhere)
        self.trials_url = ""
        self.drop: Callable[[], None] = lambda: None

    def cut(self) -> None:
        """Let nothing pass between the trials' machine and the master."""
        self.cut_file.touch()
        self.drop()

    def mend(self) -> None:
        """Let everything pass again."""
        self.cut_file.unlink()

    @property
    def variables(self) -> list[str]:
        """Variables that the script needs."""
        return [f"CHAOS_TOKENS={self.tokens}", "CHAOS_PACE=0.1", f"REACHED={self.reached}", f"FREE={self.free}"]

    def command(self, log: Path) -> list[str]:
        """Return the command line of the master, less the interpreter."""
        arguments = [self.home, self.elsewhere, self.slots, self.cut_file, self.trials_url, log]
        return ["-c", _PROGRAM, *map(str, arguments)]

    def ends_elsewhere(self) -> set[str]:
        """Return the allocations whose ends the machine knows, and the master does not."""
        here, there = (set((home / "master" / "allocations").glob("*/exit.json")) for home in self.homes)
        return {path.parent.name for path in there} - {path.parent.name for path in here}


@contextmanager
def remote_machine(folder: Path, slots: int = 1) -> Iterator[RemoteMachine]:
    """Yield a machine with a running master."""
    made = RemoteMachine(folder, slots)
    with proxy_before("http://127.0.0.1:1") as proxy:
        proxy.begin(lambda number, request: RESET if made.cut_file.exists() else None)
        made.trials_url = proxy.url
        try:
            made.start()
            proxy.aim(made._url)
            made.drop = proxy.drop
            yield made
        finally:
            made.close()


def serve(home: str, elsewhere: str, slots: str, cut: str, url: str, log: str) -> None:
    """Run the master until it is stopped."""
    engine = RemoteEngine(Path(home), Path(elsewhere), int(slots), Link(os.getpid(), Path(cut)), master_url=url)
    run(Options(Path(home), slots=int(slots), log_file=Path(log)), engine)

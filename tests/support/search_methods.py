"""Search methods of a user, which wait, hang, fail or die."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from det_core.master.service import _create
from support.mastered import Bench, config_of

METHOD = """
import os, re, sys, time
from det_core.search import Close, SearchMethod, TrainTo

{head}
def wait_for_flag():
    open({flag!r} + ".asked", "a").write("x")
    while not os.path.exists({flag!r}):
        time.sleep(0.01)

def hold_the_interpreter():
    if not os.path.exists({flag!r}):
        open({flag!r} + ".asked", "a").write("x")
        re.match("(a+)+$", "a" * 64 + "b")

class Mine(SearchMethod):
    def __init__(self, setup):
        super().__init__(setup)
        {init}

    def handle(self, event):
        print("a user's method may print")
        if event.kind == "started":
            made = self.create({{"lr": 0.5}})
            return [made, TrainTo(made.request_id, 2)]
        if event.kind == "completed" and event.length == 2:
            {completed}
            return [TrainTo(event.request_id, 4)]
        if event.kind == "completed":
            return [Close(event.request_id)]
        return []
"""
CUSTOM = {"name": "custom", "class": "mine:Mine"}


class Method:
    """A user's search method whose trial trains to 2, then to 4.

    Attributes:
        context: Context directory with its module.
        flag: File that it may wait for.
    """

    def __init__(self, folder: Path, completed: str = "pass", *, init: str = "pass", head: str = "") -> None:
        self.flag = folder / "flag"
        text = METHOD.format(flag=str(self.flag), completed=completed, init=init, head=head).encode()
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz") as tar:
            member = tarfile.TarInfo("mine.py")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
        self.context = out.getvalue()

    @property
    def is_asked(self) -> bool:
        """Whether it waits, or hangs, by now."""
        return Path(f"{self.flag}.asked").exists()

    async def create(self, b: Bench) -> int:
        """Create an experiment with it; return its ID."""
        return (await b.do(lambda s: _create.create_experiment(s, config_of(CUSTOM), self.context))).id

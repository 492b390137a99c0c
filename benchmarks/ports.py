"""Wrong and right ports below `det-core check-resume`: how many are detected, how many by their cause first.

The wrong ones are right scripts with one mistake each; the right ones are scripts of the tests, the pages and the
examples, of which none may get a finding. A mistake counts as detected when the check finds something, or the API says
it while the script runs.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks._bench import Args, Bound, Table, Tables, at_least, at_most, program, quick
from benchmarks._processes import ROOT

sys.path.insert(0, str(ROOT / "tests"))
from support import ports  # type: ignore[import-not-found]

NAMED_BOUND = 0.8


def measure(args: Args) -> Tables:
    wrong = list(ports.WRONG)[: quick(len(ports.WRONG), 1)]
    right = list(ports.RIGHT)[: quick(len(ports.RIGHT), 1)]
    noticed = named = false_alarms = 0
    for name in wrong:
        with folder() as path:
            outcome = ports.check_wrong(name, path)
        is_named = outcome.is_named(ports.WRONG[name])
        noticed += bool(is_named or outcome.causes or outcome.said)
        named += is_named
        progress("wrong", name, outcome)
    for name in right:
        with folder() as path:
            outcome = ports.check_right(name, path)
        false_alarms += bool(outcome.status or outcome.causes or outcome.said)
        progress("right", name, outcome)
    table = Table("ports below check-resume", ["ports", "noticed", "cause first", "share"])
    share = named / len(wrong)
    all_told = Bound("all noticed", noticed == len(wrong))
    table.row("wrong", len(wrong), noticed, named, share, bound=all_told & at_least(share, NAMED_BOUND))
    table.row("right", len(right), false_alarms, bound=at_most(false_alarms, 0))
    yield table


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Work in a folder of its own: a port is written there, and a check keeps its runs there."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="port-") as path:
        os.chdir(path)
        try:
            yield Path(path)
        finally:
            os.chdir(before)


def progress(kind: str, name: str, outcome: ports.Outcome) -> None:
    """Print what a check said of a port: a full run takes half an hour."""
    print(f"{kind} {name}: {', '.join(outcome.causes) or 'nothing found'}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    program(measure, __doc__)

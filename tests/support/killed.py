"""A script that is killed at random moments and started again by the same command, and what comes of it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from det_core import client
from det_core.journal import read_run
from support import nest, warm
from support.processes import Process
from support.ranks import Job


class Restarted:
    """A script in a home of its own.

    Args:
        folder: made here; the script's.
        code: the script.
        ranks: how many processes.
        env: variables for it.
        python: of another environment, with our launcher for more than one rank; left out, they are warm.
        kind: the process that warm ones are forked from.
    """

    def __init__(
        self,
        folder: Path,
        code: str,
        ranks: int,
        env: Mapping[str, str] | None = None,
        python: str | None = None,
        kind: warm.Kind = warm.HERE,
    ) -> None:
        folder.mkdir(parents=True)
        self.python, self.kind = python, kind
        self.folder, self.home, self.ranks, self.env = folder, folder / "home", ranks, dict(env or {})
        (folder / "script.py").write_text(code)

    def start(self, ranks: int | None = None) -> Process:
        """Start it, as a person does."""
        size = ranks or self.ranks
        env = {**os.environ, "DET_CORE_HOME": str(self.home), "OMP_NUM_THREADS": "1", **self.env}
        self._before = nest.running()
        with open(self.folder / "output", "ab") as out:
            if self.python is not None:
                launcher = ["-m", "det_core.launch.torch_distributed", "--nproc-per-node", str(size)]
                command = [self.python, *(launcher if size > 1 else []), "script.py"]
                return subprocess.Popen(command, cwd=self.folder, env=env, stdout=out, stderr=out)
            if size > 1:
                return Job(["script.py"], size, env=env, cwd=self.folder, stdout=out.fileno(), kind=self.kind)
            return warm.start(["script.py"], env=env, cwd=self.folder, stdout=out.fileno(), kind=self.kind)

    def wait(self, process: Process) -> int:
        """Wait for the end of a start that was sent a signal; return its status, and end a killed script's workers too.

        A loader's worker may live for ever if its parent is killed while it begins, as torch lets it look up its parent
        only then. A launcher ends such workers; without one nobody does.
        """
        status = process.wait()
        if status == -signal.SIGKILL:
            nest.end_all_but(self._before)
        return status

    def finish(self, ranks: int | None = None) -> None:
        """Start it, and let it come to its end."""
        assert self.start(ranks).wait() == 0, self.output

    @property
    def output(self) -> str:
        """The output so far."""
        return (self.folder / "output").read_text(errors="replace")

    def disturbed(self, rng: random.Random, number: signal.Signals = signal.SIGKILL, most: int = 250) -> bool:
        """Start it, and send a signal to one of its ranks at a random moment; False: it was done before.

        Args:
            rng: chooses.
            number: the signal.
            most: records that the chief has journaled by then, at most.
        """
        process = self.start()
        records = self.records() + rng.randint(1, most)
        while self.records() < records and process.poll() is None:
            time.sleep(0.003)
        time.sleep(rng.random() * 0.02)
        for pid in rng.sample(self.pids(), 1) if self.ranks > 1 and self.pids() else [process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        status = self.wait(process)
        return status != 0 if number == signal.SIGKILL else "preempted; to resume it" in self.output[-1000:]

    def records(self) -> int:
        """Return the number of records in the chief's journals."""
        return sum(file.read_bytes().count(b"\n") for file in self.home.glob("runs/*/journal-*-0.jsonl"))

    def pids(self) -> list[int]:
        """Return the process IDs in the journals of the last start's ranks."""
        files = sorted(self.home.glob("runs/*/journal-*.jsonl"), key=lambda file: int(file.name.split("-")[1]))
        last = [file for file in files if file.name.split("-")[1] == files[-1].name.split("-")[1]]
        firsts = [file.read_bytes().partition(b"\n") for file in last]
        return [json.loads(first)["pid"] for first, ended, _ in firsts if ended]

    def rows(self, group: str = "training") -> list[tuple[Any, Any, Any]]:
        """Return step, metrics and batch metrics of each row."""
        found = read_run(client.run("latest", home=self.home).path).rows(group, batches=True)
        return [(row.steps_completed, row.metrics, row.batch_metrics) for row in found]

    def state(self, name: str = "state.pt") -> Any:
        """Return a file of the newest checkpoint, as torch reads it."""
        import torch

        run = client.run("latest", home=self.home)
        with client.checkpoints(storage=run.path / "checkpoints") as checkpoints:
            newest = max(checkpoints, key=lambda checkpoint: checkpoint.steps_completed)
        return torch.load(run.path / "checkpoints" / newest.storage_id / name, weights_only=True)


def drawn() -> random.Random:
    """Return a generator with a new seed, which is printed: for the slow proofs."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    return random.Random(seed)


def digest(state: Any) -> str:
    """Return a digest of exact numbers."""
    return hashlib.sha256(repr(_plain(state)).encode()).hexdigest()


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_plain(value) for value in state]
    return [str(state.dtype), state.tolist()] if hasattr(state, "tolist") else state


def equal_but_for_stops(rows: Sequence[tuple[Any, ...]], straight: Sequence[tuple[Any, ...]], stops: int) -> None:
    """Assert that training rows, which begin with their steps, are those of the straight run.

    A stop between two of its rows splits the second: there is one more, and that one is of fewer batches.
    """
    more = {row[0] for row in rows} - {row[0] for row in straight}
    assert len(more) <= stops
    split = more | {min(row[0] for row in straight if row[0] > step) for step in more}
    assert [row for row in rows if row[0] not in split] == [row for row in straight if row[0] not in split]


def disturb(
    make: Callable[[str], Restarted], rng: random.Random, signals: Sequence[signal.Signals], **how: Any
) -> Restarted:
    """Return a script that was sent these signals, one a start, and then finished; retry one that ends too soon.

    Args:
        make: one in a folder of that name.
        rng: chooses.
        signals: what to send.
        how: as in :meth:`Restarted.disturbed`.
    """
    script, done, begun = make("disturbed"), 0, 0
    while done < len(signals):
        if script.disturbed(rng, signals[done], **how):
            done += 1
        else:
            begun += 1
            assert begun < 20, script.output
            script, done = make(f"disturbed-{begun}"), 0
    script.finish()
    return script

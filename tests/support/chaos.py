"""A master's home with all its processes, and every way to bring them down.

Only processes of this home are ever touched, each known by its id and its start time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from det_core import client
from det_core._standalone.processes import start_time
from det_core.errors import MasterError
from det_core.master.engines import AllocationFolder
from support import chaos_checks, schema
from support.leftovers import processes_of
from support.master_records import RecordReader, parse_answer
from support.processes import until

TRIAL = Path(__file__).with_name("chaos_trial.py")


@dataclass(frozen=True)
class Process:
    """A process, told by its start from a later one of that id."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return start_time(self.pid) == self.started

    def send(self, number: int) -> bool:
        """Send it a signal, and no other process; False: it has ended."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if self.alive:
                signal.pidfd_send_signal(fd, number)
                return True
        except ProcessLookupError:
            pass
        finally:
            os.close(fd)
        return False


class Machine:
    """A master and what runs for it; everything is ended at the end.

    Args:
        folder: for the home and the checkpoints.
        slots: how many trials run at once.
        chance: decides when and what.
        script: what trials run, as ``train.py``.

    Attributes:
        home: the home folder.
        homes: it, and last the one of the machine that runs the trials, if that is another.
        saved: where checkpoints go.
        tokens: the file to which ``chaos_trial`` adds the tokens of its allocations.
        master: the master's process, while it runs.
        seen: every process that was ever seen.
        moments: how many troubles of each kind there were while the experiment went on.
    """

    def __init__(self, folder: Path, slots: int, chance: random.Random, script: Path) -> None:
        self.home, self.saved, self.context = folder / "home", folder / "saved", folder / "context"
        self.tokens = folder / "tokens"
        self.homes = [self.home]
        self.slots, self.chance = slots, chance
        self.context.mkdir(parents=True)
        shutil.copy(script, self.context / "train.py")
        self.master: subprocess.Popen[bytes] | None = None
        self.seen: set[Process] = set()
        self.moments: Counter[str] = Counter()
        self._output = open(folder / "output.txt", "ab")  # noqa: SIM115
        self._session: client.Master | None = None
        self._url = ""

    # The master.

    def spawn(self) -> None:
        """Start a master, and do not wait until it listens."""
        assert self.master is None
        log = self.home / "master.log"
        schema.place(self.home / "master" / "master.db")
        self.master = subprocess.Popen(
            [sys.executable, *self.command(log)],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env={**os.environ, "DET_CORE_HOME": str(self.home)},
        )

    def command(self, log: Path) -> list[str]:
        """Return the command line of the master, less the interpreter."""
        options = ["--home", str(self.home), "--slots", str(self.slots), "--log-file", str(log)]
        return ["-m", "det_core.master", *options]

    def start(self) -> None:
        """Start a master."""
        self.spawn()
        self._url = until(self._listens)
        self._session = client.connect(self._url, token=self._user_token())

    def _user_token(self) -> str:
        return (self.home / "master" / "token").read_text().strip()

    def _listens(self) -> str | None:
        """Return the master's address, or None before it listens."""
        assert self.master is not None and self.master.poll() is None, f"the master ended: {self.last_words()}"
        try:
            told = json.loads((self.home / "master" / "master.json").read_text())
        except (OSError, ValueError):
            return None
        return str(told["url"]) if told["pid"] == self.master.pid else None

    def kill_master(self) -> None:
        """Kill the master with ``kill -9``."""
        assert self.master is not None
        self.master.kill()
        self._gone()

    def stop_master(self) -> None:
        """End the master as a person would."""
        assert self.master is not None
        self.master.send_signal(signal.SIGTERM)
        status = self._gone()
        assert status == 0, f"the master ended with {status}: {self.last_words()}"

    def _gone(self) -> int:
        """Wait for the master's end and return its exit status."""
        assert self.master is not None
        status = self.master.wait()
        self.master = None
        if self._session is not None:
            self._session.close()
        self._session = None
        return status

    def last_words(self) -> str:
        """Return the end of the master's log."""
        parts = [self.home / "master.log", Path(self._output.name)]
        return "\n".join(part.read_text()[-6000:] for part in parts if part.exists())

    # Its processes.

    def processes(self) -> set[Process]:
        """Return all processes here: the master, supervisors, scripts, and whatever these have started."""
        pids = [int(told.split()[0]) for home in self.homes for told in processes_of(home)]
        found = {Process(pid, started) for pid in pids if (started := start_time(pid)) is not None}
        self.seen |= found
        return found

    def those(self, *names: str) -> list[Process]:
        """Return the live processes of allocations in these roles: ``script``, ``supervisor``."""
        found = []
        for path in sorted((self.homes[-1] / "master" / "allocations").glob("*/processes")):
            with contextlib.suppress(OSError, ValueError):
                known: dict[str, Any] = json.loads(path.read_text())
                found += [Process(*known[name]) for name in names if name in known]
        return [process for process in found if process.alive]

    def crash(self) -> None:
        """Kill everything at once, as at a loss of power."""
        held: set[Process] = set()
        while new := self.processes() - held:
            for process in new:
                process.send(signal.SIGSTOP)  # so that none starts another one meanwhile
            held |= new
        for process in held:
            process.send(signal.SIGKILL)
        if self.master is not None:
            self._gone()
        until(lambda: not self.processes())

    def close(self) -> None:
        """End all that is left."""
        self.crash()
        self._output.close()

    # The experiment.

    def create(self, config: Mapping[str, Any]) -> int:
        """Begin an experiment; returns its id."""
        return client.create_experiment(dict(config), self.context, master=self._session).id

    def experiment(self, number: int) -> client.Experiment:
        """Return the experiment, as the running master has it."""
        return client.experiment(number, self._session)

    def goes_on(self, number: int) -> bool:
        """Return whether the experiment has not ended."""
        return not self.experiment(number).ended

    def ended(self, number: int) -> str:
        """Wait for its end, and until everything was put in order; returns its state."""
        state = self.experiment(number).wait()
        until(lambda: asyncio.run(chaos_checks.is_retained(self.reader(number))))
        folders = list((self.home / "master" / "allocations").iterdir())
        until(lambda: all(AllocationFolder(path).has_only_log for path in folders))
        return state

    def begun(self, number: int) -> int:
        """Return the number of allocations so far."""
        return asyncio.run(self._begun(number))

    async def _begun(self, number: int) -> int:
        return sum(trial["trialRunId"] for trial in await self.reader(number).trials())

    def reader(self, number: int) -> RecordReader:
        """Return a reader of the experiment's record."""
        return RecordReader(self._get, self.home / "master" / "master.db", number)

    async def _get(self, path: str) -> Any:
        response = self._ask(path, self._user_token())
        assert response.status_code == 200, response.text
        return parse_answer(response.content)

    def _ask(self, path: str, token: str) -> requests.Response:
        return requests.get(f"{self._url}/api/v1/{path}", headers={"Authorization": f"Bearer {token}"})

    def are_tokens_refused(self) -> bool:
        """Return whether there were tokens of allocations, and none is valid any more."""
        tokens = self.tokens.read_text().split()
        return bool(tokens) and all(self._ask("me", token).status_code == 401 for token in tokens)


@contextlib.contextmanager
def machine(folder: Path, slots: int, seed: int, script: Path = TRIAL) -> Iterator[Machine]:
    """Yield a machine with a running master."""
    made = Machine(folder, slots, random.Random(seed), script)
    try:
        made.start()
        yield made
    finally:
        made.close()


# The troubles. Each leaves a master that runs and an experiment that is active, or has ended.


def pause(m: Machine, number: int) -> bool:
    """Pause the experiment and activate it after a random delay; the master may die in between."""
    try:
        m.experiment(number).pause()
        if m.chance.random() < 0.3:
            m.chance.choice([master, reboot])(m, number)
        time.sleep(m.chance.uniform(0, 0.8))
        m.experiment(number).activate()
    except MasterError as e:
        assert "end" in str(e), e  # it has ended, or is about to
        return False
    return True


def trial(m: Machine, number: int) -> bool:
    """Kill a running trial, or the next one to run at a random moment of its life."""
    while True:
        found = m.those("script")
        if found and m.chance.choice(found).send(signal.SIGKILL):
            return True
        if not m.goes_on(number):
            return False
        until(lambda: m.those("script") or not m.goes_on(number), m.last_words)
        time.sleep(m.chance.uniform(0, 0.4))


def supervisor(m: Machine, number: int) -> bool:
    """Kill supervisors."""
    return any([process.send(signal.SIGKILL) for process in m.those("supervisor")])


def master(m: Machine, number: int) -> bool:
    """Kill the master and start it again, possibly after more kills during its start."""
    m.processes()
    m.kill_master()
    while m.chance.random() < 0.3:
        m.spawn()
        time.sleep(m.chance.uniform(0, 1.5))
        m.kill_master()
    time.sleep(m.chance.choice([0.0, m.chance.uniform(0, 0.6)]))
    m.start()
    return True


def reboot(m: Machine, number: int) -> bool:
    """Let everything die at once, and start a master."""
    m.crash()
    m.start()
    return True


TROUBLES: dict[str, Callable[[Machine, int], bool]] = {
    "pause": pause,
    "trial": trial,
    "master": master,
    "reboot": reboot,
    "supervisor": supervisor,
}


def trouble(m: Machine, number: int, kinds: list[str], longest: float = 0.7) -> None:
    """Make these troubles one after the other as long as the experiment goes on.

    Each comes when a random number of allocations more has begun, so that they are spread over the experiment however
    fast the machine is, and then after ``longest`` seconds at most.
    """
    for kind in kinds:
        begun = m.begun(number) + m.chance.randint(0, 2)
        until(lambda begun=begun: m.begun(number) >= begun or not m.goes_on(number))
        time.sleep(m.chance.uniform(0, longest))
        if not m.goes_on(number):
            return
        m.processes()
        if TROUBLES[kind](m, number):
            m.moments[kind] += 1

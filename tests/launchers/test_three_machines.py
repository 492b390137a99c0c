"""A launcher on each of three machines, and a fault on one of them: what each machine prints, and after how long."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support.frameworks import PYTHON, variables
from support.hosts import ALL_NAMES, SECRET, Hosts
from support.launcher import Launched, launched, write
from support.processes import until

MACHINES = (0, 1, 2)
NAMED = "--hosts", ",".join(f"{name}:1" for name in ALL_NAMES)
WAITS = """
    import time
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def nothing_is_left(three_hosts: Hosts) -> Iterator[None]:
    """After each test nothing but servers runs on any machine."""
    yield
    three_hosts.nothing_left()


class Job:
    """A launcher on each machine, and the lines that each of them has printed, with seconds since :meth:`begin`."""

    def __init__(self, hosts: Hosts, folder: Path, stack: ExitStack) -> None:
        self._hosts = hosts
        self._folder = folder
        self._stack = stack
        self._env = {**variables(), "HOME": str(folder)}
        self._seen: dict[int, int] = {}
        self.launchers: list[Launched] = []
        self.lines: list[tuple[float, int, str]] = []
        """Seconds, machine and line, as they came."""
        self.ended: dict[int, float] = {}
        """Seconds after which each machine's launcher had ended."""
        self.begin()

    def start(self, script: str, *options: str, secret: str = SECRET, python: str = PYTHON, of: str = "torch") -> None:
        """Start the next machine's launcher."""
        module = {"torch": "torch_distributed"}.get(of, of)
        enter = self._hosts.on(len(self.launchers) + 1)
        command = [*enter, python, "-m", f"det_core.launch.{module}", "--grace", "20", *(options or NAMED)]
        env = {**self._env, "DET_CORE_SECRET": secret}
        self.launchers.append(self._stack.enter_context(launched(command, script, folder=self._folder, **env)))

    def wait_until_linked(self) -> None:
        """Wait until all ranks run and the launchers are linked."""
        for launcher in self.launchers:
            launcher.wait_for("ready")
        self.launchers[0].wait_for("linked with 2 other nodes")

    def begin(self) -> None:
        """Count seconds from now on."""
        self._look()
        self.lines.clear()
        self._began = time.monotonic()

    def wait(self) -> list[int]:
        """Wait until all launchers have ended; their statuses."""
        until(self._look, self.words)
        return [launcher.process.returncode for launcher in self.launchers]

    def first(self, machine: int, pattern: str) -> float:
        """Seconds after which a machine printed a line with ``pattern``."""
        for seconds, number, line in self.lines:
            if number == machine and re.search(pattern, line):
                return seconds
        raise AssertionError(f"machine {machine} did not print {pattern!r}:\n{self.words()}")

    def words(self) -> str:
        """What was printed, a line of a table each."""
        rows = [f"| {seconds:.1f} | {number} | {line} |" for seconds, number, line in self.lines]
        return "\n".join([*rows, f"ended after {self.ended}"])

    def _look(self) -> bool:
        for number, launcher in enumerate(self.launchers):
            has_ended = launcher.process.poll() is not None
            lines = launcher.err.splitlines()
            new = lines[self._seen.get(number, 0) :]
            self._seen[number] = len(lines)
            seconds = time.monotonic() - self._began
            self.lines += [(seconds, number, line.removeprefix("[launcher] ")) for line in new]
            if has_ended:
                self.ended.setdefault(number, seconds)
        return len(self.ended) == len(self.launchers)


@contextmanager
def on_three(hosts: Hosts, folder: Path) -> Iterator[Job]:
    """A job on three machines; killed at the end."""
    with ExitStack() as stack:
        job = Job(hosts, folder, stack)
        yield job
        print(job.words())


def end_of_unplugged(hosts: Hosts, folder: Path, unplugged: int) -> None:
    """Pull one machine's cable: all end within ten seconds and name a machine that is lost."""
    with on_three(hosts, folder) as job:
        for _ in MACHINES:
            job.start(write(folder, "waits.py", WAITS))
        job.wait_until_linked()
        hosts.cut(unplugged + 1)
        job.begin()
        try:
            assert job.wait() == [1, 1, 1]
        finally:
            hosts.mend(unplugged + 1)
    for machine in MACHINES:
        # Machine 0 loses both others where it is unplugged itself, and which one first is chance.
        lost = {0: "[12]"}.get(machine, "0") if unplugged in (0, machine) else str(unplugged)
        seconds = job.first(machine, f"^node {lost} .* was lost: .*: the job ends here too")
        assert seconds == job.first(machine, "(lost|failed)"), "nothing else is named before"
        assert job.ended[machine] < 12, "ten seconds, and what this machine has to do besides"


def end_of_fault(hosts: Hosts, folder: Path, machine: int, changes: Mapping[str, str], options: list[str]) -> Job:
    """Start a job of which one machine's launcher differs, and wait until all have ended."""
    script = write(folder, "waits.py", WAITS)
    with on_three(hosts, folder) as job:
        for number in MACHINES:
            if number == machine:
                arguments = {"script": script, **changes}
                job.start(arguments.pop("script"), *NAMED, *options, **arguments)
            else:
                job.start(script, *NAMED, "--link-timeout", "12", **{"of": changes.get("of", "torch")})
        job.wait()
    return job


def test_machine_that_is_unplugged_is_named_and_ends_all_within_ten_seconds(three_hosts: Hosts, tmp_path: Path) -> None:
    end_of_unplugged(three_hosts, tmp_path, 2)


def test_script_missing_on_one_machine_ends_all_with_its_name(three_hosts: Hosts, tmp_path: Path) -> None:
    job = end_of_fault(three_hosts, tmp_path, 2, {"script": "nowhere.py"}, [])
    assert [launcher.process.returncode for launcher in job.launchers] == [2, 2, 2]
    for machine in MACHINES:
        job.first(machine, r"node 2 \(node3\) could not start: the script nowhere.py does not exist")


def test_rank_that_fails_is_named_at_once_on_each_machine(three_hosts: Hosts, tmp_path: Path) -> None:
    """Although a rank on another machine takes its time to end."""
    script = """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), sys.exit(0)))
        print("ready", flush=True)
        while not os.path.exists("go") or os.environ["RANK"] != "1":
            time.sleep(0.02)
        sys.exit(7)
    """
    with on_three(three_hosts, tmp_path) as job:
        for _ in MACHINES:
            job.start(write(tmp_path, "fails.py", script))
        job.wait_until_linked()
        (tmp_path / "go").touch()
        job.begin()
        assert job.wait() == [7, 7, 7]
    for machine in MACHINES:
        after = job.first(machine, r"rank 1 \(.*host node2\) failed first, with status 7")
        if machine != 1:
            assert job.first(machine, r"rank 1 \(.*host node2\) failed with status 7: the job ends here too") < after


def test_sigterm_to_the_first_machine_alone_ends_all_without_internals(three_hosts: Hosts, tmp_path: Path) -> None:
    with on_three(three_hosts, tmp_path) as job:
        for _ in MACHINES:
            job.start(write(tmp_path, "waits.py", WAITS))
        job.wait_until_linked()
        job.begin()
        os.kill(job.launchers[0].pid, signal.SIGTERM)
        assert job.wait() == [128 + signal.SIGTERM] * 3
    for machine in (1, 2):
        job.first(machine, r"rank 0 \(.*host node1\) was killed by SIGTERM: the job ends here too")
    assert not re.search("asyncio|Task|Cancelled|Traceback|Error|link to other machines", job.words()), job.words()

"""A launcher on each of three nodes, and a fault on one of them: notices of each node, with their time."""

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

NODES = (0, 1, 2)
NAMED = "--hosts", ",".join(f"{name}:1" for name in ALL_NAMES)
WAITS = """
    import time
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def nothing_is_left(three_hosts: Hosts) -> Iterator[None]:
    """Check after each test that only servers run on any node."""
    yield
    three_hosts.nothing_left()


class Job:
    """Launchers of three nodes, and the lines that each has printed, with seconds since :meth:`begin`."""

    def __init__(self, hosts: Hosts, folder: Path, stack: ExitStack) -> None:
        self._hosts = hosts
        self._folder = folder
        self._stack = stack
        self._env = {**variables(), "HOME": str(folder)}
        self._seen: dict[int, int] = {}
        self.launchers: list[Launched] = []
        self.lines: list[tuple[float, int, str]] = []
        """Seconds, node and line, in the order of arrival."""
        self.ended: dict[int, float] = {}
        """Seconds after which each node's launcher had ended."""
        self.begin()

    def start(self, script: str, *options: str, secret: str = SECRET, python: str = PYTHON, of: str = "torch") -> None:
        """Start the next node's launcher."""
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
        """Wait until all launchers have ended, and return their statuses."""
        until(self._look, self.words)
        return [launcher.process.returncode for launcher in self.launchers]

    def first(self, machine: int, pattern: str) -> float:
        """Return the seconds after which a node printed a line with ``pattern``."""
        for seconds, number, line in self.lines:
            if number == machine and re.search(pattern, line):
                return seconds
        raise AssertionError(f"node {machine} did not print {pattern!r}:\n{self.words()}")

    def words(self) -> str:
        """Return everything that was printed, as rows of a table."""
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
    """Yield a job on three nodes, and kill it at the end."""
    with ExitStack() as stack:
        job = Job(hosts, folder, stack)
        yield job
        print(job.words())


def end_of_unplugged(hosts: Hosts, folder: Path, unplugged: int) -> None:
    """Unplug one node: all end within ten seconds and name a lost node."""
    with on_three(hosts, folder) as job:
        for _ in NODES:
            job.start(write(folder, "waits.py", WAITS))
        job.wait_until_linked()
        hosts.cut(unplugged + 1)
        job.begin()
        try:
            assert job.wait() == [1, 1, 1]
        finally:
            hosts.mend(unplugged + 1)
    for machine in NODES:
        # Node 0 loses both others if it is unplugged itself, in any order.
        lost = {0: "[12]"}.get(machine, "0") if unplugged in (0, machine) else str(unplugged)
        seconds = job.first(machine, f"^node {lost} .* was lost: .*: the job ends here too")
        assert seconds == job.first(machine, "(lost|failed)"), "nothing else is named before"
        assert job.ended[machine] < 12, "ten seconds, and the load of the machine that runs this"


def end_of_fault(hosts: Hosts, folder: Path, machine: int, changes: Mapping[str, str], options: list[str]) -> Job:
    """Start a job in which one node's launcher differs, and wait until all have ended."""
    script = write(folder, "waits.py", WAITS)
    with on_three(hosts, folder) as job:
        for number in NODES:
            if number == machine:
                arguments = {"script": script, **changes}
                job.start(arguments.pop("script"), *NAMED, *options, **arguments)
            else:
                job.start(script, *NAMED, "--link-timeout", "12", **{"of": changes.get("of", "torch")})
        job.wait()
    return job


def test_unplugged_node_is_named_and_ends_all_within_ten_seconds(three_hosts: Hosts, tmp_path: Path) -> None:
    end_of_unplugged(three_hosts, tmp_path, 2)


def test_script_missing_on_one_node_ends_all_with_its_name(three_hosts: Hosts, tmp_path: Path) -> None:
    job = end_of_fault(three_hosts, tmp_path, 2, {"script": "nowhere.py"}, [])
    assert [launcher.process.returncode for launcher in job.launchers] == [2, 2, 2]
    for machine in NODES:
        job.first(machine, r"node 2 \(node3\) could not start: the script nowhere.py does not exist")


def test_failed_rank_is_named_at_once_on_each_node(three_hosts: Hosts, tmp_path: Path) -> None:
    """Although a rank on another node takes its time to end."""
    script = """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), sys.exit(0)))
        print("ready", flush=True)
        while not os.path.exists("go") or os.environ["RANK"] != "1":
            time.sleep(0.02)
        sys.exit(7)
    """
    with on_three(three_hosts, tmp_path) as job:
        for _ in NODES:
            job.start(write(tmp_path, "fails.py", script))
        job.wait_until_linked()
        (tmp_path / "go").touch()
        job.begin()
        assert job.wait() == [7, 7, 7]
    for machine in NODES:
        after = job.first(machine, r"rank 1 \(.*host node2\) failed first, with status 7")
        if machine != 1:
            assert job.first(machine, r"rank 1 \(.*host node2\) failed with status 7: the job ends here too") < after


def test_sigterm_to_node_0_alone_ends_all_without_internals(three_hosts: Hosts, tmp_path: Path) -> None:
    with on_three(three_hosts, tmp_path) as job:
        for _ in NODES:
            job.start(write(tmp_path, "waits.py", WAITS))
        job.wait_until_linked()
        job.begin()
        os.kill(job.launchers[0].pid, signal.SIGTERM)
        assert job.wait() == [128 + signal.SIGTERM] * 3
    for machine in (1, 2):
        job.first(machine, r"rank 0 \(.*host node1\) was killed by SIGTERM: the job ends here too")
    assert not re.search("asyncio|Task|Cancelled|Traceback|Error|link to other nodes", job.words()), job.words()

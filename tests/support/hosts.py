"""Two or three machines on one: network namespaces with addresses, host names and an SSH server of their own.

They share nothing of the network with this machine or with each other but a switch, so every port is free there.
Files of their own lie over ``/etc/hosts`` and ``/etc/ssh``: that is how each knows the other's name and key.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from det_core._standalone.processes import set_parent_death_signal
from support import nest
from support.processes import until
from support.servers import MARK

ALL_NAMES = ("node1", "node2", "node3")
"""Names of all machines that can be created."""
ALL_ADDRESSES = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
NAMES = ALL_NAMES[:2]
ADDRESSES = ALL_ADDRESSES[:2]
IPV6_NAMES = ("six1", "six2", "six3")
"""Names that have no IPv4 address."""
IPV6_ADDRESSES = ("fd79::1", "fd79::2", "fd79::3")
HAS_IPV6 = Path("/proc/net/if_inet6").exists()
SECRET = f"a secret of two machines, made by {os.getpid()}"
"""Another one in each worker: ranks of one machine meet in /tmp, which all of these share, by their job's secret."""
PROGRAMS = ("ip", "nsenter", "unshare", "sshd", "ssh", "ssh-keygen")
_PREFIX = "detcore"
_AS_HOST = 'hostname "$1" && mount --bind "$0/hosts" /etc/hosts && mount --bind "$0/ssh" /etc/ssh && shift && exec "$@"'
_SSH = """
Host *
    IdentityFile /etc/ssh/id
    StrictHostKeyChecking accept-new
    UserKnownHostsFile {folder}/known
    BatchMode yes
    LogLevel ERROR
    ConnectTimeout 10
"""
_SSHD = """
ListenAddress {address}
HostKey /etc/ssh/id
AuthorizedKeysFile /etc/ssh/id.pub
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PidFile none
MaxStartups 100
MaxSessions 100
"""


def missing() -> str | None:
    """Return why machines cannot be created here, None if they can."""
    if os.geteuid() != 0:
        return "network namespaces can only be made by root"
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"{', '.join(absent)} not installed: apt-get install iproute2 openssh-server (or `make ci`)"
    return None


class Hosts:
    """Machines, up from construction to :meth:`close`.

    Args:
        folder: where what belongs to them is kept.
        count: how many, 2 or 3.
    """

    def __init__(self, folder: Path, count: int = 2) -> None:
        _sweep()
        self.folder = folder
        self.numbers = range(1, count + 1)
        self._servers: list[subprocess.Popen[bytes]] = []
        prefix = f"{_PREFIX}-{os.getpid()}-{count}"
        self._spaces = [f"{prefix}-{name}" for name in ALL_NAMES[:count]]
        self._switch = f"{prefix}-switch"
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        for space in (self._switch, *self._spaces):
            _run("ip", "netns", "add", space)
        _run("ip", "-n", self._switch, "link", "add", "switch", "up", "type", "bridge")
        key = self.folder / "id"
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        names = [*zip(ALL_ADDRESSES, ALL_NAMES, strict=True), *zip(IPV6_ADDRESSES, IPV6_NAMES, strict=True)]
        for number, space in zip(self.numbers, self._spaces, strict=True):
            address = ALL_ADDRESSES[number - 1]
            cable = ["type", "veth", "peer", "name", f"port{number}", "netns", self._switch]
            _run("ip", "-n", space, "link", "add", "eth0", *cable)
            _run("ip", "-n", self._switch, "link", "set", f"port{number}", "master", "switch", "up")
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            if HAS_IPV6:  # at once, without a look whether somebody else has the address
                _run("ip", "-n", space, "addr", "add", f"{IPV6_ADDRESSES[number - 1]}/64", "dev", "eth0", "nodad")
            for link in ("lo", "eth0"):
                _run("ip", "-n", space, "link", "set", link, "up")
            etc = self._etc(space)
            (etc / "ssh").mkdir(parents=True)
            lines = ["127.0.0.1 localhost", *map(" ".join, names)]
            (etc / "hosts").write_text("".join(line + "\n" for line in lines))
            for path in (key, key.with_suffix(".pub")):
                shutil.copy(path, etc / "ssh")
            (etc / "ssh" / "ssh_config").write_text(_SSH.format(folder=self.folder))
            (etc / "ssh" / "sshd_config").write_text(_SSHD.format(address=address))
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd does not start without it
        for number in self.numbers:  # sshd writes over its variables, so what carries the mark is one that waits for it
            sshd = ("unshare", "--fork", "--kill-child", shutil.which("sshd") or "", "-D")
            self._servers.append(self.serve(number, *sshd))
        for number in self.numbers:
            self._wait_for_ssh(number)

    def on(self, number: int) -> list[str]:
        """Return the words that, before a command, run it on a machine, numbered from 1; they keep the process."""
        space, name = self._spaces[number - 1], ALL_NAMES[number - 1]
        enter = ["nsenter", f"--net=/run/netns/{space}", "unshare", "--uts", "--mount"]
        return [*enter, "sh", "-c", _AS_HOST, str(self._etc(space)), name]

    def run(self, number: int, *command: str) -> str:
        """Run a command on a machine and return its output."""
        return _run(*self.on(number), *command)

    def serve(self, number: int, *command: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a process that runs on a machine until the machine is switched off."""
        with (self.folder / f"server-{number}.log").open("ab") as log:
            server = subprocess.Popen(
                [*self.on(number), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **(env or {}), MARK: "1"},
                preexec_fn=lambda: set_parent_death_signal(signal.SIGKILL),  # with this process, also if it is killed
            )
        nest.keep(server.pid)
        return server

    def processes(self, number: int) -> dict[int, str]:
        """Return the command lines of a machine's processes except its servers, by process ID."""
        found = {}
        for pid in map(int, _run("ip", "netns", "pids", self._spaces[number - 1]).split()):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if command and "sshd -D" not in command and f"{MARK}=1" not in _variables(pid):
                    found[pid] = command.strip()
        return found

    def nothing_left(self) -> None:
        """Wait until only servers run on any machine."""

        def left() -> dict[int, str]:
            return {pid: command for number in self.numbers for pid, command in self.processes(number).items()}

        until(lambda: not left(), lambda: f"left behind: {left()}")

    def listening(self, number: int) -> dict[int, str]:
        """Return the TCP ports that a machine opens to others, each with its address."""
        found = {}
        for name in ("tcp", "tcp6"):
            for line in self.run(number, "cat", f"/proc/net/{name}").splitlines()[1:]:
                address, state = line.split()[1], line.split()[3]
                host, port = address.split(":")
                loopback = host.endswith("0100007F") or host == "0" * 24 + "01000000"
                if state == "0A" and not loopback:
                    found[int(port, 16)] = host
        return found

    def cut(self, number: int = 2) -> None:
        """Unplug a machine from the switch."""
        _run("ip", "-n", self._switch, "link", "set", f"port{number}", "down")

    def mend(self, number: int = 2) -> None:
        """Plug it in again, and wait until all machines reach each other."""
        _run("ip", "-n", self._switch, "link", "set", f"port{number}", "up")
        until(lambda: "state UP" in _run("ip", "-n", self._spaces[number - 1], "link", "show", "eth0"))
        for space in self._spaces:  # the kernel remembers for a while that it has found nobody at an address
            _run("ip", "-n", space, "neigh", "flush", "all")

    def _etc(self, space: str) -> Path:
        return self.folder / space

    def close(self) -> None:
        """Switch all off, which kills their processes."""
        for space in (*self._spaces, self._switch):
            _remove(space)
        for server in self._servers:
            server.wait()

    def _wait_for_ssh(self, number: int) -> None:
        log = self.folder / f"server-{number}.log"
        until(
            lambda: 22 in self.listening(number),
            lambda: log.read_text(errors="replace"),
            of=self._servers[number - 1],
        )


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Yield two machines for all tests."""
    with switched_on(tmp_path_factory.mktemp("hosts")) as machines:
        yield machines


@pytest.fixture(scope="session")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Yield three machines for all tests."""
    with switched_on(tmp_path_factory.mktemp("hosts"), 3) as machines:
        yield machines


@contextlib.contextmanager
def switched_on(folder: Path, count: int = 2) -> Iterator[Hosts]:
    """Create machines for as long as the block runs."""
    if reason := missing():
        skip_or_fail(reason)
    machines = Hosts(folder, count)
    try:
        yield machines
    finally:
        machines.close()


def skip_or_fail(reason: str) -> None:
    """Skip a test because something is not installed; fail it in CI, where everything is."""
    if os.environ.get("CI"):
        pytest.fail(f"this is CI, and {reason}")
    pytest.skip(reason)


def _sweep() -> None:
    """Remove the machines of test runs that were killed."""
    for line in _run("ip", "netns", "list").splitlines():
        space = line.split()[0]
        if space.startswith(f"{_PREFIX}-") and not Path(f"/proc/{space.split('-')[1]}").exists():
            _remove(space)


def _remove(space: str) -> None:
    for _ in range(20):  # what is killed may just have started another
        pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout.split()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if not pids:
            break
        time.sleep(0.1)
    subprocess.run(["ip", "netns", "del", space], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _variables(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")


def _run(*command: str) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, f"{' '.join(command)}: status {done.returncode}\n{done.stdout[-3000:]}"
    return done.stdout

"""Ceph's S3 server on this machine, for the tests and the benchmark: one monitor, one OSD, one gateway.

Everything lies in one folder and listens on free ports of 127.0.0.1; nothing is left when :class:`Gateway` is closed.
Measured: 10 s to start, 0.3 GB of disk. Ceph's own guide to this layout:
https://docs.ceph.com/en/pacific/install/manual-deployment/
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path

from support import nest
from support.processes import free_port

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
KEY, SECRET = "testkey", "testsecret"
CONFIG = """
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon}
public network = 127.0.0.0/8
ms bind port min = 6800
ms bind port max = 7568
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd crush chooseleaf type = 0
osd crush update on start = true
osd objectstore = {objectstore}
osd memory target = 1073741824
osd max object name len = 1024
bluestore block size = 21474836480
bluestore fsck on mount = false
memstore device bytes = 12884901888
mon allow pool size one = true
mon warn on pool no redundancy = false
mon max pg per osd = 1000
mon data avail crit = 1
mon data avail warn = 1
rgw frontends = beast endpoint=127.0.0.1:{rgw} tcp_nodelay=1
rgw data = {folder}/rgw
rgw dns name = localhost
rgw enable usage log = false
rgw enable gc threads = true
rgw gc obj min wait = 1
rgw gc processor period = 5
rgw gc processor max time = 5
run dir = {folder}
admin socket = {folder}/$name.asok
pid file = {folder}/$name.pid
log file = {folder}/$name.log
crash dir = {folder}/crash
keyring = {folder}/keyring
mon data = {folder}/mon
osd data = {folder}/osd.$id
"""


class GatewayFailed(Exception):
    """The server did not start; the message has the last lines of what failed."""


def missing() -> str | None:
    """Return the reason why the server cannot run here; None if it can."""
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"{', '.join(absent)} not installed: apt-get install ceph-mon ceph-osd radosgw (or `make ci`)"
    return None


class Gateway:
    """A running server.

    Args:
        folder: where to keep it; default: a temporary folder, removed at the end.
        objectstore: ``memstore`` keeps objects in memory, ``bluestore`` in a file.
        environment: variables for its processes.
    """

    def __init__(
        self,
        folder: Path | None = None,
        objectstore: str = "bluestore",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._environment = {**os.environ, **(environment or {})}
        # A unix socket's path has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="rgw-", dir=folder or "/tmp"))
        self._processes: list[subprocess.Popen[bytes]] = []
        mon, self.port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        text = CONFIG.format(fsid=uuid.uuid4(), folder=self.folder, mon=mon, rgw=self.port, objectstore=objectstore)
        (self.folder / "ceph.conf").write_text(text)
        try:
            self._start(mon)
        except BaseException:
            self.close()
            raise

    def _start(self, mon: int) -> None:
        for name in ("mon", "osd.0", "rgw", "crash"):
            (self.folder / name).mkdir()
        fsid = (self.folder / "ceph.conf").read_text().split("fsid = ")[1].split()[0]
        keyring, monmap = str(self.folder / "keyring"), str(self.folder / "monmap")
        self._run("ceph-authtool", "--create-keyring", keyring)
        for name in ("mon.", "client.admin", "osd.0", "client.rgw"):
            may_all = [word for daemon in ("mon", "osd", "mgr") for word in ("--cap", daemon, "allow *")]
            self._run("ceph-authtool", keyring, "--gen-key", "-n", name, *may_all)
        self._run("monmaptool", "--create", "--addv", "a", f"[v2:127.0.0.1:{mon}]", "--fsid", fsid, monmap)
        self._ceph("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self._serve("ceph-mon", "-i", "a")
        osd = str(uuid.uuid4())
        self._ceph("ceph", "osd", "new", osd)
        self._ceph("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._serve("ceph-osd", "-i", "0")
        self._serve("radosgw", "-n", "client.rgw")
        self._wait_for_gateway()
        self.add_user("test", KEY, SECRET)

    def add_user(self, name: str, key: str, secret: str, *options: str) -> None:
        """Make a user of the gateway; ``options`` as radosgw-admin takes them (``--op-mask=read``)."""
        who = (f"--uid={name}", f"--display-name={name}", f"--access-key={key}", f"--secret-key={secret}")
        self._ceph("radosgw-admin", "-n", "client.admin", "user", "create", *who, *options)

    def close(self) -> None:
        """End every process and remove the folder."""
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ceph(self, program: str, *words: str) -> None:
        self._run(program, "-c", str(self.folder / "ceph.conf"), *words)

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            raise GatewayFailed(f"{' '.join(command)}: {done.stdout[-2000:].decode(errors='replace')}")

    def _serve(self, program: str, *words: str) -> None:
        """Start a daemon in the foreground of a session of its own, so that it is ours to end."""
        with (self.folder / f"{program}.out").open("wb") as out:
            command = [program, "-c", str(self.folder / "ceph.conf"), "-f", *words]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=self.folder,
                env=self._environment,
                preexec_fn=nest.end_with_parent,
            )
        nest.keep(process.pid)
        self._processes.append(process)

    def _wait_for_gateway(self) -> None:
        while True:
            try:
                urllib.request.urlopen(self.url).close()
                return
            except urllib.error.HTTPError as e:
                e.close()
                return
            except OSError:
                ended = next((p for p in self._processes if p.poll() is not None), None)
                if ended is not None:
                    raise GatewayFailed(self._last_words()) from None
                time.sleep(0.1)

    def _last_words(self) -> str:
        files = [*self.folder.glob("*.out"), *self.folder.glob("*.log")]
        return "\n".join(f"{f.name}: {f.read_bytes()[-1000:].decode(errors='replace')}" for f in files)

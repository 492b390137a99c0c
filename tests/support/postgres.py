"""PostgreSQL on this machine, for the tests: one cluster in a folder of its own, on a free port of 127.0.0.1.

It starts in a second, and nothing is left when :class:`Postgres` is closed. It does not wait for the disk: what the
tests kill is the master, never the database.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import nest
from support.processes import free_port
from support.servers import MARK

USER = "postgres"
SETTINGS = {"fsync": "off", "full_page_writes": "off", "max_connections": "50", "shared_buffers": "64MB"}


class PostgresFailed(Exception):
    """The server did not start; the message has its last lines."""


def programs() -> Path | None:
    """Return the directory of the server's programs, of the newest version installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name))
    if found:
        return found[-1]
    beside = shutil.which("initdb")
    return Path(beside).parent if beside else None


def missing() -> str | None:
    """Return the reason why the server cannot run here; None if it can."""
    if programs() is None:
        return "PostgreSQL is not installed: apt-get install postgresql-15 (or `make ci`)"
    if os.geteuid() == 0 and not any(user.pw_name == USER for user in pwd.getpwall()):
        return f"PostgreSQL does not run as root, and user {USER} does not exist here"
    return None


class Postgres:
    """A running server."""

    def __init__(self) -> None:
        found = programs()
        assert found is not None
        self._programs = found
        # A unix socket's path has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def new_schema(self) -> str:
        """Make an empty schema and return its URL; a database of its own would be a thousand files each."""
        name = f"test_{uuid.uuid4().hex[:12]}"
        self.execute(f"CREATE SCHEMA {name}")
        return f"postgresql://{USER}@127.0.0.1:{self.port}/postgres?options=-csearch_path%3D{name}"

    def execute(self, statement: str) -> list[Any]:
        """Run a statement as the server's administrator, and return its rows."""
        import psycopg

        with psycopg.connect(
            f"host=127.0.0.1 port={self.port} user={USER} dbname=postgres", autocommit=True
        ) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        """Stop it and remove its folder."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)  # at once: nothing in it is wanted any more
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        user = USER if os.geteuid() == 0 else None
        if user is not None:
            shutil.chown(self.folder, user)
        data = self.folder / "data"
        command = [
            str(self._programs / "initdb"),
            "-D",
            str(data),
            "-U",
            USER,
            "-A",
            "trust",
            "--no-sync",
            "-E",
            "UTF8",
        ]
        environment = {**os.environ, "LC_ALL": "C.UTF-8", MARK: "1"}
        done = subprocess.run(
            command,
            user=user,
            extra_groups=[] if user else None,
            cwd=self.folder,
            env=environment,
            capture_output=True,
        )
        if done.returncode:
            raise PostgresFailed(done.stderr[-2000:].decode(errors="replace"))
        settings = [word for name, value in SETTINGS.items() for word in ("-c", f"{name}={value}")]
        serve = ["-D", str(data), "-h", "127.0.0.1", "-p", str(self.port), "-k", str(self.folder), *settings]
        with (self.folder / "out").open("wb") as out:
            self._process = subprocess.Popen(
                [str(self._programs / "postgres"), *serve],
                user=user,
                extra_groups=[] if user else None,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=nest.end_with_parent,
            )
        nest.keep(self._process.pid)
        self._wait()

    def _wait(self) -> None:
        import psycopg

        while True:
            try:
                self.execute("SELECT 1")
                return
            except psycopg.OperationalError:
                assert self._process is not None
                if self._process.poll() is not None:
                    raise PostgresFailed((self.folder / "out").read_text(errors="replace")[-2000:]) from None
                time.sleep(0.05)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """Yield a server for the whole session."""
    if reason := missing():
        if os.environ.get("CI"):
            pytest.fail(f"this is CI, and {reason}")
        pytest.skip(reason)
    server = Postgres()
    try:
        yield server
    finally:
        server.close()

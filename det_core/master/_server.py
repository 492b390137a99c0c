"""The process of a master, from its start to its end.

Whatever happens to this process, what it has answered is in the store, and trials go on: they are processes of their
own. The next master finds them, at the port where they look for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import det_core
from det_core._env import Environment
from det_core._notices import write_quietly
from det_core._optional import require
from det_core.errors import DetCoreError
from det_core.master._home import HomeFiles, reachable
from det_core.master._options import Options, parse

if TYPE_CHECKING:
    from det_core.master.engines import Engine
    from det_core.master.service import ServiceState

LOG = logging.getLogger("det_core.master")
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LOG_FILE_BYTES = 5 << 20
"""Size from which a new log file is begun, in bytes."""
MAX_OLD_LOG_FILES = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run a master until SIGTERM or SIGINT.

    Args:
        argv: Arguments after the program's name. Defaults to those of this process.

    Returns:
        0 after an ordered stop; 1 if the master cannot be started or loses its database, with the reason on stderr.
    """
    options = parse(argv)
    try:
        options.check()
        HomeFiles(options.folder).prepare()  # the log is to lie there
        write_log(options.log_file)
        for package in ("fastapi", "uvicorn"):
            require(package, extra="master", purpose="a master")
        run(options)
    except (DetCoreError, OSError) as e:
        write_quietly(f"det_core.master: error: {e}\n", sys.stderr)
        return 1
    return 0


def run(options: Options, engine: Engine | None = None) -> None:
    """Be the master of a home directory until a signal ends it.

    Args:
        options: Options of the master.
        engine: Engine that runs trials. Defaults to this machine.

    Raises:
        StoreLocked: If there is another master of this directory, or on this database.
        StoreError: If the database cannot be used.
        OSError: If the address cannot be bound.
    """
    from det_core.master.store._database import FileLock

    files = HomeFiles(options.folder)
    files.prepare()
    with contextlib.ExitStack() as stack:
        # Before the address: of two masters that start at once, one must end without having answered.
        lock = FileLock(options.folder)
        stack.callback(lock.release)
        listener = stack.enter_context(files.bind(options.host, options.port))
        stack.callback(files.withdraw)
        received = stack.enter_context(_received_signals())
        asyncio.run(_serve(options, files, listener, engine, received))


async def _serve(
    options: Options, files: HomeFiles, listener: socket.socket, engine: Engine | None, received: list[int]
) -> None:
    from det_core.master.api import create_app

    port = int(listener.getsockname()[1])
    last_slots = files.last_slots() if options.slots is None else None
    chosen_slots = options.slots
    options = replace(
        options,
        slots=chosen_slots if last_slots is None else last_slots,
        master_url=f"http://{reachable(options.host)}:{port}",
        cluster_id=files.cluster_id(),
    )
    async with _service(options, engine, files) as (service, keeper):
        app = create_app(service, files.token(options.token_file), hosts=[options.host, *options.allow_hosts])

        def on_listening() -> bool:
            if chosen_slots is not None:
                files.keep_slots(chosen_slots)
            files.announce(
                options.master_url,
                port,
                options.cluster_id,
                host=options.host,
                slots_as_last_time=last_slots is not None,
            )
            LOG.info("det_core %s is the master of %s at %s", det_core.__version__, options.home, options.master_url)
            return not received

        gc.freeze()  # what is there now stays: no need ever to look at it
        gc.enable()
        await _answer_requests(app, listener, on_listening, keeper)
        LOG.info("stopped; trials go on")


@contextlib.asynccontextmanager
async def _service(
    options: Options, engine: Engine | None, files: HomeFiles
) -> AsyncIterator[tuple[ServiceState, asyncio.Task[None]]]:
    """Start the service with its store and its engine, and stop it at the end.

    Args:
        options: Options of the master.
        engine: Engine, or None for this machine.
        files: Files of the home directory.

    Yields:
        The service, and the task that keeps the lock of the database.
    """
    from det_core.master.engines import LocalEngine, Slots
    from det_core.master.service import ServiceState, _lifecycle
    from det_core.master.store import Store

    store = Store.open(
        options.database or f"sqlite:///{options.folder / 'master.db'}",
        lambda: files.check_new(start_new=options.start_new),
        options.allocations,
    )
    keeper = asyncio.create_task(store.keep_lock(), name="det_core master: lock of the database")
    try:
        if engine is None:
            slots = Slots.find(options.slots, visible=Environment.read().cuda_visible_devices)
            engine = LocalEngine(options.home, slots)
        service = ServiceState(store, engine, options)
        try:
            await _lifecycle.start(service)
            yield service, keeper
        finally:
            await _lifecycle.stop(service)
            await engine.close()
    finally:
        keeper.cancel()
        await store.close()


async def _answer_requests(
    app: Any, listener: socket.socket, on_listening: Callable[[], bool], keeper: asyncio.Task[None]
) -> None:
    """Answer requests until a signal comes or the lock of the database is lost; then let those under way end.

    Args:
        app: Application.
        listener: Listening socket.
        on_listening: Called when the first request can come; returns whether to wait for a signal, or to stop at once.
        keeper: Task that keeps the lock of the database.

    Raises:
        StoreLocked: If another master has taken the database.
    """
    import uvicorn

    from det_core.master.api import raise_open_file_limit, server_config

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            # A signal came while it started.
            if not on_listening():
                self.should_exit = True

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # Long polls would keep uvicorn from ending.
            app.state.service.subscriptions.close()
            await super().shutdown(sockets)

    raise_open_file_limit()
    server = Server(server_config(app))

    def on_keeper_end(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            server.should_exit = True

    keeper.add_done_callback(on_keeper_end)
    await server.serve([listener])
    if keeper.done():
        keeper.result()


@contextlib.contextmanager
def _received_signals() -> Iterator[list[int]]:
    """Yield the signals to stop that came before the server listened, or after it had stopped.

    uvicorn raises the signal that stopped it again when it has stopped, and there is more to close then.
    """
    received: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        received.append(number)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_log(file: Path | None) -> None:
    """Have the root logger, stdout and stderr of this process write to ``file``, or the logger to stderr for None."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr) if file is None else _OutputFile(file)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for chatty in ("uvicorn.error", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


class _OutputFile(RotatingFileHandler):
    """Log of bounded size, which also gets what others write to the file descriptors 1 and 2."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, maxBytes=LOG_FILE_BYTES, backupCount=MAX_OLD_LOG_FILES, encoding="utf-8")
        self._redirect()

    def doRollover(self) -> None:
        super().doRollover()
        self._redirect()

    def _redirect(self) -> None:
        assert self.stream is not None
        for descriptor in (1, 2):
            # What libraries and crashes print there is in the log, too.
            os.dup2(self.stream.fileno(), descriptor)

"""The server: one home folder's master, from its start to its end.

Whatever happens to this process, what it has answered is in the store, and trials go on: they are processes of their
own. A master that is started again finds them, at the port where they look for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import det_core
from det_core._env import Environment
from det_core._notices import write_quietly
from det_core._optional import require
from det_core.errors import DetCoreError
from det_core.master._home import HomeFiles, reachable
from det_core.master._log import write_log
from det_core.master._options import Options, parse

if TYPE_CHECKING:
    from det_core.master._settings import MasterSettings
    from det_core.master.engines import Engine
    from det_core.master.service import ServiceState

LOG = logging.getLogger("det_core.master")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a master until SIGTERM or SIGINT.

    Args:
        argv: the arguments after the program's name; None: those of this process.

    Returns:
        0 after a stop that was asked for; 1 if the master could not be started, with the reason on stderr.
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
    """Be the master of a home folder until a signal ends it.

    Args:
        options: how.
        engine: what runs trials; None: this machine.

    Raises:
        StoreLocked: there is another master of this home, or on this database.
        StoreError: the database cannot be used.
        OSError: the address cannot be had.
    """
    from det_core.master.store._database import FileLock

    files = HomeFiles(options.folder)
    files.prepare()
    lock = FileLock(options.folder)
    try:
        bound = files.bind(options.host, options.port)
        try:
            with _signals() as told:
                _on_a_loop(_serve(options, files, bound, engine, told))
        finally:
            files.withdraw()
            bound.close()
    finally:
        lock.release()


async def _serve(
    options: Options, files: HomeFiles, bound: socket.socket, engine: Engine | None, told: list[int]
) -> None:
    from det_core.master._settings import MasterSettings
    from det_core.master.api import create_app

    port = int(bound.getsockname()[1])
    url = f"http://{reachable(options.host)}:{port}"
    settings = MasterSettings(home=options.home, master_url=url, cluster_id=files.cluster_id())
    kept = files.last_slots() if options.slots is None else None
    slots = options.slots if kept is None else kept
    lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    async with _service(replace(options, slots=slots), settings, engine, files, lost) as service:
        app = create_app(service, files.token(options.token_file), hosts=[options.host, *options.allow_hosts])

        def listening() -> bool:
            again, version = kept is not None, det_core.__version__
            files.announce(url, port, version, settings.cluster_id, slots, again=again, host=options.host)
            LOG.info("det_core %s is the master of %s at %s", det_core.__version__, options.home, url)
            return not told

        gc.freeze()  # what is there now stays: no need ever to look at it
        gc.enable()
        await _listen(app, bound, app.state.pending.release, listening, lost)
        if lost.done():
            lost.result()
        LOG.info("stopped; trials go on")


@contextlib.asynccontextmanager
async def _service(
    options: Options,
    settings: MasterSettings,
    engine: Engine | None,
    files: HomeFiles,
    lost: asyncio.Future[None],
) -> AsyncIterator[ServiceState]:
    """Start the service with its store and its engine, and stop it at the end.

    Args:
        options: Options of this master.
        settings: Settings of the service.
        engine: Engine, or None for this machine.
        files: Files of the home directory.
        lost: Receives the error when another master has taken the database.
    """
    from det_core.master.service import ServiceState, _lifecycle
    from det_core.master.store import Store

    store = Store.open(
        options.database or f"sqlite:///{options.folder / 'master.db'}",
        lambda: files.check_new(start_new=options.start_new),
    )
    keeper = asyncio.create_task(store.keep_lock(), name="det_core master: lock of the database")

    def on_lock_lost(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not lost.done():
            lost.set_exception(error)

    keeper.add_done_callback(on_lock_lost)
    try:
        runs = _local_engine(options) if engine is None else engine
        service = ServiceState(store, runs, settings)
        try:
            await _lifecycle.start(service)
            yield service
        finally:
            await _lifecycle.stop(service)
            await runs.close()
    finally:
        keeper.cancel()
        await store.close()


def _local_engine(options: Options) -> Engine:
    from det_core.master.engines import LocalEngine, Slots

    return LocalEngine(options.home, Slots.find(options.slots, visible=Environment.read().cuda_visible_devices))


async def _listen(
    app: Any,
    bound: socket.socket,
    release: Callable[[], None],
    listening: Callable[[], bool],
    lost: asyncio.Future[None],
) -> None:
    """Answer requests until a signal comes or the database is lost; then let those under way end.

    Args:
        app: what answers.
        bound: where.
        release: ends the requests that wait.
        listening: called when the first can come; False: no signal is to be waited for, it has come already.
        lost: Done when another master has taken the database.
    """
    import uvicorn

    from det_core.master.api import raise_open_file_limit, server_config

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if not listening():
                self.should_exit = True

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            release()
            await super().shutdown(sockets)

    raise_open_file_limit()
    server = Server(server_config(app))

    def stop(_: asyncio.Future[None]) -> None:
        server.should_exit = True

    lost.add_done_callback(stop)
    await server.serve([bound])


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals to stop that came before the server listened, and after: by itself it hands the one that stopped it
    on when it has stopped, and there is more to be put in order then."""
    told: list[int] = []

    def note(number: int, _frame: object) -> None:
        told.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _on_a_loop(work: Coroutine[Any, Any, None]) -> None:
    """``asyncio.run``, on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)

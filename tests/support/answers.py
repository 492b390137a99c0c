"""HTTP server that gives scripted answers in order and keeps the requests."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Say(NamedTuple):
    """An answer."""

    status: int
    body: Any = None
    """JSON, or bytes as they are."""
    headers: Mapping[str, str] = {}


Answer = Say | Callable[[dict[str, str]], Say]
"""An answer, or a function that returns it for the headers of a request."""


class Answers:
    """The server; ``asked`` has method, path and headers of every request."""

    def __init__(self, answers: list[Answer], context: ssl.SSLContext | None) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _do(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.asked.append((self.command, self.path, dict(self.headers)))
                say = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                if not isinstance(say, Say):
                    say = say(outer.asked[-1][2])
                data = say.body if isinstance(say.body, bytes) else json.dumps(say.body or {}).encode()
                self.send_response(say.status)
                for name, value in {"Content-Length": str(len(data)), **say.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = _do

            def handle(self) -> None:
                with suppress(OSError):
                    super().handle()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def answering(*answers: Answer, context: ssl.SSLContext | None = None) -> Iterator[Answers]:
    """Yield a server that gives these answers in order, and repeats the last one."""
    server = Answers(list(answers), context)
    try:
        yield server
    finally:
        server.close()

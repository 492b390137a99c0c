"""A program around a rank: it waits until another machine answers at a port, then becomes the rank's command.

``python -I -S _await_host.py SECONDS HOST PORT COMMAND [ARGS...]``. It is a rank's program and not the launcher's own
step, so that the launchers are linked meanwhile: they end it when another machine cannot start.
"""

import os
import signal
import socket
import sys
import time

NOTICE_DELAY = 10.0
"""Seconds after which the first rank of a machine says for what it waits."""
_RETRY_DELAY = 0.2


def main() -> None:
    """Wait, and run the command; exit with status 1 if nothing answers in time."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of a script that has not begun
    timeout = float(sys.argv[1])
    host = sys.argv[2]
    port = int(sys.argv[3])
    command = sys.argv[4:]
    wait(host, port, timeout)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a command would inherit that
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as e:
        sys.exit(f"cannot run {command[0]}: {e.strerror}")


def wait(host: str, port: int, timeout: float) -> None:
    """Return when something listens there; exit at the deadline."""
    began = time.monotonic()
    is_first = os.environ.get("HOROVOD_LOCAL_RANK", "0") == "0"
    notice_at = began + NOTICE_DELAY
    while True:
        try:
            return socket.create_connection((host, port), 10).close()
        except OSError as e:
            now = time.monotonic()
            cause = e.strerror or str(e)
            if now - began > timeout:
                sys.exit(f"the first machine's launcher did not answer at {host}:{port} within {timeout:g} s: {cause}")
            if is_first and now >= notice_at:
                notice_at = float("inf")
                print(f"waiting for the first machine's launcher at {host}:{port}: {cause}", file=sys.stderr)
        time.sleep(_RETRY_DELAY)


if __name__ == "__main__":
    main()

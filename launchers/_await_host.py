"""Program that waits until another node answers at a port, and then becomes a rank's command.

``python -I -S _await_host.py SECONDS HOST PORT COMMAND [ARGS...]``. A rank runs it, and not the launcher, so that the
launchers are linked meanwhile: they end it when another node cannot start.
"""

import os
import signal
import socket
import sys
import time

NOTICE_DELAY = 10.0
"""Seconds after which the first rank of a node prints what it waits for."""
_RETRY_DELAY = 0.2


def main() -> None:
    """Wait, and run the command; exit with status 1 if nothing answers in time."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a KeyboardInterrupt would show a traceback of this program
    timeout = float(sys.argv[1])
    host = sys.argv[2]
    port = int(sys.argv[3])
    command = sys.argv[4:]
    wait(host, port, timeout)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, which exec would pass on
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as e:
        sys.exit(f"cannot run {command[0]}: {e.strerror}")


def wait(host: str, port: int, timeout: float) -> None:
    """Wait until something listens there; exit at the deadline."""
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
                sys.exit(f"node 0's launcher did not answer at {host}:{port} within {timeout:g} s: {cause}")
            if is_first and now >= notice_at:
                notice_at = float("inf")
                print(f"waiting for node 0's launcher at {host}:{port}: {cause}", file=sys.stderr)
        time.sleep(_RETRY_DELAY)


if __name__ == "__main__":
    main()

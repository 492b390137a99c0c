"""Notices: text for people at the terminal, whose failure never fails the program.

A reader may have exited (``tee`` dies of the same Ctrl-C), a stream may be closed (``2>&-``) or on a full disk. No such
error may end a training, so everything that det_core itself prints is printed here.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO


def print_notice(text: str) -> None:
    """Print one line on stderr, apart from the script's own output."""
    write_quietly(f"det_core: {text}\n", sys.stderr)


def write_quietly(text: str, stream: TextIO | None) -> None:
    """Write text and flush it; drop it where that fails.

    Args:
        text: Text, line ends included.
        stream: Stream; None for a standard stream that was closed when the process started.
    """
    if stream is None:
        return
    try:
        stream.write(text)
        stream.flush()
    except Exception:  # of any kind: a script may replace a standard stream by any object
        with suppress(Exception):
            _drop_buffered(stream)


def write_in_handler(text: str) -> None:
    """Write to stderr from a signal handler, which may have interrupted a write to ``sys.stderr`` itself."""
    if sys.__stderr__ is None:  # closed at the start: descriptor 2 may be any file that was opened since
        return
    with suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


def drop_unwritable() -> None:
    """Drop buffered text that stderr cannot write, such as a log line, so that the exit status stays the script's."""
    write_quietly("", sys.stderr)


def open_standard_streams() -> None:
    """Open the descriptors 0, 1 and 2 on the null device where this process was started without them."""
    # Otherwise the next file to be opened takes their number, and text for stderr lands in a journal.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def _drop_buffered(stream: TextIO) -> None:
    """Empty the buffer of a stream whose file cannot be written."""
    # Python flushes standard streams at exit, and exits with status 120 if that fails.
    fd = stream.fileno()
    original = os.dup(fd)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, fd, os.get_inheritable(fd))
        stream.flush()
    finally:
        os.dup2(original, fd, os.get_inheritable(fd))
        os.close(original)
        os.close(null)

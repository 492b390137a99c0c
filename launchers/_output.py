"""Output of all ranks of a node, with ``[rank=N]`` before every line.

One thread copies it. A separate thread, because a write to a reader that has stopped blocks, and signals must be
handled meanwhile; a single one, so that no rank's line is cut by another's and notices stand where they belong.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import stat
import threading
import time
from collections import deque

PREFIX = "[launcher] "
MAX_LINE_BYTES = 64 << 20
"""Bytes after which a line without an end is cut, so that memory stays bounded."""
# Copies of more leave the processor's cache.
_CHUNK_BYTES = 128 << 10
_PIPE_BYTES = 1 << 20
"""Bytes that a script may be ahead of its reader."""
# The processor is the training's, and each piece costs, not each line: a script that writes line after line is not
# followed line by line.
_BATCH_DELAY = 0.002
"""Seconds between two reads while scripts write often, so that their lines arrive in pieces."""
_PROMPT_DELAY = 0.2
"""Seconds of silence after which an unfinished line counts as a prompt."""
_DRAIN_MS = 200
"""Milliseconds of silence after which a pipe that some process still holds counts as empty, once scripts have ended."""
_TAIL_BYTES = 64 << 10
"""Bytes kept of each rank's output."""


class Output(threading.Thread):
    """Thread that copies the output until :meth:`finish` was called and the pipes are empty.

    :meth:`pipe` may be called before the thread starts, :meth:`print_notice` and :meth:`finish` by any thread at any
    time.

    Args:
        shared: whether other processes write to the same files or pipes; they take turns by a lock.
        interactive: whether a person can answer a prompt, which is a line without an end.

    Attributes:
        done: file descriptor that becomes readable when the thread ends.
        failure: error that ended the thread, None without one.
    """

    def __init__(self, *, shared: bool = False, interactive: bool = False) -> None:
        super().__init__(name="output", daemon=True)
        self.done, self._end = os.pipe()
        self.failure: BaseException | None = None
        self._streams: dict[int, _RankStream] = {}
        self._tails: dict[int | None, _Tail] = {}
        self._lost: dict[int | None, int] = {}
        self._locks: dict[int, int | None] = {}
        if shared:  # a pipe alone keeps no more than 4096 bytes of a write together
            self._locks = {fd: _open_for_lock(fd) for fd in (1, 2)}
        self._interactive = interactive
        self._prompting: _RankStream | None = None  # the stream whose prompt was written last
        self._notices: deque[bytes] = deque()
        self._finishing = False
        self._woken, self._wake = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)

    def pipe(self, rank: int, target: int) -> int:
        """Return the write end of a new pipe for a stream of a rank, whose lines go to the descriptor ``target``."""
        source, end = os.pipe()
        with contextlib.suppress(OSError):  # the user's limit of memory for pipes is reached
            fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._streams[source] = _RankStream(rank, source, target)
        self._tails.setdefault(rank, _Tail())
        self._poll.register(source, select.POLLIN)
        return end

    def print_notice(self, text: str) -> None:
        """Write lines of the launcher's own to stderr, without waiting for its reader."""
        self._notices.append("".join(f"{PREFIX}{line}\n" for line in text.splitlines()).encode(errors="replace"))
        os.write(self._wake, b".")

    def finish(self) -> None:
        """Let the thread end as soon as the pipes are empty, even if some process still holds them."""
        self._finishing = True
        os.write(self._wake, b".")

    def ended(self, rank: int | None) -> bool:
        """Return whether all writers of a rank's pipes have ended and everything is copied."""
        return all(stream.rank != rank for stream in list(self._streams.values()))

    def tail(self, rank: int | None) -> bytes:
        """Return the last bytes of a rank's output, both streams in the order of arrival."""
        return self._tails[rank].read()

    def lost(self, rank: int | None) -> int:
        """Return the number of bytes of a rank's output that could not be written."""
        return self._lost.get(rank, 0)

    def run(self) -> None:
        """Copy bytes until the end."""
        try:
            self._copy()
        except BaseException as e:  # raised by the supervisor when it joins this thread
            self.failure = e
        finally:
            os.close(self._end)

    def _copy(self) -> None:
        last_poll = 0.0
        while self._streams or not self._finishing:
            hurry = self._finishing  # read once: another thread sets it, and both uses below must agree
            ready = self._poll.poll(_DRAIN_MS if hurry else self._write_prompts())
            if hurry and not ready:
                break
            now = time.monotonic()
            is_busy = now - last_poll < 2 * _BATCH_DELAY
            last_poll = now
            for fd, _ in ready:
                if fd == self._woken:
                    os.read(fd, 4096)
                else:
                    hurry |= self._copy_piece(self._streams[fd])
            self._write_notices()
            if is_busy and not hurry:
                time.sleep(_BATCH_DELAY)
        for stream in self._streams.values():
            self._write(stream, stream.lines.flush())
        self._write_notices()
        self._end_prompt()

    def _write_prompts(self) -> float | None:
        """Write due prompts; return the milliseconds until the next unfinished line becomes one, None without any."""
        if not self._interactive:
            return None
        now = time.monotonic()
        pending = []
        for stream in self._streams.values():
            if stream.lines.is_prompting and not stream.is_file:
                delay = stream.read_at + _PROMPT_DELAY - now
                if delay > 0:
                    pending.append(delay)
                else:
                    self._write(stream, stream.lines.take_prompt())
                    self._prompting = stream
        if not pending:
            return None
        return min(pending) * 1000 + 1

    def _end_prompt(self, next_stream: _RankStream | None = None) -> None:
        """End the line of a prompt, unless its own stream continues: the Enter key of the answer has ended it then."""
        if self._prompting is not None and self._prompting is not next_stream:
            with contextlib.suppress(OSError):
                write_all(self._prompting.target, b"\n", self._locks.get(self._prompting.target))
        self._prompting = None

    def _copy_piece(self, stream: _RankStream) -> bool:
        """Copy the bytes that can be read now; return whether the next piece should not wait."""
        data = os.read(stream.source, _CHUNK_BYTES)
        stream.read_at = time.monotonic()
        lines = stream.lines.feed(data) if data else stream.lines.flush()
        has_reader = self._write(stream, lines)
        if not data or not has_reader:  # without a reader the script gets SIGPIPE, as it would without a launcher
            self._poll.unregister(stream.source)
            os.close(stream.source)
            del self._streams[stream.source]
        return not data or len(data) >= stream.busy_bytes

    def _write(self, stream: _RankStream, lines: bytes) -> bool:
        """Write complete lines; return whether the target still has a reader."""
        if not lines:
            return True
        self._tails[stream.rank].add(lines)
        self._end_prompt(stream)
        try:
            write_all(stream.target, lines, self._locks.get(stream.target))
        except BrokenPipeError:
            return False
        except OSError:  # such as a full disk: training continues, and the summary reports the loss
            self._lost[stream.rank] = self.lost(stream.rank) + len(lines)
        return True

    def _write_notices(self) -> None:
        while self._notices:
            self._end_prompt()
            with contextlib.suppress(OSError):  # stderr is closed or full
                write_all(2, self._notices.popleft(), self._locks.get(2))


class _RankStream:
    """One stream of one rank."""

    def __init__(self, rank: int, source: int, target: int) -> None:
        self.rank = rank
        self.source = source
        self.target = target
        self.lines = Prefixer(b"[rank=%d] " % rank, terminal=os.isatty(target))
        self.is_file = stat.S_ISREG(os.fstat(target).st_mode)  # nobody answers a prompt in a file
        self.read_at = 0.0
        self.busy_bytes = min(_CHUNK_BYTES, fcntl.fcntl(source, fcntl.F_GETPIPE_SZ) // 4)


class Prefixer:
    """Puts a prefix before every line of a stream of bytes, which are not decoded.

    A line ends with ``\\n``, ``\\r\\n`` or ``\\r`` (progress bars). On a terminal the ``\\r`` stays, so that a bar is
    drawn over itself; elsewhere it becomes ``\\n``, so that each state of the bar is a line of the log. A ``\\r`` at
    the start of a line has no effect and is dropped; several in a row act as one.

    A prompt is an unfinished line that did not begin as a bar does, after a ``\\r``. Bytes after a prompt that was
    taken form a new line with a prefix, as the Enter key of the answer has ended the prompt's, or just the line's end.

    Args:
        prefix: bytes without ``\\n`` and ``\\r``, at least one.
        terminal: whether the lines go to a terminal.
    """

    def __init__(self, prefix: bytes, *, terminal: bool = False) -> None:
        self._prefix = prefix
        self._terminal = terminal
        self._line: list[bytes] = []  # pieces of the unfinished line
        self._line_bytes = 0
        self._return = b""  # a \r at the end of a piece: the next byte decides its meaning
        self._is_bar = False  # a \r stands before the unfinished line
        self._taken = False  # the unfinished line was taken as a prompt

    @property
    def is_prompting(self) -> bool:
        """Whether the stream ends in an unfinished line that may be a prompt."""
        return bool(self._line) and not self._is_bar

    def take_prompt(self) -> bytes:
        """Return the unfinished line, with its prefix and without an end."""
        prompt = b"".join(self._line)
        self._keep_unfinished(b"")
        self._taken = True
        return self._prefix + prompt

    def feed(self, data: bytes) -> bytes:
        """Add the next piece of the stream; return the lines that it completes, with their prefixes."""
        self._is_bar = b"\r" in data[data.rfind(b"\n") + 1 :] or (self._is_bar and b"\n" not in data)
        if self._return or b"\r" in data:
            data = self._drop_idle_returns(data)
        end_of_prompt = b""
        if self._taken and data:
            self._taken = False
            if end := re.match(rb"\r?\n|\r", data):
                end_of_prompt = end[0]
                data = data[end.end() :]
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not cut:
            if data:
                self._line.append(data)
            self._line_bytes += len(data)
            if self._line_bytes > MAX_LINE_BYTES:
                return end_of_prompt + self.flush()
            return end_of_prompt
        lines = b"".join([*self._line, data[:cut]])
        self._keep_unfinished(data[cut:])
        if b"\r" in lines and self._terminal:
            lines = re.sub(rb"\r\n|[\r\n]", lambda end: end[0] + self._prefix, lines)
        else:
            lines = lines.replace(b"\n", b"\n" + self._prefix)
        return end_of_prompt + self._prefix + lines[: -len(self._prefix)]

    def flush(self) -> bytes:
        """End the unfinished line and return it; empty without one."""
        line = b"".join(self._line)
        self._keep_unfinished(b"")
        self._return = b""
        if not line:
            return b""
        return self._prefix + line + b"\n"

    def _keep_unfinished(self, rest: bytes) -> None:
        self._line = [rest] if rest else []
        self._line_bytes = len(rest)

    def _drop_idle_returns(self, data: bytes) -> bytes:
        data = re.sub(rb"\r+", b"\r", self._return + data)
        self._return = b"\r" if data.endswith(b"\r") else b""
        data = data.removesuffix(b"\r")
        start_of_line = rb"(?<=\n)"
        if not self._line and not self._taken:
            start_of_line = rb"(?:\A|(?<=\n))"
        data = re.sub(start_of_line + rb"\r(?!\n)", b"", data)
        if self._terminal:
            return data
        return re.sub(rb"\r(?!\n)", b"\n", data)


class _Tail:
    """Last bytes of a rank's output, in the pieces in which they arrived."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._size = 0

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece[-_TAIL_BYTES:])
        self._size += len(self._pieces[-1])
        while self._size - len(self._pieces[0]) >= _TAIL_BYTES:
            self._size -= len(self._pieces.popleft())

    def read(self) -> bytes:
        # tuple() copies the deque in one step under the GIL; the thread may add to it meanwhile.
        return b"".join(tuple(self._pieces))[-_TAIL_BYTES:]


def write_all(fd: int, data: bytes, lock: int | None = None) -> None:
    """Write all of ``data``, while no other holder of the lock writes.

    Args:
        fd: file descriptor to write to.
        data: bytes to write.
        lock: descriptor to flock(), None to write without a lock.

    Raises:
        OSError: If not all could be written.
    """
    if lock is not None:
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(fd, rest) :]
            except BlockingIOError:  # the process that started this one has made the descriptor non-blocking
                poll = select.poll()
                poll.register(fd, select.POLLOUT)
                poll.poll()
    finally:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)


def _open_for_lock(fd: int) -> int | None:
    """Return a descriptor of the same file or pipe that may be locked, None for a socket or another user's file."""
    # Opened anew: flock() belongs to the open file, which this process may share with those it should exclude.
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None

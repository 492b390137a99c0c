"""Carries the output of all ranks of a machine, with ``[rank=N]`` before every line.

One thread does it. A thread, because a write to a reader that has stopped blocks, and signals have to be heard
meanwhile. One, so that no rank's line is cut by another's, and the launcher's own lines stand where they belong.

The processor is the training's. What is carried costs by the piece rather than by the line: pieces are as large as the
processor's cache likes, and a script that writes line after line is not followed line by line.
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
"""Bytes after which a line that does not end is cut, so that memory stays bounded."""
_CHUNK = 128 << 10
"""Bytes read at a time; copies of more leave the processor's cache."""
_PIPE = 1 << 20
"""Bytes that a script may be ahead of its reader."""
_PAUSE = 0.002
"""Seconds for which a script that writes often is left alone, so that its lines come in pieces."""
_PROMPT_DELAY = 0.2
"""Seconds of silence after which a line that has begun counts as a question to whoever sits at the terminal."""
_DRAIN_MS = 200
"""Milliseconds of silence after which a pipe that some process still holds counts as empty, once scripts have ended."""
_TAIL = 64 << 10
"""Bytes that are remembered of each rank."""


class Output(threading.Thread):
    """Runs until :meth:`finish` was called and nothing more is there to read.

    :meth:`pipe` is called before the thread is started, :meth:`say` and :meth:`finish` by any thread at any time.

    Args:
        shared: whether other processes write to the same places; they take turns by a lock then. (A pipe alone keeps
            no more than 4096 bytes together.)
        interactive: whether somebody can answer a prompt, which is a line without an end.

    Attributes:
        done: a file descriptor that is readable once the thread has ended.
        failure: what ended the thread, if that was an error.
    """

    def __init__(self, *, shared: bool = False, interactive: bool = False) -> None:
        super().__init__(name="output", daemon=True)
        self.done, self._end = os.pipe()
        self.failure: BaseException | None = None
        self._streams: dict[int, _RankStream] = {}
        self._tails: dict[int | None, _Tail] = {}
        self._lost: dict[int | None, int] = {}
        self._locks = {fd: _lockable(fd) for fd in (1, 2)} if shared else {}
        self._interactive = interactive
        self._prompting: _RankStream | None = None  # the stream whose prompt is the last that was written
        self._notices: deque[bytes] = deque()
        self._finishing = False
        self._woken, self._wake = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)

    def pipe(self, rank: int, target: int) -> int:
        """A pipe for a stream of a rank, whose lines go to ``target``; the end to write to."""
        source, end = os.pipe()
        with contextlib.suppress(OSError):  # this user's share of the memory for pipes is used up
            fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, _PIPE)
        self._streams[source] = _RankStream(rank, source, target)
        self._tails.setdefault(rank, _Tail())
        self._poll.register(source, select.POLLIN)
        return end

    def say(self, text: str) -> None:
        """Write lines of the launcher's own to stderr, without waiting for its reader."""
        self._notices.append("".join(f"{PREFIX}{line}\n" for line in text.splitlines()).encode(errors="replace"))
        os.write(self._wake, b".")

    def finish(self) -> None:
        """End as soon as the pipes are empty, though some process may still hold them."""
        self._finishing = True
        os.write(self._wake, b".")

    def ended(self, rank: int | None) -> bool:
        """Whether nothing writes to a rank's pipes any more, and all that came has been carried."""
        return all(stream.rank != rank for stream in list(self._streams.values()))

    def tail(self, rank: int | None) -> bytes:
        """The last bytes of a rank, both streams in the order in which they came."""
        return self._tails[rank].read()

    def lost(self, rank: int | None) -> int:
        """Bytes of a rank's output that could not be written."""
        return self._lost.get(rank, 0)

    def run(self) -> None:
        """Carry bytes until the end."""
        try:
            self._carry()
        except BaseException as e:  # raised by whoever joins this thread
            self.failure = e
        finally:
            os.close(self._end)

    def _carry(self) -> None:
        looked = 0.0
        while self._streams or not self._finishing:
            hurry = self._finishing  # another thread's to set: the same answer at both places
            ready = self._poll.poll(_DRAIN_MS if hurry else self._write_prompts())
            if hurry and not ready:
                break
            often, looked = time.monotonic() - looked < 2 * _PAUSE, time.monotonic()
            for fd, _ in ready:
                if fd == self._woken:
                    os.read(fd, 4096)
                else:
                    hurry |= self._step(self._streams[fd])
            self._write_notices()
            if often and not hurry:
                time.sleep(_PAUSE)
        for stream in self._streams.values():
            self._write(stream, stream.lines.flush())
        self._write_notices()
        self._end_prompt()

    def _write_prompts(self) -> float | None:
        """Write the prompts; return the milliseconds until another line may have become one, None if none has begun."""
        if not self._interactive:
            return None
        now = time.monotonic()
        pending = []
        for stream in self._streams.values():
            if stream.lines.is_prompting and not stream.is_file:
                left = stream.read_at + _PROMPT_DELAY - now
                if left > 0:
                    pending.append(left)
                else:
                    self._write(stream, stream.lines.take_prompt())
                    self._prompting = stream
        return min(pending) * 1000 + 1 if pending else None

    def _end_prompt(self, next_stream: _RankStream | None = None) -> None:
        """End the line of a prompt, unless its own stream goes on: whoever answers has ended it by the Enter key."""
        if self._prompting is not None and self._prompting is not next_stream:
            with contextlib.suppress(OSError):
                write_all(self._prompting.target, b"\n", self._locks.get(self._prompting.target))
        self._prompting = None

    def _step(self, stream: _RankStream) -> bool:
        """Carry what can be read now; whether there is more to read than should have to wait."""
        data = os.read(stream.source, _CHUNK)
        stream.read_at = time.monotonic()
        went = self._write(stream, stream.lines.feed(data) if data else stream.lines.flush())
        if not data or not went:  # where the reader has gone the script is to learn it, as it would without us
            self._poll.unregister(stream.source)
            os.close(stream.source)
            del self._streams[stream.source]
        return not data or len(data) >= stream.busy_bytes

    def _write(self, stream: _RankStream, lines: bytes) -> bool:
        """Write whole lines; False if nobody reads any more."""
        if not lines:
            return True
        self._tails[stream.rank].add(lines)
        self._end_prompt(stream)
        try:
            write_all(stream.target, lines, self._locks.get(stream.target))
        except BrokenPipeError:
            return False
        except OSError:  # such as a full disk: training goes on, and the loss is told at the end
            self._lost[stream.rank] = self.lost(stream.rank) + len(lines)
        return True

    def _write_notices(self) -> None:
        while self._notices:
            self._end_prompt()
            with contextlib.suppress(OSError):  # nobody is there to tell
                write_all(2, self._notices.popleft(), self._locks.get(2))


class _RankStream:
    """One stream of one rank."""

    def __init__(self, rank: int, source: int, target: int) -> None:
        self.rank, self.source, self.target = rank, source, target
        self.lines = Prefixer(b"[rank=%d] " % rank, terminal=os.isatty(target))
        self.is_file = stat.S_ISREG(os.fstat(target).st_mode)  # where nobody reads who could answer
        self.read_at = 0.0
        self.busy_bytes = min(_CHUNK, fcntl.fcntl(source, fcntl.F_GETPIPE_SZ) // 4)


class Prefixer:
    """Puts a prefix before every line of a stream of bytes, which are not decoded.

    A line ends with ``\\n``, ``\\r\\n`` or ``\\r`` (progress bars). On a terminal the ``\\r`` stays, so that a bar is
    drawn over itself; elsewhere it becomes ``\\n``, so that each state of the bar is a line of the log. A ``\\r`` at
    the start of a line does nothing and is dropped; several in a row do what one does.

    A prompt is a line that has no end yet and did not begin as a bar does, behind a ``\\r``. What comes after one that
    was taken is a new line with a prefix, as the answer's Enter key has ended the prompt's, or only the line's end.

    Args:
        prefix: not empty, and without ``\\n`` and ``\\r``.
        terminal: whether the lines go to a terminal.
    """

    def __init__(self, prefix: bytes, *, terminal: bool = False) -> None:
        self._prefix, self._terminal = prefix, terminal
        self._begun: list[bytes] = []  # pieces of a line that has not ended
        self._begun_size = 0
        self._held = b""  # a \r at the end of a piece: the next byte says what it means
        self._is_bar = False  # a \r stands before the line that has begun
        self._taken = False  # the line that has begun was taken as a prompt

    @property
    def is_prompting(self) -> bool:
        """Whether a line has begun that may be a prompt."""
        return bool(self._begun) and not self._is_bar

    def take_prompt(self) -> bytes:
        """Return the line that has begun, with its prefix and without an end."""
        prompt = b"".join(self._begun)
        self._begun = []
        self._begun_size = 0
        self._taken = True
        return self._prefix + prompt

    def feed(self, data: bytes) -> bytes:
        """Take the next piece of the stream; return the lines that are whole now, with their prefixes."""
        self._is_bar = b"\r" in data[data.rfind(b"\n") + 1 :] or (self._is_bar and b"\n" not in data)
        if self._held or b"\r" in data:
            data = self._without_idle_returns(data)
        end_of_prompt = b""
        if self._taken and data:
            self._taken = False
            if end := re.match(rb"\r?\n|\r", data):
                end_of_prompt = end[0]
                data = data[end.end() :]
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not cut:
            if data:
                self._begun.append(data)
            self._begun_size += len(data)
            return end_of_prompt + (self.flush() if self._begun_size > MAX_LINE_BYTES else b"")
        lines = b"".join([*self._begun, data[:cut]])
        self._begun, self._begun_size = [data[cut:]] if cut < len(data) else [], len(data) - cut
        if b"\r" in lines and self._terminal:
            lines = re.sub(rb"\r\n|[\r\n]", lambda end: end[0] + self._prefix, lines)
        else:
            lines = lines.replace(b"\n", b"\n" + self._prefix)
        return end_of_prompt + self._prefix + lines[: -len(self._prefix)]

    def flush(self) -> bytes:
        """End the line that has begun, if there is one, and return it."""
        line = b"".join(self._begun)
        self._begun, self._begun_size, self._held = [], 0, b""
        return self._prefix + line + b"\n" if line else b""

    def _without_idle_returns(self, data: bytes) -> bytes:
        data = re.sub(rb"\r+", b"\r", self._held + data)
        self._held = b"\r" if data.endswith(b"\r") else b""
        data = data.removesuffix(b"\r")
        start_of_line = rb"(?<=\n)" if self._begun or self._taken else rb"(?:\A|(?<=\n))"
        data = re.sub(start_of_line + rb"\r(?!\n)", b"", data)
        return data if self._terminal else re.sub(rb"\r(?!\n)", b"\n", data)


class _Tail:
    """The last bytes of a rank's output, in the pieces in which they came."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._size = 0

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece[-_TAIL:])
        self._size += len(self._pieces[-1])
        while self._size - len(self._pieces[0]) >= _TAIL:
            self._size -= len(self._pieces.popleft())

    def read(self) -> bytes:
        # Taken in one step, as the thread may add to it meanwhile.
        return b"".join(tuple(self._pieces))[-_TAIL:]


def write_all(fd: int, data: bytes, lock: int | None = None) -> None:
    """Write all of ``data``, while nobody else who knows the lock writes there.

    Raises:
        OSError: it could not be written.
    """
    if lock is not None:
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(fd, rest) :]
            except BlockingIOError:  # whoever gave us this descriptor uses it without blocking
                ready = select.poll()
                ready.register(fd, select.POLLOUT)
                ready.poll()
    finally:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)


def _lockable(fd: int) -> int | None:
    """The place behind a descriptor, opened anew: a lock is an open file's, and this one may be shared."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # a socket, or another user's file
        return None

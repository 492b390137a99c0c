"""What launcher and wrapper say to each other: one message a packet, over a SOCK_SEQPACKET unix socket.

A message is a line of words, then an optional payload of bytes.

==============================  ==========================================================================
wrapper to launcher
``hello RANK PID ATTEMPT HOST`` a wrapper is up, and waits for ``start``; HOST stands there if it is on another machine
``started PID``                 the script runs, as this process, the leader of its own process group
``exit STATUS TIME``            the script has ended: its status, or minus the signal; CLOCK_MONOTONIC
``end LOST``, the last output   all its output is written but LOST bytes; the last thing a wrapper says
launcher to wrapper
``start CAPTURE TAIL SECONDS…`` with the launcher's stdout and stderr attached. A wrapper whose own stderr is the file
                                with inode CAPTURE takes the launcher's; where CAPTURE is 0 it takes both.
                                Then: how many lines make the last output; how long a teardown may take; 1 if a
                                wrapper whose script has failed is to wait for ``leave``
``signal N ENDS``               send N to the script; ENDS is 1 if it is meant to end it
``kill``                        end the script's process group now
``teardown``                    another rank has failed: the script is to end, within SECONDS
``leave``                       all ranks here have ended
==============================  ==========================================================================
"""

from __future__ import annotations

import os
import socket
import struct

MAX_MESSAGE = 128 * 1024
"""Bytes; below the smallest default of net.core.wmem_max."""


def pack(kind: str, *words: object, payload: bytes = b"") -> bytes:
    """One message as bytes."""
    return " ".join([kind, *map(str, words)]).encode() + b"\n" + payload


def unpack(message: bytes) -> tuple[str, list[str], bytes]:
    """The kind, the words after it, and the payload of a message."""
    line, _, payload = message.partition(b"\n")
    kind, *words = line.decode().split(" ")
    return kind, words, payload


def same_user(link: socket.socket) -> bool:
    """Whether the process at the other end runs as this user (or as root)."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] in (0, os.geteuid())

"""Keys from the job's secret: ZMQ CURVE keys for the chief and for its workers."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass


def hkdf(secret: bytes, info: bytes, length: int = 32, salt: bytes = b"det_core") -> bytes:
    """HKDF-SHA256 (RFC 5869): ``length`` bytes of key, different for each ``info``."""
    key = hmac.new(salt, secret, hashlib.sha256).digest()
    out, block = b"", b""
    while len(out) < length:
        block = hmac.new(key, block + info + bytes([len(out) // 32 + 1]), hashlib.sha256).digest()
        out += block
    return out[:length]


@dataclass(frozen=True)
class CurveKeys:
    """The two key pairs of a job. Whoever knows the secret knows both; nobody else connects."""

    chief_secret: bytes
    chief_public: bytes
    worker_secret: bytes
    worker_public: bytes
    worker_raw: bytes
    """The workers' public key as ZMQ's authentication protocol shows it: 32 bytes."""

    @classmethod
    def derive(cls, secret: str) -> CurveKeys:
        """The keys of the job whose ranks share ``secret``."""
        import zmq
        from zmq.utils import z85

        chief, worker = (z85.encode(hkdf(secret.encode(), b"curve " + role)) for role in (b"chief", b"worker"))
        public = zmq.curve_public(worker)
        return cls(chief, zmq.curve_public(chief), worker, public, z85.decode(public))

"""The manifest of a checkpoint: its files with sizes and digests. Written last.

``<checkpoint>/.det_core/manifest.json`` is one JSON object::

    {"version": 1, "storage_id": "…", "run_id": "…", "restart": 0, "ordinal": 3, "time": "…Z", "steps_completed": 100,
     "content": "…", "digest": "…",
     "chunk_size": 16777216, "directories": ["sub/"],
     "files": [{"path": "sub/f", "size": 5, "algorithm": "xxh3_128", "digests": ["…"]}]}

A file has one digest per chunk of ``chunk_size`` bytes, an empty file none. ``digest`` is that of the bytes before it,
``content`` that of the bytes after it; manifests of earlier versions have neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from det_core.errors import CheckpointCorrupt, CheckpointError
from det_core.storage._names import META_DIR, METADATA_FILE, is_relative_path, parents

VERSION = 1
ALGORITHM = "xxh3_128"
CHUNK_BYTES = 16 << 20
"""Bytes per digest."""
HEADER_BYTES = 4096
"""Bytes at the beginning of a manifest that are searched for its header."""
MANIFEST_END = b"}]}"
"""The last bytes of every manifest; earlier in it they can only occur in a path."""
_DIGEST = b',"digest":"'
_REST = b',"chunk_size":'
"""First bytes after the header. No text contains them, as JSON escapes quotes."""


class FileEntry(NamedTuple):
    """One file of a checkpoint: its size in bytes, and a digest per chunk, or None if they are unknown."""

    size: int
    digests: tuple[str, ...] | None = None


@dataclass(frozen=True, order=True)
class Header:
    """Origin of a checkpoint. Sorts oldest to newest within a run."""

    run_id: str
    restart: int
    ordinal: int
    """Number of the checkpoint among those of its restart, from 1."""
    time: str
    """Time of the commit, RFC 3339 in UTC."""
    steps_completed: int
    storage_id: str

    @classmethod
    def parse_prefix(cls, data: bytes, where: str) -> Header | None:
        """Return the header in the first bytes of a manifest, or None if all of it must be decoded.

        Raises:
            CheckpointError: If a newer version of det_core wrote it.
        """
        import orjson

        head, found, _ = data.partition(_REST)
        try:
            if not found:
                return None
            body = orjson.loads(head + b"}")
            _check_digest(body, "digest", head.partition(_DIGEST)[0])
            return _header(body, where)
        except (ValueError, TypeError, KeyError):
            return None


@dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint. ``header`` is None if another program wrote it; its files then have no digests."""

    files: Mapping[str, FileEntry]
    directories: tuple[str, ...] = ()
    """Relative POSIX paths, each ending in a slash."""
    header: Header | None = None
    chunk_size: int = CHUNK_BYTES

    @property
    def verified(self) -> bool:
        """Whether there are digests to compare with."""
        return self.header is not None

    @property
    def resources(self) -> dict[str, int]:
        """Size by relative POSIX path, sorted; directories end in a slash and have size 0. The manifest itself is left
        out."""
        sizes = dict.fromkeys(self.directories, 0) | {p: f.size for p, f in self.files.items()}
        return dict(sorted(sizes.items()))

    @classmethod
    def unverified(cls, sizes: Mapping[str, int], directories: Iterable[str]) -> Manifest:
        """Build a manifest without digests, for a checkpoint that has none."""
        return cls({p: FileEntry(size) for p, size in sizes.items()}, tuple(directories))

    def without(self, paths: Iterable[str]) -> Manifest:
        """Return a manifest without ``paths`` and without the directories that held only those."""
        gone = set(paths)
        files = {p: f for p, f in self.files.items() if p not in gone}
        held = {folder for p in self.files for folder in parents(p)}
        still = {folder for p in files for folder in parents(p)}
        kept = [d for d in self.directories if d not in gone and (d in still or d not in held)]
        keep = still.union(kept, *(parents(d) for d in kept))
        return Manifest(files, tuple(d for d in self.directories if d in keep), self.header, self.chunk_size)

    def encode(self) -> bytes:
        """Return the manifest as it is stored."""
        import orjson

        assert self.header is not None, "a checkpoint without a header has no manifest"
        # The order of the keys lets list() read the header from the first bytes: decoding all of a manifest of 5,000
        # files takes 42 ms.
        h = self.header
        files = [
            {"path": p, "size": f.size, "algorithm": ALGORITHM, "digests": f.digests or ()}
            for p, f in sorted(self.files.items())
        ]
        head = {"version": VERSION, "storage_id": h.storage_id, "run_id": h.run_id, "restart": h.restart}
        head |= {"ordinal": h.ordinal, "time": h.time, "steps_completed": h.steps_completed}
        rest = {"chunk_size": self.chunk_size, "directories": self.directories, "files": files}
        content = b"," + orjson.dumps(rest)[1:]
        signed = orjson.dumps({**head, "content": digest_of(content)})[:-1]
        return b"".join((signed, _DIGEST, digest_of(signed).encode(), b'"', content))

    @classmethod
    def decode(cls, data: bytes, where: str) -> Manifest:
        """Read a stored manifest.

        Args:
            data: its bytes.
            where: name of the checkpoint in messages.

        Raises:
            CheckpointCorrupt: If it is not a manifest, or has a path outside the checkpoint.
            CheckpointError: If a newer version of det_core wrote it.
        """
        import orjson

        try:
            body = orjson.loads(data)
            head, rest, content = data.partition(_REST)
            _check_digest(body, "digest", head.partition(_DIGEST)[0])
            _check_digest(body, "content", rest + content)
            return _manifest(body, where)
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise CheckpointCorrupt(f"{where}: its manifest cannot be read ({type(e).__name__}: {e})") from e


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest of one chunk."""
    from xxhash import xxh3_128_hexdigest

    return xxh3_128_hexdigest(data)


def _check_digest(body: dict[str, Any], key: str, data: bytes) -> None:
    """Raise ValueError if a part of a manifest differs from its digest; without one, accept it."""
    if key in body and body[key] != digest_of(data):
        raise ValueError(f"its {key} differs")


def _header(body: dict[str, Any], where: str) -> Header:
    if body["version"] > VERSION:
        found = f"a manifest of version {body['version']}, newer than {VERSION}"
        raise CheckpointError(f"{where} has {found}: upgrade det_core to read it")
    kinds = {"run_id": str, "restart": int, "ordinal": int, "time": str, "steps_completed": int, "storage_id": str}
    for name, kind in kinds.items():
        if type(body[name]) is not kind:
            raise ValueError(f"{name} is {body[name]!r}")
    return Header(**{name: body[name] for name in kinds})


def _manifest(body: dict[str, Any], where: str) -> Manifest:
    header = _header(body, where)
    chunk = body["chunk_size"]
    if type(chunk) is not int or chunk < 1:
        raise ValueError(f"chunk_size is {chunk!r}")
    for path in [f["path"] for f in body["files"]] + [d.removesuffix("/") for d in body["directories"]]:
        if not is_relative_path(path) or path.split("/", 1)[0] == META_DIR:
            raise CheckpointCorrupt(f"{where}: its manifest names {path!r}, which is not a path in a checkpoint")
    files = {f["path"]: _entry(f, chunk, where) for f in body["files"]}
    return Manifest(files, tuple(body["directories"]), header, chunk)


def _entry(f: dict[str, Any], chunk: int, where: str) -> FileEntry:
    if f["algorithm"] != ALGORITHM:
        raise CheckpointError(
            f"{where}: {f['path']} has digests of {f['algorithm']!r}, which this det_core cannot compute"
        )
    if type(f["size"]) is not int or f["size"] < 0 or len(f["digests"]) != -(-f["size"] // chunk):
        raise ValueError(f"{f['path']}: {len(f['digests'])} digests do not fit a size of {f['size']!r}")
    return FileEntry(f["size"], tuple(f["digests"]))


def encode_metadata(metadata: Mapping[str, Any]) -> bytes:
    """Return metadata.json as it is stored: one key per line."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in metadata.items()]
    return ("{\n" + ",\n".join(lines) + "\n}" if lines else "{}").encode()


def decode_metadata(data: bytes, where: str) -> dict[str, Any]:
    """Read a stored metadata.json.

    Raises:
        CheckpointCorrupt: If it is not a JSON object; ``where`` names the checkpoint in the message.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise CheckpointCorrupt(f"{where}: {METADATA_FILE} is not valid JSON ({e})") from e
    if not isinstance(found, dict):
        raise CheckpointCorrupt(f"{where}: {METADATA_FILE} is not a JSON object")
    return found

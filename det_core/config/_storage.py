"""The section ``checkpoint_storage`` (wire contract, section 11.3)."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict

from det_core.config._rules import AbsolutePath, AnyObject, Anything, Count, Flag, Name, Prefix, Web, one_of, text
from det_core.config._section import Cross, Kinds, Section, option

Bucket = Annotated[str, text("a bucket's bare name; the rest is its prefix", r"[^/\s]+")]


class _Storage(Section):
    """What all kinds have."""

    type: Any = option(..., "which kind")
    save_experiment_best: Count = option(0, "how many of the experiment's best checkpoints stay when it has ended")
    save_trial_best: Count = option(1, "how many of each trial's best checkpoints stay when it has ended")
    save_trial_latest: Count = option(1, "how many of each trial's latest checkpoints stay when it has ended")


class DefaultStorage(_Storage):
    """Where the master's default says: without a `type`, only what stays is said."""

    type: None = option(None, "nothing")


class UnknownStorage(_Storage):
    """A place whose type says nothing."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, one_of("directory", "shared_fs", "s3", "gcs", "azure", "fsspec")] = option(..., "which kind")


class Directory(_Storage):
    """A folder, under the path by which the trials see it."""

    type: Literal["directory"] = option(..., "`directory`")
    container_path: AbsolutePath = option(..., "the folder")


class SharedFs(_Storage):
    """A folder that all machines share."""

    type: Literal["shared_fs"] = option(..., "`shared_fs`")
    host_path: AbsolutePath = option(..., "the folder")
    storage_path: Name | None = option(None, "a folder in it: relative, or an absolute path inside `host_path`")
    propagation: Name | None = option(None, "how a container mounts it", unused=True)
    container_path: Name | None = option(None, "of former times", unused=True)
    checkpoint_path: Name | None = option(None, "of former times", unused=True)
    tensorboard_path: Name | None = option(None, "of former times", unused=True)

    @classmethod
    def cross(cls, given: Mapping[str, Any]) -> Iterator[Cross]:
        host, path = given.get("host_path"), given.get("storage_path")
        if isinstance(host, str) and isinstance(path, str):
            whole = posixpath.normpath(posixpath.join(host, path))
            host = posixpath.normpath(host)
            if posixpath.isabs(host) and posixpath.commonpath([host, whole]) != host:
                yield Cross(("storage_path",), f"inside host_path, which is {host!r}")


class S3(_Storage):
    """A bucket of S3's, or of a server that speaks its protocol."""

    type: Literal["s3"] = option(..., "`s3`")
    bucket: Bucket = option(..., "its name")
    prefix: Prefix | None = option(None, "a folder in it")
    endpoint_url: Web | None = option(None, "the server, if it is not Amazon's")
    access_key: Name | None = option(None, "with `secret_key`; without: as the AWS tools find them", secret=True)
    secret_key: Name | None = option(None, "with `access_key`", secret=True)
    session_token: Name | None = option(None, "with `access_key`, if it is a temporary one", secret=True)
    region: Name | None = option(None, "of the bucket")
    anonymous: Flag | None = option(None, "use no keys at all")

    @classmethod
    def cross(cls, given: Mapping[str, Any]) -> Iterator[Cross]:
        has = {key for key, value in given.items() if value is not None}
        for key, other in (("access_key", "secret_key"), ("secret_key", "access_key")):
            if key in has and other not in has:
                yield Cross((other,), f"the key that belongs to {key}")
        if "session_token" in has and not has & {"access_key", "secret_key"}:
            yield Cross(("access_key",), "the keys that belong to session_token, with secret_key")
        if given.get("anonymous") is True and "access_key" in has:
            yield Cross(("anonymous",), "false, as there is access_key")


class Gcs(_Storage):
    """A bucket of Google Cloud Storage."""

    type: Literal["gcs"] = option(..., "`gcs`")
    bucket: Bucket = option(..., "its name")
    prefix: Prefix | None = option(None, "a folder in it")
    endpoint_url: Web | None = option(None, "the server, if it is not Google's")
    anonymous: Flag | None = option(None, "use no keys at all")


class Azure(_Storage):
    """A container of Azure Blob Storage: with exactly one of `connection_string` and `account_url`."""

    type: Literal["azure"] = option(..., "`azure`")
    container: Name = option(..., "its name")
    prefix: Prefix | None = option(None, "a folder in it")
    connection_string: Name | None = option(None, "how to connect", secret=True)
    account_url: Web | None = option(None, "the account")
    credential: Anything | None = option(None, "for `account_url`", secret=True)

    @classmethod
    def cross(cls, given: Mapping[str, Any]) -> Iterator[Cross]:
        has = {key for key, value in given.items() if value is not None}
        if has.isdisjoint({"connection_string", "account_url"}):
            yield Cross(("account_url",), "a URL that begins with https://, or instead of it a connection_string")
        elif has >= {"connection_string", "account_url"}:
            yield Cross(("account_url",), "left out, as there is connection_string")
        if "credential" in has and "account_url" not in has:
            yield Cross(("credential",), "left out, as there is no account_url")


class Fsspec(_Storage):
    """A store of any protocol that fsspec has a driver for."""

    type: Literal["fsspec"] = option(..., "`fsspec`")
    url: Annotated[str, text("a URL of a protocol that fsspec knows", r"[\w+.-]+://.*")] = option(
        ..., "where", secret=True
    )
    options: AnyObject | None = option(None, "arguments of the driver", secret=True)


STORAGES: dict[str, type[Section]] = {
    "directory": Directory,
    "shared_fs": SharedFs,
    "s3": S3,
    "gcs": Gcs,
    "azure": Azure,
    "fsspec": Fsspec,
    "default": DefaultStorage,
    "": UnknownStorage,
}


def _which(given: Any) -> str:
    if not isinstance(given, Mapping):
        return ""
    if given.get("type") is None and given.keys() <= DefaultStorage.model_fields.keys():
        return "default"
    return given["type"] if isinstance(given.get("type"), str) and given["type"] != "default" else ""


Storage = Annotated[Any, Kinds(lambda: STORAGES, _which, before=lambda given: {} if given is None else given)]

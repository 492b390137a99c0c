"""Tables of the store, one class each: a column is declared here and nowhere else.

Times are seconds since the epoch; columns of lists, dictionaries and ``Any`` are JSON, written when they are assigned
anew and not when they are changed in place. Objects belong to the session, and so to the thread, that loaded them until
the store detaches them; from then on they are plain values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import orjson
from sqlalchemy import (
    BigInteger,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column
from sqlalchemy.types import TypeDecorator, TypeEngine

from det_core import _clock

NO_STEP = 2**63 - 1
"""Step of rows without one, which sorts after all others."""
MAX_ID = 2**63 - 1
REPORTED = -1
"""Rank of the rows of the one-report route, which has no ranks."""
SYSTEM = frozenset(["gpu", "cpu", "memory", "disk", "network"])
"""Groups of samples of the machine: never merged, never superseded."""


def dumps(value: Any) -> str:
    """Return a value as JSON; numbers that are not finite as ``NaN``, ``Infinity`` and ``-Infinity`` without quotes."""
    return json.dumps(value, separators=(",", ":"))


def loads(text: str) -> Any:
    """Return the value of a text by :func:`dumps` or orjson."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


class Json(TypeDecorator[Any]):
    """Any plain value, as JSON text; None is NULL."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else dumps(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else loads(value)


class SafeText(TypeDecorator[str]):
    """Text that people or programs wrote; what databases cannot hold (NUL, half a surrogate pair) becomes U+FFFD."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or (value.isascii() and "\0" not in value):
            return value
        return value.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Reference(TypeDecorator[int]):
    """ID of a row; any number that no row has is looked for as 0, because databases refuse larger ones than theirs."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: Dialect) -> int | None:
        return value if value is None or 0 < value <= MAX_ID else 0


class Serial(Reference):
    """ID that the database counts up where none is given."""

    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        # SQLite counts up nothing but a column whose type is exactly this.
        return dialect.type_descriptor(Integer() if dialect.name == "sqlite" else BigInteger())


class Base(MappedAsDataclass, DeclarativeBase, eq=False):
    """Base of all tables."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        int: BigInteger,
        float: Double,
        str: SafeText,
        Any: Json,
        dict[str, Any]: Json,
        dict[str, int]: Json,
        list[int]: Json,
        list[str]: Json,
        list[dict[str, Any]]: Json,
    }


class Experiment(Base, kw_only=True):
    """Experiment; ``context`` is the digest of its archive."""

    __tablename__ = "experiments"

    id: Mapped[int] = mapped_column(Serial, primary_key=True, default=None)
    state: Mapped[str]
    name: Mapped[str]
    description: Mapped[str] = mapped_column(default="")
    config: Mapped[dict[str, Any]]
    original_config: Mapped[str] = mapped_column(default="")
    warnings: Mapped[list[str]] = mapped_column(default_factory=list)
    context: Mapped[str | None] = mapped_column(default=None)
    seed: Mapped[int] = mapped_column(default=0)
    priority: Mapped[int] = mapped_column(default=42)
    progress: Mapped[float] = mapped_column(default=0.0)
    unmanaged: Mapped[bool] = mapped_column(default=False)
    parent_id: Mapped[int | None] = mapped_column(default=None)
    external_id: Mapped[str | None] = mapped_column(default=None, unique=True)
    error: Mapped[str | None] = mapped_column(default=None)
    start_time: Mapped[float] = mapped_column(default_factory=_clock.now)
    end_time: Mapped[float | None] = mapped_column(default=None)


class Trial(Base, kw_only=True):
    """Trial of an experiment.

    Attributes:
        request_id: Name that its search gave it; unique in its experiment.
        task_id: ID of its logs and allocations.
        run_id: Number of its newest run; 0 before the first.
        closed: Whether its search gives it no more operations.
        reopened: Whether it continues after its search has seen its end.
        validated: Largest step whose validation its search has seen, or -1.
        early_exit: Reason that its script gave for giving up, or None.
        status: What its script says it is doing.
        warm_start: Checkpoint that it starts from while it has none of its own, or None.
        last_activity: Last sign of life of an unmanaged trial.
        steps: Largest step that counts; 0 if there is none.
        latest_step: Step of the latest validation, or None.
        best_step: Step of the best validation, or None.
        best: Value of the searched metric there; None also for NaN, which SQLite cannot store.
    """

    __tablename__ = "trials"
    __table_args__ = (UniqueConstraint("experiment_id", "request_id"), UniqueConstraint("experiment_id", "external_id"))

    id: Mapped[int] = mapped_column(Serial, primary_key=True, default=None)
    experiment_id: Mapped[int] = mapped_column(Reference, ForeignKey(Experiment.id))
    request_id: Mapped[str]
    task_id: Mapped[str] = mapped_column(unique=True)
    external_id: Mapped[str | None] = mapped_column(default=None)
    state: Mapped[str]
    hparams: Mapped[dict[str, Any]]
    seed: Mapped[int] = mapped_column(default=0)
    run_id: Mapped[int] = mapped_column(default=0)
    restarts: Mapped[int] = mapped_column(default=0)
    closed: Mapped[bool] = mapped_column(default=False)
    reopened: Mapped[bool] = mapped_column(default=False)
    validated: Mapped[int] = mapped_column(default=-1)
    early_exit: Mapped[str | None] = mapped_column(default=None)
    status: Mapped[str] = mapped_column(default="")
    progress: Mapped[float] = mapped_column(default=0.0)
    warm_start: Mapped[str | None] = mapped_column(default=None)
    unmanaged: Mapped[bool] = mapped_column(default=False)
    error: Mapped[str | None] = mapped_column(default=None)
    last_activity: Mapped[float | None] = mapped_column(default=None)
    start_time: Mapped[float] = mapped_column(default_factory=_clock.now)
    end_time: Mapped[float | None] = mapped_column(default=None)
    steps: Mapped[int] = mapped_column(default=0, server_default="0")
    latest_step: Mapped[int | None] = mapped_column(default=None)
    best_step: Mapped[int | None] = mapped_column(default=None)
    best: Mapped[float | None] = mapped_column(default=None)


class Allocation(Base, kw_only=True):
    """Run of a trial on its slots.

    Attributes:
        id: ``{task_id}.{run_id}``.
        run_id: Number of the run, ``trial_run_id`` on the wire.
        state: RUNNING or ENDED.
        steps_completed: Step of ``latest_checkpoint``.
        latest_checkpoint: Checkpoint that it started from, or None.
        preempt_time: Time of its preemption, or None.
        acked: Whether its script has noticed that, or stops by itself.
        kill_time: Time at which the master killed it, or None.
        exit_kind: Class of its end (§13.3).
        exit_status: Exit status; None where a signal ended it or nothing is known.
        facts: How it was launched: digest of its claim code, claims, name that the engine has for it; and the storage
            that its script chose.
        end_time: Time of its end; None while it runs.
    """

    __tablename__ = "allocations"
    __table_args__ = (UniqueConstraint("trial_id", "run_id"), Index(None, "state"))

    id: Mapped[str] = mapped_column(primary_key=True)
    trial_id: Mapped[int] = mapped_column(Reference, ForeignKey(Trial.id))
    run_id: Mapped[int]
    state: Mapped[str]
    slots: Mapped[int] = mapped_column(default=0)
    slot_ids: Mapped[list[int]] = mapped_column(default_factory=list)
    steps_completed: Mapped[int] = mapped_column(default=0)
    latest_checkpoint: Mapped[str | None] = mapped_column(default=None)
    preempt_time: Mapped[float | None] = mapped_column(default=None)
    preempt_reason: Mapped[str | None] = mapped_column(default=None)
    acked: Mapped[bool] = mapped_column(default=False)
    kill_time: Mapped[float | None] = mapped_column(default=None)
    kill_reason: Mapped[str | None] = mapped_column(default=None)
    exit_kind: Mapped[str | None] = mapped_column(default=None)
    exit_status: Mapped[int | None] = mapped_column(default=None)
    exit_signal: Mapped[int | None] = mapped_column(default=None)
    exit_detail: Mapped[str | None] = mapped_column(default=None)
    facts: Mapped[dict[str, Any]] = mapped_column(default_factory=dict)
    create_time: Mapped[float] = mapped_column(default_factory=_clock.now)
    start_time: Mapped[float | None] = mapped_column(default=None)
    end_time: Mapped[float | None] = mapped_column(default=None)


class Operation(Base, kw_only=True):
    """Operation of a trial: train to a length, counted from the trial's start, then report a metric.

    The last one, by its ordinal from 0, is the current one.
    """

    __tablename__ = "operations"

    trial_id: Mapped[int] = mapped_column(Reference, ForeignKey(Trial.id), primary_key=True)
    ordinal: Mapped[int] = mapped_column(primary_key=True)
    length: Mapped[int]
    completed: Mapped[bool] = mapped_column(default=False)
    metric: Mapped[Any] = mapped_column(nullable=True, default=None)
    create_time: Mapped[float] = mapped_column(default_factory=_clock.now)
    end_time: Mapped[float | None] = mapped_column(default=None)


class SearcherEvent(Base, kw_only=True):
    """Event that a search received, and the actions that it decided on; None for none taken yet."""

    __tablename__ = "searcher_events"

    experiment_id: Mapped[int] = mapped_column(Reference, ForeignKey(Experiment.id), primary_key=True)
    ordinal: Mapped[int] = mapped_column(primary_key=True)
    event: Mapped[dict[str, Any]]
    actions: Mapped[list[dict[str, Any]] | None]
    time: Mapped[float] = mapped_column(default_factory=_clock.now)


class Token(Base, kw_only=True):
    """Digest of a token, and its owner; ``kind`` is ``user`` or ``allocation``."""

    __tablename__ = "tokens"

    digest: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    allocation_id: Mapped[str | None] = mapped_column(index=True, default=None)
    trial_id: Mapped[int | None] = mapped_column(default=None)
    experiment_id: Mapped[int | None] = mapped_column(default=None)
    create_time: Mapped[float] = mapped_column(default_factory=_clock.now)


class Context(Base, kw_only=True):
    """Context archive, stored once for all experiments that it belongs to; ``digest`` is sha256 in hex."""

    __tablename__ = "contexts"

    digest: Mapped[str] = mapped_column(primary_key=True)
    content: Mapped[bytes] = mapped_column(LargeBinary)
    size: Mapped[int]
    create_time: Mapped[float] = mapped_column(default_factory=_clock.now)


class Storage(Base, kw_only=True):
    """Checkpoint storage (§5.1); equal configurations have one ID."""

    __tablename__ = "storages"

    id: Mapped[int] = mapped_column(Serial, primary_key=True, default=None)
    digest: Mapped[str] = mapped_column(unique=True)
    config: Mapped[dict[str, Any]]


class RunMetadata(Base, kw_only=True):
    """Metadata that the script of a trial set (§5.4)."""

    __tablename__ = "run_metadata"

    trial_id: Mapped[int] = mapped_column(Reference, ForeignKey(Trial.id), primary_key=True)
    # Declarative classes have an attribute ``metadata`` of their own.
    values: Mapped[dict[str, Any]] = mapped_column("metadata")
    time: Mapped[float] = mapped_column(default_factory=_clock.now)


class KeyValue(Base, kw_only=True):
    """Value of the master itself, such as the version that wrote the database."""

    __tablename__ = "key_values"

    key: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[Any] = mapped_column(nullable=True)


class Checkpoint(Base, kw_only=True):
    """Checkpoint whose files are in a storage (§5.7).

    Attributes:
        storage_id: Storage that it is in; None for that of its experiment's configuration.
        user_metadata: Metadata that the master answers.
        resources: Bytes of each file by its path.
        size: Sum of these.
        reported: Digest of its first report, by which a repeat is recognized.
    """

    __tablename__ = "checkpoints"

    uuid: Mapped[str] = mapped_column(primary_key=True)
    experiment_id: Mapped[int] = mapped_column(Reference, ForeignKey(Experiment.id), index=True)
    trial_id: Mapped[int] = mapped_column(Reference, ForeignKey(Trial.id), index=True)
    task_id: Mapped[str]
    allocation_id: Mapped[str | None] = mapped_column(default=None)
    storage_id: Mapped[int | None] = mapped_column(default=None)
    state: Mapped[str]
    # Declarative classes have an attribute ``metadata`` of their own.
    user_metadata: Mapped[dict[str, Any]] = mapped_column("metadata")
    resources: Mapped[dict[str, int]]
    size: Mapped[int]
    steps_completed: Mapped[int]
    report_time: Mapped[float] = mapped_column(default_factory=_clock.now)
    reported: Mapped[str]


class Metric(Base, kw_only=True):
    """Row of metrics, identified by (trial, run, restart, rank, seq); never an object, one statement writes a batch.

    The group and the step stand before these in the key, which makes the table itself the series.
    """

    __tablename__ = "metrics"
    __table_args__ = ({"sqlite_with_rowid": False},)

    trial_id: Mapped[int] = mapped_column(Reference, primary_key=True)
    grp: Mapped[str] = mapped_column(Text, primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(primary_key=True)
    restart: Mapped[int] = mapped_column(primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[float]
    metrics: Mapped[str] = mapped_column(Text)
    batch_metrics: Mapped[str | None] = mapped_column(Text)


class Record(Base, kw_only=True):
    """Record of a journal that is not metrics."""

    __tablename__ = "records"
    __table_args__ = ({"sqlite_with_rowid": False},)

    trial_id: Mapped[int] = mapped_column(Reference, primary_key=True)
    run_id: Mapped[int] = mapped_column(primary_key=True)
    restart: Mapped[int] = mapped_column(primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    time: Mapped[float]
    body: Mapped[dict[str, Any]]


class Steps(NamedTuple):
    """Steps that a process has reported in a group.

    All are minima and maxima, so that records may arrive again and in any order.

    Attributes:
        first_seq: Smallest sequence number of a row with a step.
        first: Step of that row.
        low: Smallest step.
        high: Largest step.
    """

    first_seq: int
    first: int
    low: int
    high: int

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int]]) -> Steps | None:
        """Return the steps of rows, given as sequence number and step; None if none of them has a step."""
        own = [row for row in rows if row[1] != NO_STEP]
        if not own:
            return None
        numbers = [step for _, step in own]
        return cls(*min(own), min(numbers), max(numbers))

    def merged(self, other: Steps) -> Steps:
        """Return the steps of the rows of both."""
        return Steps(*min(self[:2], other[:2]), min(self.low, other.low), max(self.high, other.high))


class Writer(Base, kw_only=True):
    """One reporting process of a trial; or, with the rank :data:`REPORTED`, the one-report route of a run.

    Attributes:
        next_seq: Sequence number after the largest that was received.
        restored: Smallest step of a checkpoint that it restored, or None.
        groups: :class:`Steps` by group as lists; four times None for a group that was reported without steps.
    """

    __tablename__ = "writers"
    __table_args__ = ({"sqlite_with_rowid": False},)

    trial_id: Mapped[int] = mapped_column(Reference, primary_key=True)
    run_id: Mapped[int] = mapped_column(primary_key=True)
    restart: Mapped[int] = mapped_column(primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    next_seq: Mapped[int] = mapped_column(default=0)
    restored: Mapped[int | None] = mapped_column(default=None)
    groups: Mapped[dict[str, Any]] = mapped_column(default_factory=dict)

    @property
    def attempt(self) -> tuple[int, int]:
        """Run and restart; a later one continues where an earlier one ended."""
        return self.run_id, self.restart

    @property
    def steps(self) -> dict[str, Steps]:
        """Steps by group, of those that were reported with any."""
        return {name: Steps(*numbers) for name, numbers in self.groups.items() if numbers[0] is not None}

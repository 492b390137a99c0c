"""The tables of experiments and of what runs for them. Reports (metrics, logs, checkpoints) are in ``_reports``.

A column is what the row type of the same name says; the row types stand beside their functions.
"""

from __future__ import annotations

from sqlalchemy import Boolean, Column, Double, ForeignKey, Index, LargeBinary, MetaData, Table, UniqueConstraint

from det_core.master.store._types import Int, Json, Serial, Time, Words

METADATA = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

EXPERIMENTS = Table(
    "experiments",
    METADATA,
    Column("id", Serial, primary_key=True),
    Column("state", Words, nullable=False),
    Column("name", Words, nullable=False),
    Column("description", Words, nullable=False),
    Column("labels", Json, nullable=False),
    Column("config", Json, nullable=False),
    Column("original_config", Words, nullable=False),
    Column("warnings", Json, nullable=False),
    Column("context", Words),
    Column("seed", Int, nullable=False),
    Column("priority", Int, nullable=False),
    Column("progress", Time, nullable=False),
    Column("archived", Boolean, nullable=False),
    Column("unmanaged", Boolean, nullable=False),
    Column("parent_id", Int),
    Column("external_id", Words, unique=True),
    Column("error", Words),
    Column("start_time", Time, nullable=False),
    Column("end_time", Time),
)

TRIALS = Table(
    "trials",
    METADATA,
    Column("id", Serial, primary_key=True),
    Column("experiment_id", Int, ForeignKey(EXPERIMENTS.c.id), nullable=False),
    Column("request_id", Words, nullable=False),
    Column("task_id", Words, nullable=False, unique=True),
    Column("external_id", Words),
    Column("state", Words, nullable=False),
    Column("hparams", Json, nullable=False),
    Column("seed", Int, nullable=False),
    Column("run_id", Int, nullable=False),
    Column("restarts", Int, nullable=False),
    Column("closed", Boolean, nullable=False),
    Column("reopened", Boolean, nullable=False),
    Column("validated", Int, nullable=False),
    Column("early_exit", Words),
    Column("status", Words, nullable=False),
    Column("progress", Time, nullable=False),
    Column("warm_start", Words),
    Column("unmanaged", Boolean, nullable=False),
    Column("error", Words),
    Column("last_activity", Time),
    Column("start_time", Time, nullable=False),
    Column("end_time", Time),
    Column("steps", Int, nullable=False, server_default="0"),
    Column("latest_step", Int),
    Column("best_step", Int),
    Column("best", Double),
    UniqueConstraint("experiment_id", "request_id"),
    UniqueConstraint("experiment_id", "external_id"),
)

ALLOCATIONS = Table(
    "allocations",
    METADATA,
    Column("id", Words, primary_key=True),
    Column("trial_id", Int, ForeignKey(TRIALS.c.id), nullable=False),
    Column("run_id", Int, nullable=False),
    Column("state", Words, nullable=False),
    Column("slots", Int, nullable=False),
    Column("slot_ids", Json, nullable=False),
    Column("steps_completed", Int, nullable=False),
    Column("latest_checkpoint", Words),
    Column("ready", Boolean, nullable=False),
    Column("preempt_time", Time),
    Column("preempt_reason", Words),
    Column("acked", Boolean, nullable=False),
    Column("kill_time", Time),
    Column("kill_reason", Words),
    Column("exit_kind", Words),
    Column("exit_status", Int),
    Column("exit_signal", Int),
    Column("exit_detail", Words),
    Column("facts", Json, nullable=False),
    Column("create_time", Time, nullable=False),
    Column("start_time", Time),
    Column("end_time", Time),
    UniqueConstraint("trial_id", "run_id"),
    Index(None, "state"),
)

OPERATIONS = Table(
    "operations",
    METADATA,
    Column("trial_id", Int, ForeignKey(TRIALS.c.id), primary_key=True),
    Column("ordinal", Int, primary_key=True, autoincrement=False),
    Column("length", Int, nullable=False),
    Column("completed", Boolean, nullable=False),
    Column("metric", Json),
    Column("create_time", Time, nullable=False),
    Column("end_time", Time),
)

SEARCHER_EVENTS = Table(
    "searcher_events",
    METADATA,
    Column("experiment_id", Int, ForeignKey(EXPERIMENTS.c.id), primary_key=True),
    Column("ordinal", Int, primary_key=True, autoincrement=False),
    Column("event", Json, nullable=False),
    Column("actions", Json),
    Column("time", Time, nullable=False),
)

TOKENS = Table(
    "tokens",
    METADATA,
    Column("digest", Words, primary_key=True),
    Column("kind", Words, nullable=False),
    Column("allocation_id", Words, index=True),
    Column("trial_id", Int),
    Column("experiment_id", Int),
    Column("create_time", Time, nullable=False),
)

CONTEXTS = Table(
    "contexts",
    METADATA,
    Column("digest", Words, primary_key=True),
    Column("content", LargeBinary, nullable=False),
    Column("size", Int, nullable=False),
    Column("create_time", Time, nullable=False),
)

STORAGES = Table(
    "storages",
    METADATA,
    Column("id", Serial, primary_key=True),
    Column("digest", Words, nullable=False, unique=True),
    Column("config", Json, nullable=False),
)

RUN_METADATA = Table(
    "run_metadata",
    METADATA,
    Column("trial_id", Int, ForeignKey(TRIALS.c.id), primary_key=True),
    Column("metadata", Json, nullable=False),
    Column("time", Time, nullable=False),
)

KEY_VALUES = Table(
    "key_values",
    METADATA,
    Column("key", Words, primary_key=True),
    Column("value", Json),
)

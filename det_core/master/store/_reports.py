"""The tables of what trials report: metrics, other records of their journals, checkpoints, logs."""

from __future__ import annotations

from sqlalchemy import Column, ForeignKey, Index, Table, Text

from det_core.master.store._schema import EXPERIMENTS, METADATA, TRIALS
from det_core.master.store._types import Int, Json, Serial, Time, Words

NO_STEP = 2**63 - 1
"""Stands for a row without a step, so that it comes after all others."""

METRICS = Table(
    "metrics",
    METADATA,
    Column("trial_id", Int, primary_key=True, autoincrement=False),
    Column("grp", Text, primary_key=True),
    Column("step", Int, primary_key=True, autoincrement=False),
    Column("run_id", Int, primary_key=True, autoincrement=False),
    Column("restart", Int, primary_key=True, autoincrement=False),
    Column("rank", Int, primary_key=True, autoincrement=False),
    Column("seq", Int, primary_key=True, autoincrement=False),
    Column("time", Time, nullable=False),
    Column("metrics", Text, nullable=False),
    Column("batch_metrics", Text),
    sqlite_with_rowid=False,
)
"""A row is known by (trial, run, restart, rank, seq). Group and step before these make the table itself the series."""

WRITERS = Table(
    "writers",
    METADATA,
    Column("trial_id", Int, primary_key=True, autoincrement=False),
    Column("run_id", Int, primary_key=True, autoincrement=False),
    Column("restart", Int, primary_key=True, autoincrement=False),
    Column("rank", Int, primary_key=True, autoincrement=False),
    Column("next_seq", Int, nullable=False),
    Column("restored", Int),
    Column("groups", Text, nullable=False),
    sqlite_with_rowid=False,
)
"""A process that reports: how far its records have come, and what decides which rows of earlier ones still count."""

RECORDS = Table(
    "records",
    METADATA,
    Column("trial_id", Int, primary_key=True, autoincrement=False),
    Column("run_id", Int, primary_key=True, autoincrement=False),
    Column("restart", Int, primary_key=True, autoincrement=False),
    Column("rank", Int, primary_key=True, autoincrement=False),
    Column("seq", Int, primary_key=True, autoincrement=False),
    Column("kind", Words, nullable=False),
    Column("time", Time, nullable=False),
    Column("body", Json, nullable=False),
    sqlite_with_rowid=False,
)

CHECKPOINTS = Table(
    "checkpoints",
    METADATA,
    Column("uuid", Words, primary_key=True),
    Column("experiment_id", Int, ForeignKey(EXPERIMENTS.c.id), nullable=False, index=True),
    Column("trial_id", Int, ForeignKey(TRIALS.c.id), nullable=False, index=True),
    Column("task_id", Words, nullable=False),
    Column("allocation_id", Words),
    Column("storage_id", Int),
    Column("state", Words, nullable=False),
    Column("metadata", Json, nullable=False),
    Column("resources", Json, nullable=False),
    Column("size", Int, nullable=False),
    Column("steps_completed", Int, nullable=False),
    Column("report_time", Time, nullable=False),
    Column("reported", Words, nullable=False),
)

LOGS = Table(
    "logs",
    METADATA,
    Column("id", Serial, primary_key=True),
    Column("task_id", Words, nullable=False),
    Column("allocation_id", Words),
    Column("agent_id", Words),
    Column("container_id", Words),
    Column("rank", Int),
    Column("timestamp", Time, nullable=False),
    Column("level", Words, nullable=False),
    Column("stdtype", Words, nullable=False),
    Column("source", Words, nullable=False),
    Column("log", Words, nullable=False),
    Index(None, "task_id", "id"),
    sqlite_autoincrement=True,
)

"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make every table."""
    _contexts()
    _experiments()
    _key_values()
    _lineage()
    _log_offsets()
    _logs()
    _metrics()
    _records()
    _storages()
    _tokens()
    _writers()
    _alerts()
    _searcher_events()
    _searcher_snapshots()
    _trials()
    _allocations()
    _checkpoints()
    _operations()
    _run_metadata()


def _contexts() -> None:
    op.create_table(
        "contexts",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_contexts"),
    )


def _experiments() -> None:
    op.create_table(
        "experiments",
        sa.Column("id", SERIAL, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("original_config", sa.Text(), nullable=False),
        sa.Column("warnings", sa.Text(), nullable=False),
        sa.Column("context", sa.Text(), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("priority", sa.BigInteger(), nullable=False),
        sa.Column("progress", sa.Double(), nullable=False),
        sa.Column("archived", sa.Boolean(), nullable=False),
        sa.Column("unmanaged", sa.Boolean(), nullable=False),
        sa.Column("parent_id", sa.BigInteger(), nullable=True),
        sa.Column("external_id", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("start_time", sa.Double(), nullable=False),
        sa.Column("end_time", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_experiments"),
        sa.UniqueConstraint("external_id", name="uq_experiments_external_id"),
    )


def _key_values() -> None:
    op.create_table(
        "key_values",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("key", name="pk_key_values"),
    )


def _lineage() -> None:
    op.create_table(
        "lineage",
        sa.Column("trial_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("checkpoint_uuid", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("model_id", sa.Text(), nullable=True),
        sa.Column("model_version", sa.BigInteger(), nullable=True),
        sa.Column("time", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("trial_id", "checkpoint_uuid", "kind", name="pk_lineage"),
    )


def _log_offsets() -> None:
    op.create_table(
        "log_offsets",
        sa.Column("allocation_id", sa.Text(), nullable=False),
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("offset", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("allocation_id", "stream", name="pk_log_offsets"),
    )


def _logs() -> None:
    op.create_table(
        "logs",
        sa.Column("id", SERIAL, nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("allocation_id", sa.Text(), nullable=True),
        sa.Column("agent_id", sa.Text(), nullable=True),
        sa.Column("container_id", sa.Text(), nullable=True),
        sa.Column("rank", sa.BigInteger(), nullable=True),
        sa.Column("timestamp", sa.Double(), nullable=False),
        sa.Column("level", sa.Text(), nullable=False),
        sa.Column("stdtype", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("log", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_logs"),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_logs_task_id_id"), "logs", ["task_id", "id"], unique=False)


def _metrics() -> None:
    op.create_table(
        "metrics",
        sa.Column("trial_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("grp", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("run_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("restart", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("batch_metrics", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("trial_id", "grp", "step", "run_id", "restart", "rank", "seq", name="pk_metrics"),
        sqlite_with_rowid=False,
    )


def _records() -> None:
    op.create_table(
        "records",
        sa.Column("trial_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("run_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("restart", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("trial_id", "run_id", "restart", "rank", "seq", name="pk_records"),
        sqlite_with_rowid=False,
    )


def _storages() -> None:
    op.create_table(
        "storages",
        sa.Column("id", SERIAL, nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_storages"),
        sa.UniqueConstraint("digest", name="uq_storages_digest"),
    )


def _tokens() -> None:
    op.create_table(
        "tokens",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("allocation_id", sa.Text(), nullable=True),
        sa.Column("trial_id", sa.BigInteger(), nullable=True),
        sa.Column("experiment_id", sa.BigInteger(), nullable=True),
        sa.Column("create_time", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_tokens"),
    )
    op.create_index(op.f("ix_tokens_allocation_id"), "tokens", ["allocation_id"], unique=False)


def _writers() -> None:
    op.create_table(
        "writers",
        sa.Column("trial_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("run_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("restart", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("next_seq", sa.BigInteger(), nullable=False),
        sa.Column("restored", sa.BigInteger(), nullable=True),
        sa.Column("groups", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("trial_id", "run_id", "restart", "rank", name="pk_writers"),
        sqlite_with_rowid=False,
    )


def _alerts() -> None:
    op.create_table(
        "alerts",
        sa.Column("id", SERIAL, nullable=False),
        sa.Column("experiment_id", sa.BigInteger(), nullable=False),
        sa.Column("trial_id", sa.BigInteger(), nullable=True),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("level", sa.Text(), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["experiment_id"], ["experiments.id"], name="fk_alerts_experiment_id"),
        sa.PrimaryKeyConstraint("id", name="pk_alerts"),
    )
    op.create_index(op.f("ix_alerts_experiment_id"), "alerts", ["experiment_id"], unique=False)


def _searcher_events() -> None:
    op.create_table(
        "searcher_events",
        sa.Column("experiment_id", sa.BigInteger(), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("actions", sa.Text(), nullable=True),
        sa.Column("time", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["experiment_id"], ["experiments.id"], name="fk_searcher_events_experiment_id"),
        sa.PrimaryKeyConstraint("experiment_id", "ordinal", name="pk_searcher_events"),
    )


def _searcher_snapshots() -> None:
    op.create_table(
        "searcher_snapshots",
        sa.Column("experiment_id", sa.BigInteger(), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), nullable=False),
        sa.Column("snapshot", sa.Text(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["experiment_id"], ["experiments.id"], name="fk_searcher_snapshots_experiment_id"),
        sa.PrimaryKeyConstraint("experiment_id", name="pk_searcher_snapshots"),
    )


def _trials() -> None:
    op.create_table(
        "trials",
        sa.Column("id", SERIAL, nullable=False),
        sa.Column("experiment_id", sa.BigInteger(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("external_id", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("hparams", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("restarts", sa.BigInteger(), nullable=False),
        sa.Column("closed", sa.Boolean(), nullable=False),
        sa.Column("reopened", sa.Boolean(), nullable=False),
        sa.Column("validated", sa.BigInteger(), nullable=False),
        sa.Column("early_exit", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("progress", sa.Double(), nullable=False),
        sa.Column("warm_start", sa.Text(), nullable=True),
        sa.Column("unmanaged", sa.Boolean(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("last_activity", sa.Double(), nullable=True),
        sa.Column("start_time", sa.Double(), nullable=False),
        sa.Column("end_time", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["experiment_id"], ["experiments.id"], name="fk_trials_experiment_id"),
        sa.PrimaryKeyConstraint("id", name="pk_trials"),
        sa.UniqueConstraint("experiment_id", "external_id", name="uq_trials_experiment_id_external_id"),
        sa.UniqueConstraint("experiment_id", "request_id", name="uq_trials_experiment_id_request_id"),
        sa.UniqueConstraint("task_id", name="uq_trials_task_id"),
    )


def _allocations() -> None:
    op.create_table(
        "allocations",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("trial_id", sa.BigInteger(), nullable=False),
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("slots", sa.BigInteger(), nullable=False),
        sa.Column("slot_ids", sa.Text(), nullable=False),
        sa.Column("steps_completed", sa.BigInteger(), nullable=False),
        sa.Column("latest_checkpoint", sa.Text(), nullable=True),
        sa.Column("ready", sa.Boolean(), nullable=False),
        sa.Column("preempt_time", sa.Double(), nullable=True),
        sa.Column("preempt_reason", sa.Text(), nullable=True),
        sa.Column("acked", sa.Boolean(), nullable=False),
        sa.Column("kill_time", sa.Double(), nullable=True),
        sa.Column("kill_reason", sa.Text(), nullable=True),
        sa.Column("exit_kind", sa.Text(), nullable=True),
        sa.Column("exit_status", sa.BigInteger(), nullable=True),
        sa.Column("exit_signal", sa.BigInteger(), nullable=True),
        sa.Column("exit_detail", sa.Text(), nullable=True),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("create_time", sa.Double(), nullable=False),
        sa.Column("start_time", sa.Double(), nullable=True),
        sa.Column("end_time", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name="fk_allocations_trial_id"),
        sa.PrimaryKeyConstraint("id", name="pk_allocations"),
        sa.UniqueConstraint("trial_id", "run_id", name="uq_allocations_trial_id_run_id"),
    )
    op.create_index(op.f("ix_allocations_state"), "allocations", ["state"], unique=False)


def _checkpoints() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.Column("experiment_id", sa.BigInteger(), nullable=False),
        sa.Column("trial_id", sa.BigInteger(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("allocation_id", sa.Text(), nullable=True),
        sa.Column("storage_id", sa.BigInteger(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("resources", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("steps_completed", sa.BigInteger(), nullable=False),
        sa.Column("report_time", sa.Double(), nullable=False),
        sa.Column("reported", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["experiment_id"], ["experiments.id"], name="fk_checkpoints_experiment_id"),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name="fk_checkpoints_trial_id"),
        sa.PrimaryKeyConstraint("uuid", name="pk_checkpoints"),
    )
    op.create_index(op.f("ix_checkpoints_experiment_id"), "checkpoints", ["experiment_id"], unique=False)
    op.create_index(op.f("ix_checkpoints_trial_id"), "checkpoints", ["trial_id"], unique=False)


def _operations() -> None:
    op.create_table(
        "operations",
        sa.Column("trial_id", sa.BigInteger(), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("length", sa.BigInteger(), nullable=False),
        sa.Column("completed", sa.Boolean(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=True),
        sa.Column("create_time", sa.Double(), nullable=False),
        sa.Column("end_time", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name="fk_operations_trial_id"),
        sa.PrimaryKeyConstraint("trial_id", "ordinal", name="pk_operations"),
    )


def _run_metadata() -> None:
    op.create_table(
        "run_metadata",
        sa.Column("trial_id", sa.BigInteger(), nullable=False),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name="fk_run_metadata_trial_id"),
        sa.PrimaryKeyConstraint("trial_id", name="pk_run_metadata"),
    )

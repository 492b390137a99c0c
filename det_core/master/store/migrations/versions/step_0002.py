"""Best, latest and number of steps as columns of trials; no totals of metrics; alerts and lineage are lines of logs."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op
from sqlalchemy.orm import Session

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Change the tables, then fill the new columns from the rows of metrics."""
    # Not as a batch, which copies the table: SQLite refuses to drop one that others refer to.
    op.add_column("trials", sa.Column("steps", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("trials", sa.Column("latest_step", sa.BigInteger()))
    op.add_column("trials", sa.Column("best_step", sa.BigInteger()))
    op.add_column("trials", sa.Column("best", sa.Double()))
    op.drop_table("alerts")
    op.drop_table("lineage")
    op.drop_table("log_offsets")
    op.drop_table("searcher_snapshots")
    conn = op.get_bind()
    _drop_totals(conn)
    _fill_columns(conn)


def _drop_totals(conn: sa.Connection) -> None:
    """Keep of each group of a writer what later attempts are compared with."""
    keys = ("trial_id", "run_id", "restart", "rank")
    writers = sa.table("writers", *map(sa.column, (*keys, "groups")))
    for row in conn.execute(sa.select(writers)).all():
        groups = {
            name: [first_seq, first, low, high]
            for name, (_, _, first_seq, first, low, high, *_) in json.loads(row.groups).items()
        }
        same = sa.and_(*(writers.c[key] == getattr(row, key) for key in keys))
        conn.execute(sa.update(writers).where(same).values(groups=json.dumps(groups, separators=(",", ":"))))


def _fill_columns(conn: sa.Connection) -> None:
    from det_core.config import Experiment
    from det_core.master.store import validations

    experiments = sa.table("experiments", sa.column("id"), sa.column("config"))
    names = ("id", "experiment_id", "steps", "latest_step", "best_step", "best")
    trials = sa.table("trials", *map(sa.column, names))
    session = Session(conn)
    for experiment_id, config in conn.execute(sa.select(experiments)).all():
        spec = Experiment(json.loads(config))
        for trial_id in (
            conn.execute(sa.select(trials.c.id).where(trials.c.experiment_id == experiment_id)).scalars().all()
        ):
            columns = validations.compute(session, trial_id, spec.metric, spec.smaller_is_better)
            conn.execute(sa.update(trials).where(trials.c.id == trial_id).values(vars(columns)))

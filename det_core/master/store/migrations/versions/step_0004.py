"""No labels of experiments, and none that are archived."""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Drop the columns."""
    op.drop_column("experiments", "labels")
    op.drop_column("experiments", "archived")

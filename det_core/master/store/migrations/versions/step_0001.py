"""The first schema. New databases are created whole, so this step only names what later ones start from."""

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Do nothing."""

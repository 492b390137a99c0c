"""Steps of the schema: a file each in ``versions``, run by alembic in the transaction that opens an older database."""

HEAD = "0004"
"""The newest step."""

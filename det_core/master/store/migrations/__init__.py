"""How the schema has changed: one file a step in ``versions``, run by alembic in the transaction that opens a store."""

HEAD = "0001"
"""The newest step."""

"""Program of alembic: the steps, on the connection of the store that is being opened."""

from alembic import context

from det_core.master.store import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    transactional_ddl=True,  # SQLite too takes a step back whole
    render_as_batch=True,
)
context.run_migrations()

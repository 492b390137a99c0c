"""Databases to test with: SQLite in the test's folder. tests/postgres runs what depends on the kind on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from det_core.master.store import Store, trials
from det_core.master.store._database import parse, writing_engine
from det_core.master.store.models import Experiment
from support import schema


@pytest.fixture
def empty_url(tmp_path: Path) -> str:
    """Return the URL of an empty database."""
    return f"sqlite:///{tmp_path}/master/master.db"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the URL of a database with the newest schema and nothing else in it."""
    schema.place(tmp_path / "master" / "master.db")
    return f"sqlite:///{tmp_path}/master/master.db"


@pytest.fixture
def session(url: str) -> Iterator[Session]:
    """Yield a session that writes, in one transaction for the whole test."""
    engine = writing_engine(parse(url))
    with Session(engine, expire_on_commit=False) as session:
        yield session
        session.commit()
    engine.dispose()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Yield a database for many examples, each of which rolls back its changes."""
    path = tmp_path_factory.mktemp("store") / "scratch.db"
    schema.place(path)
    engine = writing_engine(parse(f"sqlite:///{path}"))
    engine.connect().close()
    yield engine
    engine.dispose()


@pytest.fixture
def trial(session: Session) -> int:
    """Add a trial of an experiment, both with the ID 1."""
    return add_trial(session)


def add_trial(session: Session, **searcher: Any) -> int:
    """Add an experiment with a trial; return the trial's ID."""
    experiment = Experiment(state="ACTIVE", name="quickstart", config={"searcher": searcher})
    session.add(experiment)
    session.flush()
    return trials.create(session, experiment.id, "r1", state="ACTIVE", hparams={"lr": 0.1}).id


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """Yield an open store."""
    opened = Store.open(url)
    yield opened
    opened.close_now()

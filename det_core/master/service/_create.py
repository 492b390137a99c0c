"""New experiments: check, record, and begin their searches."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from det_core import _clock
from det_core.config import (
    ConfigError,
    Experiment,
    defines_name,
    entrypoint_scripts,
    entrypoint_trial,
    parse_experiment,
)
from det_core.master._errors import Conflict, Invalid, NotFound
from det_core.master.engines import check_archive, read_archived
from det_core.master.scheduler import DEFAULT_PRIORITY, State
from det_core.master.service import _queries, _show
from det_core.master.service._live import LiveExperiment
from det_core.master.service._search import employ
from det_core.master.service._search_workers import SearchWorker, make_search
from det_core.master.store import change, checkpoints, experiments, models
from det_core.search import Search, Started

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.service._actor import Transaction
    from det_core.master.service._state import ServiceState
    from det_core.protocol.records import ExperimentView


async def create_experiment(
    service: ServiceState,
    config: str | Mapping[str, Any],
    context: bytes | None = None,
    *,
    activate: bool = True,
    validate_only: bool = False,
    unmanaged: bool = False,
    parent_id: int | None = None,
    external_id: str | None = None,
    overrides: Sequence[str] = (),
) -> ExperimentView:
    """Create an experiment and return it; with ``validate_only`` it has ID 0.

    Args:
        service: State of the service.
        config: Configuration, as text (YAML or JSON) or parsed.
        context: Packed context directory (tar, gzip). Defaults to an empty one.
        activate: Whether it starts at once; else it is PAUSED.
        validate_only: Whether to check only that it could be created.
        unmanaged: Whether others run its trials (§9).
        parent_id: Experiment that it is derived from.
        external_id: ID chosen by the caller.
        overrides: Changes of the configuration, as ``a.b=v``.

    Raises:
        Invalid: If the configuration has errors, all listed in ``errors``, or the archive is unusable.
        NotFound: If the parent, or the trial or checkpoint of a warm start, does not exist.
        Conflict: If another experiment has this external ID.
    """
    drafted = await draft(service, config, context, overrides, unmanaged=unmanaged, keep=not validate_only)
    if validate_only:
        return _show.drafted(drafted.spec)
    number = await record(service, drafted, activate=activate, parent_id=parent_id, external_id=external_id)
    return await _queries.experiment(service, number)


async def put_experiment(
    service: ServiceState,
    external_id: str,
    config: str | Mapping[str, Any],
    *,
    unmanaged: bool = True,
    start_time: float | None = None,
) -> ExperimentView:
    """Return the experiment with an external ID, created if it does not exist.

    Args:
        service: State of the service.
        external_id: ID chosen by the caller.
        config: Configuration of a new one.
        unmanaged: Whether others run the trials of a new one.
        start_time: When the training of an unmanaged one began, if that was before now.

    Raises:
        Invalid: If the configuration has errors.
        Conflict: If the experiment was deleted.
    """

    def find(session: Session) -> models.Experiment | None:
        return experiments.by_external_id(session, external_id)

    row = await service.store.read(find)
    if row is None:
        with suppress(Conflict):  # another request has just created it
            await create_experiment(service, config, unmanaged=unmanaged, external_id=external_id)
        row = await service.store.read(find)
    # The name stays taken: a script that comes back must not begin anew unnoticed.
    if row is None or row.state == State.DELETED:
        raise Conflict(f"the experiment of the external id {external_id!r} was deleted; choose another one")
    number = row.id
    if start_time is not None and row.unmanaged:
        await service.store.write(lambda session: change(session, models.Experiment, number, start_time=start_time))
    return await _queries.experiment(service, number)


@dataclass(frozen=True)
class Draft:
    """An experiment that could be created.

    Attributes:
        spec: its configuration.
        original: the text it was made from.
        context: the digest of its context directory, which is kept already.
        search: its search, before its first event; None for an unmanaged one, and for one that is not to be created.
        warm_start: the checkpoint that its trials start from.
    """

    spec: Experiment
    original: str
    context: str | None
    search: Search | SearchWorker | None
    warm_start: str | None


def read_config(
    service: ServiceState, config: str | Mapping[str, Any], overrides: Sequence[str], *, unmanaged: bool
) -> Experiment:
    """Return a complete configuration.

    Raises:
        Invalid: If it has errors, all listed in ``errors``.
    """
    try:
        spec = parse_experiment(
            config,
            overrides=overrides,
            defaults={"checkpoint_storage": service.settings.default_storage},
            # The wire contract's default (§11): the time of the submission.
            default_seed=int(_clock.now()) & 0x7FFFFFFF,
            managed=not unmanaged,
        )
    except ConfigError as e:
        raise Invalid(str(e)) from None
    if not unmanaged and spec.max_slots is not None and spec.max_slots < spec.slots_per_trial:
        raise Invalid(
            f"resources.max_slots is {spec.max_slots}: a trial of {spec.slots_per_trial} slot(s) could never start"
        )
    pool = service.engine.pool
    wanted = spec.slots_per_trial
    # A cluster that queues may get more nodes; this machine gets no more slots.
    if not unmanaged and not pool.queues and wanted > pool.slots:
        raise Invalid(
            f"resources.slots_per_trial is {wanted}: this master has {pool.slots} slot(s); for more, "
            f"det-core master down, and det-core master up --slots {wanted}"
        )
    return spec


async def draft(
    service: ServiceState,
    config: str | Mapping[str, Any],
    context: bytes | None,
    overrides: Sequence[str],
    *,
    unmanaged: bool,
    keep: bool = True,
) -> Draft:
    """Check that an experiment can be created; with ``keep`` its context directory is stored already."""
    spec = await asyncio.to_thread(read_config, service, config, overrides, unmanaged=unmanaged)
    if unmanaged:
        return Draft(spec, _text(config), None, None, None)
    digest = None
    files: frozenset[str] = frozenset()
    if context:
        files = await asyncio.to_thread(check_archive, io.BytesIO(context))
        if keep:
            # Stored by itself: it may be large, and decisions wait for their transaction.
            digest = await service.store.write(lambda session: add_context(session, context))
    warm_start = await service.store.read(lambda session: _warm_start(session, spec))
    # Parsing a large module takes long.
    await asyncio.to_thread(_check_trial_class, spec, files, context)
    # Last, so that nothing can fail while its process waits for an experiment.
    search: Search | SearchWorker | None = await make_search(service, spec, digest, context)
    if isinstance(search, SearchWorker) and not keep:
        await search.close()
        search = None
    spec = replace(spec, warnings=(*spec.warnings, *_missing_scripts(spec, files)))
    return Draft(spec, _text(config), digest, search, warm_start)


def add_context(session: Session, content: bytes) -> str:
    """Store a context archive, once for all experiments that it belongs to; return its digest."""
    digest = hashlib.sha256(content).hexdigest()
    if session.scalar(select(models.Context.size).where(models.Context.digest == digest)) is None:
        session.add(models.Context(digest=digest, content=content, size=len(content)))
    return digest


def _check_trial_class(spec: Experiment, files: frozenset[str], context: bytes | None) -> None:
    """Check that the class of the entrypoint is in the context directory; nothing is imported.

    Raises:
        Invalid: If it certainly is not, and no startup hook makes it.
    """
    found = entrypoint_trial(spec.entrypoint or "")
    if "startup-hook.sh" in files:
        return
    if found is None:
        module, _, name = str(spec.entrypoint).rpartition(".")
        if name.isidentifier() and f"{module.replace('.', '/')}.py" in files and name != "py":
            raise Invalid(f"entrypoint: {spec.entrypoint} is not a command; a trial class is written {module}:{name}")
        return
    module, name = found
    paths = [f"{module.replace('.', '/')}{end}" for end in (".py", "/__init__.py")]
    path = next((path for path in paths if path in files), None)
    if path is None:
        raise Invalid(f"entrypoint: {module}:{name} needs {paths[0]}, and {_no_such_file(files)}")
    assert context is not None
    if not defines_name(read_archived(io.BytesIO(context), path).decode(errors="replace"), name):
        raise Invalid(f"entrypoint: {module}:{name} needs a class {name}, and {path} has none")


def _missing_scripts(spec: Experiment, files: frozenset[str]) -> list[str]:
    """Return a warning for each script of the entrypoint that is not in the context directory."""
    if "startup-hook.sh" in files:
        return []
    missing = [name for name in entrypoint_scripts(spec.entrypoint or "") if name not in files]
    return [f"entrypoint names {name}, and {_no_such_file(files)}" for name in missing]


def _no_such_file(files: frozenset[str]) -> str:
    message = "there is no such file in the context directory"
    if not files:
        message += ", which is empty; name the folder with it: det-core experiment create CONFIG DIR"
    return message


def _text(config: str | Mapping[str, Any]) -> str:
    if isinstance(config, str):
        return config
    import json

    return json.dumps(config, indent=2)


def _warm_start(session: Session, spec: Experiment) -> str | None:
    """Return the ID of the checkpoint that trials without one of their own start from (§13.6)."""
    if spec.source_trial_id is not None:
        if session.get(models.Trial, spec.source_trial_id) is None:
            raise NotFound(f"searcher.source_trial_id: there is no trial {spec.source_trial_id}")
        latest = checkpoints.latest(session, spec.source_trial_id)
        if latest is None:
            raise Invalid(f"searcher.source_trial_id: trial {spec.source_trial_id} has no checkpoint")
        return latest.uuid
    if spec.source_checkpoint_uuid is not None:
        found = session.get(models.Checkpoint, spec.source_checkpoint_uuid)
        if found is None:
            raise NotFound(f"searcher.source_checkpoint_uuid: checkpoint {spec.source_checkpoint_uuid} not found")
        if found.state != checkpoints.COMPLETED:
            raise Invalid(f"searcher.source_checkpoint_uuid: checkpoint {found.uuid} is {found.state}")
        return found.uuid
    return None


def _check_warm_start(session: Session, uuid: str | None) -> None:
    """Refuse a start from a checkpoint that was deleted, or began to be, since the experiment was drafted."""
    if uuid is None:
        return
    is_whole = models.Checkpoint.state == checkpoints.COMPLETED
    found = select(models.Checkpoint.uuid).where(models.Checkpoint.uuid == uuid, is_whole)
    found = found.join(models.Experiment).where(models.Experiment.state != State.DELETING)
    if session.scalar(found) is None:
        raise Invalid(f"checkpoint {uuid}, which trials are to start from, was deleted")


async def record(
    service: ServiceState, drafted: Draft, *, activate: bool, parent_id: int | None, external_id: str | None
) -> int:
    """Record a drafted experiment and begin its search; return its ID.

    Raises:
        Conflict: If another experiment has this external ID.
        NotFound: If the parent does not exist.
    """
    try:
        # Before it is decided, as a refusal then has the live state made anew.
        await service.store.read(lambda session: _check_ids(session, external_id, parent_id))
        return await service.actor.do(
            lambda tx: _record(service, tx, drafted, activate=activate, parent_id=parent_id, external_id=external_id)
        )
    except BaseException:
        if isinstance(drafted.search, SearchWorker):
            # Nobody else knows the process of a search whose experiment was refused.
            await drafted.search.close()
        raise


def _check_ids(session: Session, external_id: str | None, parent_id: int | None) -> None:
    if external_id is not None and experiments.by_external_id(session, external_id) is not None:
        raise Conflict(f"an experiment of the external id {external_id!r} stands already")
    if parent_id is not None and session.get(models.Experiment, parent_id) is None:
        raise NotFound(f"parent experiment {parent_id} not found")


def _record(
    service: ServiceState,
    tx: Transaction,
    drafted: Draft,
    *,
    activate: bool,
    parent_id: int | None,
    external_id: str | None,
) -> int:
    spec = drafted.spec
    row = models.Experiment(
        id=service.live.new_experiment_id(),
        state=State.ACTIVE.value if activate else State.PAUSED.value,
        name=spec.name,
        description=spec.description or "",
        config=spec.data,
        original_config=drafted.original,
        warnings=list(spec.warnings),
        context=drafted.context,
        seed=spec.seed,
        priority=DEFAULT_PRIORITY if spec.priority is None else spec.priority,
        unmanaged=drafted.search is None,
        parent_id=parent_id,
        external_id=external_id,
    )
    tx.write(_check_ids, external_id, parent_id)
    tx.write(_check_warm_start, drafted.warm_start)
    tx.add(row)
    tx.publish(("experiment", row.id))
    if drafted.search is not None:
        experiment = LiveExperiment(row, spec, drafted.search, warm_start=drafted.warm_start)
        service.live.experiments[row.id] = experiment
        if isinstance(drafted.search, SearchWorker):
            tx.then(employ, service, row.id, drafted.search)
        experiment.pending.append(Started())
        service.live.touch(experiment)
    return row.id

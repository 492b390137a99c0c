"""Access to experiments, trials and allocations: owners of tokens, what exists, and which run may report."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, TypedDict

from sqlalchemy import select

from det_core.master._errors import Fenced, Invalid, NotFound, WrongState
from det_core.master.store import models

if TYPE_CHECKING:
    from det_core.master.service._live import LiveAllocation, LiveExperiment, LiveTrial
    from det_core.master.service._state import ServiceState


MAX_IDENTITIES = 1000
"""Cached owners of tokens after which those whose allocations have ended are dropped."""


class TokenView(TypedDict):
    """Owner of the token of an allocation."""

    allocation_id: str
    task_id: str
    trial_id: int
    experiment_id: int


async def identify(service: ServiceState, token: str) -> TokenView | None:
    """Return the owner of a token; None if the token is invalid, or its allocation has ended.

    Every request asks. A cached owner counts only while its allocation lives: the token is revoked at its end.
    """
    cached = service.identities.get(token)
    if cached is not None and cached["allocation_id"] in service.live.allocations:
        return cached
    # The database has no token that could be used by whoever reads it.
    digest = hash_secret(token)
    row = await service.store.read(lambda session: session.get(models.Token, digest))
    if row is None or row.allocation_id is None or row.trial_id is None or row.experiment_id is None:
        service.identities.pop(token, None)
        return None
    owner = TokenView(
        allocation_id=row.allocation_id,
        task_id=row.allocation_id.rpartition(".")[0],
        trial_id=row.trial_id,
        experiment_id=row.experiment_id,
    )
    # Revoked ones are dropped all at once, now and then.
    if len(service.identities) >= MAX_IDENTITIES:
        service.identities = {
            t: i for t, i in service.identities.items() if i["allocation_id"] in service.live.allocations
        }
    service.identities[token] = owner
    return owner


def hash_secret(secret: str) -> str:
    """Return the digest that is stored of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


async def read_context(service: ServiceState, digest: str) -> bytes | None:
    """Return a context archive, or None."""
    archive = select(models.Context.content).where(models.Context.digest == digest)
    return await service.store.read(lambda session: session.scalar(archive))


def no_experiment(experiment_id: int) -> NotFound:
    """Return the error for an experiment that does not exist."""
    return NotFound(f"experiment {experiment_id} not found")


def no_trial(trial_id: int) -> NotFound:
    """Return the error for a trial that does not exist."""
    return NotFound(f"trial {trial_id} not found")


def no_task(task_id: str) -> NotFound:
    """Return the error for a task that does not exist."""
    return NotFound(f"task {task_id} not found")


async def experiment_row(service: ServiceState, experiment_id: int) -> models.Experiment:
    """Return an experiment as it is stored.

    Raises:
        NotFound: If it does not exist, or was deleted.
    """
    row = await service.store.read(lambda session: session.get(models.Experiment, experiment_id))
    if row is None or row.state == "DELETED":
        raise no_experiment(experiment_id)
    return row


async def trial_row(service: ServiceState, trial_id: int) -> models.Trial:
    """Return a trial as it is stored.

    Raises:
        NotFound: If it does not exist.
    """
    row = await service.store.read(lambda session: session.get(models.Trial, trial_id))
    if row is None:
        raise no_trial(trial_id)
    return row


async def not_live(service: ServiceState, experiment_id: int) -> WrongState:
    """Return the error for an experiment that is not among those that go on.

    Raises:
        NotFound: If it does not exist.
    """
    row = await experiment_row(service, experiment_id)
    if row.unmanaged:
        return WrongState(f"experiment {experiment_id} is unmanaged")
    return WrongState(f"experiment {experiment_id} has ended ({row.state})")


async def know_experiment(service: ServiceState, experiment_id: int) -> None:
    """Check that an experiment has not ended.

    Raises:
        NotFound: If it does not exist.
        WrongState: If it has ended, or is unmanaged.
    """
    if experiment_id not in service.live.experiments:
        raise await not_live(service, experiment_id)


def live_experiment(service: ServiceState, experiment_id: int) -> LiveExperiment:
    """Return an experiment that has not ended; for commands.

    Raises:
        WrongState: If it has ended meanwhile.
    """
    found = service.live.experiments.get(experiment_id)
    if found is None:
        raise WrongState(f"experiment {experiment_id} has ended")
    return found


def live_trial(service: ServiceState, trial_id: int, allocation_id: str | None = None) -> LiveTrial:
    """Return a trial that has not ended; for commands.

    Args:
        service: State of the service.
        trial_id: Trial.
        allocation_id: Allocation whose token was shown, None for the user's.

    Raises:
        Fenced: If the trial or the allocation has ended.
    """
    found = service.live.trials.get(trial_id)
    if found is None:
        raise Fenced(f"trial {trial_id} has ended")
    if allocation_id is not None and (found.allocation is None or found.allocation.id != allocation_id):
        raise Fenced(f"trial {trial_id}: allocation {allocation_id} has ended")
    return found


def check_run(trial: LiveTrial, trial_run_id: int) -> None:
    """Check that a run of a trial is the current one.

    Raises:
        Fenced: If it is over.
        Invalid: If it has never begun.
    """
    if trial_run_id > trial.row.run_id:
        raise Invalid(f"trial {trial.id} has no run {trial_run_id} yet: its newest is {trial.row.run_id}")
    if trial_run_id != trial.row.run_id or trial.allocation is None:
        raise Fenced(f"trial {trial.id}: run {trial_run_id} is over (the newest is {trial.row.run_id})")


async def know_trial(service: ServiceState, trial_id: int) -> None:
    """Check that a trial exists, ended or not.

    Raises:
        NotFound: If it does not.
    """
    if trial_id not in service.live.trials:
        await trial_row(service, trial_id)


def live_allocation(service: ServiceState, allocation_id: str) -> LiveAllocation:
    """Return an allocation that has not ended; for commands.

    Raises:
        Fenced: If it has ended.
    """
    found = service.live.allocations.get(allocation_id)
    if found is None:
        raise Fenced(f"allocation {allocation_id} has ended")
    return found

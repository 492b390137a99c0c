"""Tickets: the orders to run allocations, and what those who run them ask and hand over.

The code of a ticket lets one runner a node have the credentials of the allocation there. Codes and credentials are kept
as digests, with the allocation, so that a claim outlives the master and cannot be made twice.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from det_core._standalone.files import write_atomic
from det_core.config import entrypoint_command
from det_core.master._errors import Conflict, Fenced, Forbidden, NotFound
from det_core.master.engines import AllocationFolder, Claim, Copy, Piece, Ticket
from det_core.master.service import _reports
from det_core.master.service._access import hash_secret, live_allocation, read_context
from det_core.master.store import models

if TYPE_CHECKING:
    from det_core.master.service._actor import Transaction
    from det_core.master.service._live import LiveAllocation
    from det_core.master.service._state import ServiceState


def write_ticket(service: ServiceState, allocation: LiveAllocation, code: str) -> Ticket:
    """Return the ticket of an allocation."""
    trial = allocation.trial
    settings = service.settings
    spec = trial.experiment.spec
    return Ticket(
        allocation_id=allocation.id,
        task_id=trial.row.task_id,
        experiment_id=trial.experiment.id,
        trial_id=trial.id,
        trial_run_id=allocation.row.run_id,
        trial_seed=trial.row.seed,
        hparams=trial.row.hparams,
        config=spec.data,
        slots=allocation.row.slots,
        slot_ids=list(allocation.row.slot_ids),
        master_url=settings.master_url,
        command=entrypoint_command(spec.entrypoint or ""),
        code=code,
        nodes=allocation.launch.nodes,
        cluster_id=settings.cluster_id,
        agent_id=settings.agent_id,
        steps_completed=allocation.row.steps_completed,
        latest_checkpoint=allocation.row.latest_checkpoint,
        environment=spec.environment_variables_for("cpu"),
        gpu_environment=spec.environment_variables_for("cuda"),
        context=trial.experiment.row.context,
        preemption_timeout=spec.preemption_timeout,
    )


class EventListener:
    """Receiver of an engine's requests: claims, contexts, files and journals.

    Args:
        service: State of the service.
    """

    def __init__(self, service: ServiceState) -> None:
        self._service = service

    async def claim(self, allocation_id: str, node: int, code: str, runner: str) -> Claim:
        """Give the credentials of an allocation to whoever runs it on a node.

        Raises:
            Fenced: If it has ended, or is to end.
            Forbidden: If the code is not its own, or it has no such node.
            Conflict: If another runner has claimed the node.
        """
        granted = Claim(secrets.token_urlsafe(32), secrets.token_urlsafe(32))

        def command(tx: Transaction) -> None:
            allocation = live_allocation(self._service, allocation_id)
            launch = allocation.launch
            if allocation.row.kill_time is not None:
                raise Fenced(f"allocation {allocation_id} is to end")
            if not hmac.compare_digest(launch.code, hash_secret(code)) or node not in range(launch.nodes):
                raise Forbidden(f"allocation {allocation_id}: invalid code for node {node}")
            # The same runner may ask again: its answer may have been lost.
            if launch.claims.get(node, (runner,))[0] != runner:
                raise Conflict(f"allocation {allocation_id}: node {node} was claimed by another runner")
            # Two secrets: the runner alone may deliver files, the script alone may report.
            launch.claims[node] = (runner, hash_secret(granted.token))
            tx.change(allocation.row, facts={**allocation.row.facts, **launch.facts()})
            trial = allocation.trial
            token = models.Token(
                digest=hash_secret(granted.session_token),
                kind="allocation",
                allocation_id=allocation_id,
                trial_id=trial.id,
                experiment_id=trial.experiment.id,
            )
            tx.add(token)
            tx.publish(("trial", trial.id))

        await self._service.actor.do(command)
        return granted

    async def deliver(self, allocation_id: str, node: int, token: str, piece: Piece) -> int:
        """Take a piece of a file from the runner of a node; see :meth:`~det_core.master.engines.Copy.take`.

        Raises:
            Fenced: If the allocation has ended.
            Forbidden: If the token is not the runner's.
        """
        _, expected = live_allocation(self._service, allocation_id).launch.claims.get(node, ("", ""))
        if not hmac.compare_digest(expected, hash_secret(token)):
            raise Forbidden(f"allocation {allocation_id}: not the token of the runner of node {node}")
        copy = Copy(AllocationFolder(self._service.settings.home / "master" / "allocations" / allocation_id), node)
        return await asyncio.to_thread(copy.take, piece)

    async def open_context(self, digest: str) -> IO[bytes]:
        """Open a context archive as a file, which is written when it is first wanted.

        Raises:
            NotFound: If none has this digest.
        """
        path = self._service.settings.home / "master" / "contexts" / f"{digest}.tgz"
        async with self._service.writing:  # several allocations may want it at once
            if not path.exists():
                content = await read_context(self._service, digest)
                if content is None:
                    raise NotFound(f"context {digest} not found")
                await asyncio.to_thread(_write_file, path, content)
        return open(path, "rb")

    async def journal(self, allocation_id: str, rank: int, records: Sequence[Mapping[str, Any]], restart: int) -> None:
        """Take what a dead process left in its journal."""
        allocation = self._service.live.allocations.get(allocation_id)
        if allocation is not None:
            await _reports.left_behind(self._service, allocation, rank, records, restart)

    async def reports(self, allocation_id: str, rank: int, records: Sequence[Mapping[str, Any]], restart: int) -> None:
        """Take what a process that lives has reported while no master was there."""
        allocation = self._service.live.allocations.get(allocation_id)
        if allocation is not None:
            await _reports.journal(self._service, allocation.trial.id, allocation.row.run_id, rank, records, restart)


def _write_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)  # durable: a name without content would be believed for ever

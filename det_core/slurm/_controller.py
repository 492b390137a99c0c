"""Requests of a job to Slurm's controller, made in the background, as it may be away for minutes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress

from det_core._notices import print_notice
from det_core.slurm._chain import Chain
from det_core.slurm._commands import COMMAND_TIMEOUT, SlurmError, job_end, own_jobs, run_slurm

RETRY_INTERVAL = 10.0
"""Seconds between two tries while the controller does not answer, or refuses."""
CHECK_TIMEOUT = 3.0
"""Seconds to wait for an answer when the script should be stopped."""
MAX_TRIES_AT_END = 3


class Controller:
    """Asks for the end of this job and queues the next one, in a thread.

    Args:
        chain: the chain.
        job: this job's ID.
        next_number: of the job to queue; None: none follows.
    """

    def __init__(self, chain: Chain, job: str, next_number: int | None) -> None:
        self._chain = chain
        self._job = job
        self._next_number = next_number
        self.end = math.inf
        """Time of the limit; infinite if there is none or it is not known yet."""
        self._closing = threading.Event()
        self._is_refused = False
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self._thread.start()

    def check_end(self) -> None:
        """Ask for the end once more, as an administrator may have given more time."""
        with suppress(SlurmError):  # the answer from before holds
            self._ask_end(CHECK_TIMEOUT)

    def wait_until_queued(self) -> None:
        """Wait until the next job is queued, or the controller refuses it; without one the chain would break off."""
        while self._thread.is_alive() and not self._is_refused:
            self._thread.join(1.0)
        self.close()

    def close(self) -> None:
        """Stop trying."""
        self._closing.set()
        self._thread.join()

    def cancel_others(self) -> None:
        """Cancel the pending jobs of the chain. One that starts all the same finds the chain's end, and leaves."""
        self.close()
        for attempt in range(MAX_TRIES_AT_END):
            try:
                if pending := [job.job for job in self._chain.own(own_jobs()) if job.is_pending]:
                    run_slurm("scancel", *pending)
                return
            except SlurmError as e:
                problem = e
            if attempt + 1 < MAX_TRIES_AT_END:
                threading.Event().wait(RETRY_INTERVAL / 2)
        print_notice(f"cannot cancel the next job: {problem}; it will find nothing to do")

    def _run(self) -> None:
        # In this order: from the first answer on a job that is killed has a successor.
        pending: list[Callable[[], None]] = [self._queue_next, self._ask_end]
        is_said = False
        while pending:
            for ask in list(pending):
                try:
                    ask()
                    pending.remove(ask)
                except SlurmError as e:
                    if ask == self._queue_next:
                        self._is_refused = not e.is_away
                    if not is_said:
                        advice = "where compute nodes may not submit jobs: det-core slurm submit --chain N"
                        print_notice(f"the next job is not queued yet: {e}; trying again until it is; {advice}")
                        is_said = True
            if pending and self._closing.wait(RETRY_INTERVAL):
                return

    def _ask_end(self, timeout: float = COMMAND_TIMEOUT) -> None:
        end = job_end(self._job, timeout)
        self.end = math.inf if end is None else end

    def _queue_next(self) -> None:
        """Queue the next job, unless --chain or a try whose answer was lost has done so."""
        if self._next_number is None:
            return
        if not any(job.is_pending for job in self._chain.own(own_jobs())):
            run_slurm(*self._chain.submit_command(self._next_number, f"--dependency=afterany:{self._job}"))

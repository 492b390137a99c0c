"""Chains as a person sees them: a line in a list, the logs of all jobs as one stream, and the way to cancel one."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from det_core import _clock
from det_core.journal import RunRecord
from det_core.slurm._chain import Chain, JobRecord, newest_checkpoint
from det_core.slurm._commands import CANCELLED, QueuedJob, SlurmError, own_jobs, run_slurm
from det_core.slurm._policy import ChainEnd

POLL_INTERVAL = 0.5
LISTING_INTERVAL = 10.0
"""Seconds between two questions to the controller while logs are followed."""


@dataclass(frozen=True)
class ChainView:
    """Row of a chain in the list.

    Attributes:
        state: its end; else in Slurm's words what its jobs do; else ``broken off``.
        jobs: IDs of the jobs that have started.
        checkpoint, step: of the newest checkpoint.
        seconds: time that its jobs have run.
        advice: what to do about a chain that does not go on; empty: nothing.
    """

    run_id: str
    name: str
    state: str
    jobs: tuple[str, ...]
    checkpoint: str | None
    step: int | None
    seconds: float
    advice: str = ""


def describe(chain: Chain, queued: Sequence[QueuedJob] | None) -> ChainView:
    """Return what to show of a chain.

    Args:
        chain: the chain.
        queued: Slurm's jobs of this user; None: Slurm does not answer.
    """
    jobs = chain.jobs()
    end = chain.end()
    own = chain.own(list(queued or ()))
    advice = ""
    if end is not None:
        state = str(end)
    elif queued is None:
        state = "unknown"
    elif own:
        state = "; ".join(map(str, own))
    else:
        state = "broken off"
        command = shlex.join(chain.submit_command(len(jobs) + 1, "--export=NIL"))
        advice = (
            f"no job of {chain.name} is queued; to go on: {command}; to end it: det-core slurm cancel {chain.run_id}"
        )
        if lost := never_began(chain, jobs):
            advice = f"{lost}; {advice}"
    checkpoint, step = newest_checkpoint(RunRecord(chain.run_path))
    seconds = sum((job.ended or (_clock.now() if own else job.started)) - job.started for job in jobs)
    started = tuple(dict.fromkeys(job.job for job in jobs))
    return ChainView(chain.run_id, chain.name, state, started, checkpoint, step, seconds, advice)


def never_began(chain: Chain, jobs: Sequence[JobRecord]) -> str:
    """Return which job ended before its program could start, and where; empty: none did.

    A directory that the node does not see leaves no log: Slurm cannot open it, and says so in the status 0:53 alone.
    """
    lost = [job for job in chain.submitted() if job not in {record.job for record in jobs}]
    if not lost or chain.log(lost[0]).exists():
        return ""
    node = "its node"
    with suppress(SlurmError):
        shown = run_slurm("scontrol", "show", "job", "--oneliner", lost[0])
        if match := re.search(r"\bBatchHost=(\S+)", shown):
            node = match[1]
    return f"job {lost[0]} never began: does {node} see {chain.home}?"


def cancel(chain: Chain, *, now: bool) -> list[str]:
    """End a chain: cancel what is queued, ask what runs to save and end.

    Args:
        chain: the chain.
        now: kill the script instead.

    Returns:
        The jobs that still run, and end once the script has.

    Raises:
        SlurmError: If Slurm does not do it. The chain ends all the same when its next job starts.
    """
    chain.write("cancel", b"now" if now else b"save")
    own = chain.own(own_jobs())
    if pending := [job.job for job in own if job.is_pending]:
        run_slurm("scancel", *pending)  # first, or the next one starts when the running one ends
    running = [job.job for job in own if not job.is_pending]
    if running:
        run_slurm("scancel", "--batch", "--signal=TERM", *running)  # the job's program alone, which stops the script
    else:
        chain.record_end(ChainEnd(CANCELLED))
    return running


def stream_logs(chain: Chain, *, follow: bool) -> Iterator[bytes]:
    """Yield the logs of all jobs of a chain as one stream, with a line before each job's.

    Args:
        chain: the chain.
        follow: whether to wait for more until the chain has ended and nothing of it runs.
    """
    offsets: dict[str, int] = {}
    current = ""
    listed_at = -LISTING_INTERVAL
    is_going_on = follow
    while True:
        if follow and (_clock.monotonic() - listed_at >= LISTING_INTERVAL or chain.end() is not None):
            listed_at = _clock.monotonic()
            with suppress(SlurmError):  # while the controller is away nothing is known to have ended
                is_going_on = bool(chain.own(own_jobs()))
        for path in sorted(chain.folder.glob("job-*.log"), key=lambda path: (len(path.name), path.name)):
            offset = offsets.get(path.name, 0)
            if not path.exists() or path.stat().st_size <= offset:  # a link to a log that was removed
                continue
            if path.name != current:
                current = path.name
                yield f"== {path.stem.replace('-', ' ')} ==\n".encode()
            with path.open("rb") as f:
                f.seek(offset)
                while block := f.read(1 << 20):
                    yield block
                offsets[path.name] = f.tell()
        if not is_going_on:
            return
        time.sleep(POLL_INTERVAL)

"""Chains as a person sees them: a row in a list, the logs of all jobs as one stream, and the way to cancel one."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from det_core import _clock
from det_core.journal import RunRecord
from det_core.slurm._chain import Chain, newest_checkpoint
from det_core.slurm._commands import CANCELLED, QueuedJob, SlurmError, list_jobs, run_slurm

POLL_INTERVAL = 0.5
LISTING_INTERVAL = 10.0
"""Seconds between two questions to the controller while logs are followed."""


def describe(chain: Chain, listed: Sequence[QueuedJob] | None) -> dict[str, Any]:
    """Return what to show of a chain, given Slurm's jobs of this user, or None if Slurm does not answer.

    ``state`` is in Slurm's words as long as it has jobs, ``seconds`` the time that they have run, and ``advice`` what
    to do where the chain does not go on by itself.
    """
    queued = sorted(chain.own(listed or ()), key=lambda job: job.is_pending)
    waiting = [job for job in queued if job.is_pending]
    state = chain.end or "; ".join(map(str, queued[: len(queued) - len(waiting) + 1]))
    if len(waiting) > 1 and not chain.end:  # by --chain, each behind the one before
        state += f" and {len(waiting) - 1} more"
    advice = ""
    if not state and listed is None:
        state = "unknown"
    elif not state and chain.cancel_request:
        state = CANCELLED
    elif not state:
        state = "broken off"
        submit = shlex.join(chain.submit_command("--export=NIL"))
        end = f"det-core slurm cancel {chain.run_id}"
        advice = f"no job of {chain.name} is queued; to continue it: {submit}; to end it: {end}"
        if lost := _never_began(chain):
            advice = f"{lost}; {advice}"
    checkpoint, step = newest_checkpoint(RunRecord(chain.run_path))
    is_running = any(not job.is_pending for job in queued)
    spans = [(job.ended or _clock.now()) - job.started for job in chain.jobs if job.ended or is_running]
    jobs = list(dict.fromkeys(job.job for job in chain.jobs))
    return {"run_id": chain.run_id, "name": chain.name, "state": state, "jobs": jobs, "checkpoint": checkpoint,
            "step": step, "seconds": sum(spans), "advice": advice}  # fmt: skip


def _never_began(chain: Chain) -> str:
    """Return whether the newest job ended before its program could start, and where; empty: it did not.

    A directory that the node does not see leaves no log: Slurm cannot open it, and says so in the status 0:53 alone.
    """
    job = chain.submitted[-1:]
    if not job or chain.log(job[0]).exists():
        return ""
    node = ""
    with suppress(SlurmError):  # it forgets a job after five minutes
        shown = run_slurm("scontrol", "show", "job", "--oneliner", *job)
        node = "".join(re.findall(r"\bBatchHost=(\S+)", shown))
    if not node and chain.jobs:  # more likely it was cancelled before it had a node
        return ""
    return f"job {job[0]} never began: does {node or 'its node'} see {chain.home}?"


def cancel(chain: Chain, *, now: bool) -> list[str]:
    """End a chain and return the jobs that end once the script has, which saves first unless it is to end ``now``.

    Raises:
        SlurmError: If Slurm does not do it. The chain ends nevertheless when its next job starts.
    """
    chain.write("cancel", {False: b"save", True: b"now"}[now])
    running = chain.cancel_pending()  # first, or the next one would start when the running one ends
    if running:
        run_slurm("scancel", "--batch", "--signal=TERM", *running)  # the job's program alone, which stops the script
    else:
        chain.load()  # as a job may have ended since
        chain.save(CANCELLED)
    return running


def stream_logs(chain: Chain, *, follow: bool) -> Iterator[bytes]:
    """Yield the logs of all jobs as one stream, with a line before each job's; ``follow``: to the chain's end."""
    offsets: dict[str, int] = {}
    current = ""
    ask_at = 0.0
    while True:
        chain.load()
        if follow and _clock.monotonic() >= ask_at:
            ask_at = _clock.monotonic() + LISTING_INTERVAL
            with suppress(SlurmError):  # while the controller is away nothing is known to have ended
                follow = bool(chain.own(list_jobs()))
        is_last = bool(chain.end) or not follow  # before the logs are read, so that nothing of them is missed
        for path in sorted(chain.folder.glob("job-*.log"), key=lambda path: (len(path.name), path.name)):
            with suppress(FileNotFoundError), path.open("rb") as f:  # a link to a log that was removed
                f.seek(offsets.get(path.name, 0))
                while block := f.read(1 << 20):
                    if path.name != current:
                        current = path.name
                        yield f"== {path.stem.replace('-', ' ')} ==\n".encode()
                    yield block
                offsets[path.name] = f.tell()
        if is_last:
            return
        time.sleep(POLL_INTERVAL)

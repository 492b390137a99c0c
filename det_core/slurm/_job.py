"""The program of each job: wait for its turn, run the script, stop it in time, and decide whether the chain goes on.

It is the batch script itself (by ``exec``), so that ``scancel --batch`` and the end of a grace period reach it. On one
node the script is its child and no step of Slurm's: at a preemption Slurm signals every process of all steps, which
would end workers of a DataLoader; a step with nothing to lose reports it instead.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from det_core import _clock
from det_core._env import Environment, changed_environment
from det_core._notices import print_notice
from det_core.errors import RunLocked
from det_core.journal import RunRecord
from det_core.journal._run_folder import WriterLock, is_live
from det_core.slurm import _node
from det_core.slurm._chain import Chain, newest_checkpoint
from det_core.slurm._commands import (
    CANCELLED,
    COMMAND_TIMEOUT,
    PREEMPTION,
    SlurmError,
    few_variables,
    is_preempted,
    list_jobs,
    stop_cause,
)
from det_core.slurm._policy import LOST, NOT_BEGUN, JobRecord, decide
from det_core.slurm._script import environment_file

TIME_LIMIT = "time limit"
SIGNAL = "SIGTERM"
POLL_INTERVAL = 1.0
RETRY_INTERVAL = 10.0
"""Seconds between two tries while the controller does not answer, or refuses the next job."""
CHECK_TIMEOUT = 3.0
"""Longest wait for an answer when the script should be stopped."""
CAUSE_TIMEOUT = 2.0
"""Longest wait for Slurm's line in the log after a signal."""
GRACE_SHARE = 0.9
"""Part of the time between the request to stop and the limit in which the script is to end."""
_SRUN = ("srun", "--ntasks-per-node=1", "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0", "--wait=0")
_NOTICE = ("--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--gres=none", "--quiet",
           "sh", "-c", "echo started; exec sleep infinity")  # fmt: skip


def main(place: str, name: str, max_jobs: str, stop_before: str, *command: str) -> int:
    """Run one job of a chain; it begins one where ``place`` is not a chain's directory but the batch file itself."""
    environment = Environment.read()
    job_id = environment.launch["SLURM_JOB_ID"]
    if os.path.isdir(place):
        chain = Chain(Path(place))
    else:
        chain = Chain.create(environment.home, name, command)
        chain.write("env.sh", environment_file(changed_environment({})))
        chain.write("job.sh", Path(place).read_bytes())
        chain.write("submitted", job_id.encode())
        chain.log(job_id).symlink_to(os.readlink("/proc/self/fd/1"))
    job = Job(chain, environment.launch, int(max_jobs), float(stop_before))
    try:
        return job.run(command)
    except BaseException:
        job.cancel_next()  # it would fail as fast as this one, as on a full disk
        raise


class Job:
    """One job of a chain, with the variables that Slurm has set for it.

    The script is asked to stop ``stop_before`` seconds before the time limit, or a third of the limit if less.
    """

    def __init__(self, chain: Chain, launch: Mapping[str, str], max_jobs: int, stop_before: float) -> None:
        self._chain = chain
        self._launch = launch
        self._max_jobs = max_jobs
        self._stop_before = stop_before
        self._record = JobRecord(job=launch["SLURM_JOB_ID"], host=socket.gethostname(), started=_clock.now())
        self._is_alone = launch.get("SLURM_JOB_NUM_NODES", "1") == "1"
        self._stop_at = math.inf
        self._ask_at = 0.0
        self._is_followed = False
        self._is_refused = False
        self._has_notice = False
        self._notice: subprocess.Popen[bytes] | None = None
        self._lock: WriterLock | None = None
        self._printed: set[str] = set()
        signal.pthread_sigmask(signal.SIG_BLOCK, _node.WATCHED)

    def run(self, command: tuple[str, ...]) -> int:
        """Run the job and return its exit status."""
        if not self._take_turn():
            return 0
        if self._chain.jobs and not self._chain.jobs[-1].state:
            self._record_end(None, LOST)
        status = 0
        end = self._judge()
        if not end:
            status = self._train(command)
            end = self._judge()
        if end:
            advice = f"to look at it: det-core runs show {self._chain.run_id}"
            if not end.startswith("done"):
                advice += f"; to continue it: DET_CORE_RESUME={self._chain.run_id} det-core slurm submit …"
            print_notice(f"chain {self._chain.name} has ended: {end}; {advice}")
            self._chain.save(end)  # after the line, which is the last that those who follow the logs see
            self.cancel_next()
            return status
        self._ask_controller()
        while not self._is_followed and not self._is_refused:
            time.sleep(RETRY_INTERVAL)
            self._ask_controller()
        if self._is_followed:
            print_notice("the next job of the chain resumes the run")  # not the user, as the script's last line says
        return status

    def cancel_next(self) -> None:
        """Cancel the pending jobs of the chain. One that starts nevertheless finds the chain's end, and leaves."""
        try:
            self._chain.cancel_pending()
        except SlurmError as e:
            print_notice(f"cannot cancel the next job: {e}; it will find nothing to do")

    def _take_turn(self) -> bool:
        """Wait until no other job of the chain and no script of an earlier one writes the run; return whether it is so.

        A script may outlive its job, on a node that Slurm has given up or when the job's program was killed.
        """
        while True:
            with suppress(RunLocked):
                self._lock = self._lock or WriterLock(self._chain.folder / "lock", self._chain.run_id)
                self._chain.load()
                if not is_live(self._chain.run_path):
                    return True
            if self._chain.end or self._chain.cancel_request:
                self.cancel_next()
                return False
            self._print_once(f"run {self._chain.run_id} is still being written by an earlier job: waiting for its end")
            received = self._wait_for_signal(POLL_INTERVAL)
            if received and self._find_cause(self._record, received) == CANCELLED:
                self._chain.write("cancel", b"save")
            elif received or _clock.now() >= self._stop_at:
                print_notice("this job has waited until its stop time; the next one continues to wait")
                return False

    def _judge(self) -> str:
        """Return how the chain ends after its jobs; empty if it goes on."""
        end = self._chain.end or decide(self._chain.jobs, self._max_jobs)
        if not end and self._chain.cancel_request:
            return CANCELLED
        return end

    def _train(self, command: tuple[str, ...]) -> int:
        """Run the script, ask it to stop in time, record how it ended, and return its exit status."""
        self._chain.jobs.append(self._record)
        self._chain.save()
        # The first may be NIL, and then srun hands nothing on. Since 22.05 srun does not read SLURM_CPUS_PER_TASK.
        changes = {"SLURM_EXPORT_ENV": None, "SRUN_CPUS_PER_TASK": self._launch.get("SLURM_CPUS_PER_TASK")}
        environment = {
            "DET_CORE_GRACE": f"{GRACE_SHARE * self._stop_before:g}",
            "PYTHONUNBUFFERED": "1",
            **changed_environment(changes),
            "DET_CORE_HOME": str(self._chain.home),
            "DET_CORE_RESUME": self._chain.run_id,
            "DET_CORE_SECRET_FILE": str(self._chain.folder / "secret"),
        }
        stop_file = self._chain.folder / f"stop-{self._record.job}"
        if not self._is_alone:
            stop_file.touch()
            command = (*_SRUN, sys.executable, "-m", "det_core.slurm", "node", str(stop_file), *command)
        child = _node.start(command, environment)
        stop = self._wait_for_stop(child)
        sent = 0
        while stop and child.poll() is None:
            number = signal.SIGTERM
            action = "asking the script to save and exit"
            if self._chain.cancel_request == "now":
                number = signal.SIGKILL
                action = "killing the script"
            if number != sent:
                sent = number
                print_notice(f"{stop}: {action}")
                if self._is_alone:
                    child.send_signal(number)
                else:  # srun would signal every process
                    stop_file.write_text(f"{number:d}")
            _node.wait_for_signal(POLL_INTERVAL)
        self._record_end(child.returncode, stop)
        stop_file.unlink(missing_ok=True)
        return _node.shell_status(child.returncode)

    def _wait_for_stop(self, child: subprocess.Popen[bytes]) -> str:
        """Wait until the script has to stop and return why; empty: it has ended before."""
        while child.poll() is None:
            if received := self._wait_for_signal(min(POLL_INTERVAL, self._stop_at - _clock.now())):
                return received
            if self._is_alone and not self._has_notice and self._ask_at == math.inf:  # srun needs the controller
                self._has_notice = True
                step = (*_SRUN, f"--jobid={self._record.job}", *_NOTICE)
                self._notice = _node.start(step, few_variables(), subprocess.PIPE)
            if _clock.now() >= self._stop_at:
                self._ask_controller(CHECK_TIMEOUT)  # an administrator may have given more time
                if _clock.now() >= self._stop_at:
                    return TIME_LIMIT
        return self._wait_for_signal(0.0)  # which may have come to both

    def _wait_for_signal(self, timeout: float) -> str:
        """Wait for a signal to this program, or to the step that reports it, and return its name."""
        if _clock.monotonic() >= self._ask_at:
            self._ask_controller(min(COMMAND_TIMEOUT, max(CHECK_TIMEOUT, self._stop_at - _clock.now())))
        received = _node.wait_for_signal(timeout)
        if not received and self._notice and self._notice.poll() is not None:
            output, errors = self._notice.communicate()
            self._notice = None
            if b"started" in output:
                return SIGNAL
            print_notice(f"a preemption may come without notice: {' '.join(errors.decode(errors='replace').split())}")
        return received

    def _record_end(self, status: int | None, stop: str) -> None:
        """Record how the last job of the chain ended; without a status a lost one, which could not do so itself."""
        record = self._chain.jobs[-1]
        before = [self._chain.base, *self._chain.jobs][-2]
        run = RunRecord(self._chain.run_path)
        record.status = status
        record.stop = self._find_cause(record, stop)
        record.ended = _clock.now()
        record.starts = run.starts
        record.state = run.state
        if not run.live and run.starts == before.starts:
            record.state = NOT_BEGUN
        record.checkpoint, _ = newest_checkpoint(run)
        record.is_newer = record.checkpoint not in (None, before.checkpoint)
        details = [str(r.get("detail") or "") for r in run.records("run_end") if r.restart >= before.starts]
        record.error = next(filter(None, details), "")
        outcome = f"status {status}"
        if status is None:
            outcome = "without a record"
            with suppress(FileNotFoundError):
                record.ended = self._chain.log(record.job).stat().st_mtime
        self._chain.save()
        causes = ", ".join(filter(None, (record.state, outcome, record.stop)))
        print_notice(f"job {record.job} on {record.host} ended: {causes}")
        if status is not None and record.stop and record.state == "died":
            from det_core.core._bare_run import cause_of_death  # its imports would delay the script's start

            if cause := cause_of_death(run):
                print_notice(f"the script died {cause}; it resumes from its last checkpoint")

    def _find_cause(self, record: JobRecord, stop: str) -> str:
        """Return why a person or Slurm stopped a job where they did, else ``stop``.

        A person's ``scancel`` and a preemption send the same signal, and only the job's output and the controller tell
        which it was. On several nodes all processes of the script may have had it, and this program none.
        """
        deadline = _clock.monotonic() + CAUSE_TIMEOUT
        while not self._chain.cancel_request:
            if cause := stop_cause(self._chain.log(record.job), record.job, record.started):
                return cause
            with suppress(SlurmError):
                if is_preempted(record.job, CHECK_TIMEOUT):
                    return PREEMPTION
            if stop != SIGNAL or _clock.monotonic() >= deadline:
                return stop
            time.sleep(0.1)  # Slurm may write its line a moment after the signal
        return CANCELLED

    def _ask_controller(self, timeout: float = COMMAND_TIMEOUT) -> None:
        """Ask for the time limit and queue the next job; after a failure it is asked again.

        Nobody looks at the script meanwhile, so ``timeout`` is short at its stop time.
        """
        self._ask_at = math.inf
        self._is_refused = False
        try:
            jobs = self._chain.own(list_jobs(timeout))
            for job in jobs:
                if job.job == self._record.job:
                    third = max((job.end_time - self._record.started) / 3, 1.0)
                    self._stop_at = job.end_time - min(self._stop_before, third)
            is_last = len(self._chain.jobs) >= self._max_jobs
            # --chain, or a try whose answer was lost, may have queued one. Later on a person may have cancelled it.
            if not (self._is_followed or is_last or any(job.is_pending for job in jobs)):
                self._is_refused = True  # the controller is there: if this fails it does not want the job
                self._chain.submit(after=self._record.job, timeout=timeout)
                self._is_refused = False
            self._is_followed = True
        except SlurmError as e:
            self._ask_at = _clock.monotonic() + RETRY_INTERVAL
            if not self._is_followed:
                advice = "where compute nodes may not submit jobs: det-core slurm submit --chain N"
                self._print_once(f"the next job is not queued yet: {e}; trying again until it is; {advice}")

    def _print_once(self, text: str) -> None:
        if text not in self._printed:
            print_notice(text)
            self._printed.add(text)

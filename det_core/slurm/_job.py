"""The program of each job: wait for its turn, run the script, stop it in time, and decide whether the chain goes on.

It is the batch script itself (by ``exec``), so that ``scancel --batch`` and the end of a grace period reach it. On one
node the script is its child and no step of Slurm's: at a preemption Slurm signals every process of all steps, which
would end workers of a DataLoader; a step with nothing to lose reports it instead.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from det_core import _clock
from det_core._env import Environment, changed_environment
from det_core._notices import print_notice
from det_core.errors import RunLocked
from det_core.journal import RunRecord
from det_core.journal._run_folder import WriterLock, is_live
from det_core.slurm._chain import Chain, JobRecord, newest_checkpoint
from det_core.slurm._commands import CANCELLED, PREEMPTION, SlurmError, command_variables, is_preempted, stop_cause
from det_core.slurm._controller import Controller
from det_core.slurm._node import (
    KILL,
    SIGNAL,
    STOP,
    WATCHED,
    add_word,
    read_words,
    shell_status,
    start,
    wait_for_signal,
)
from det_core.slurm._policy import LOST, ChainEnd, JobEnd, decide
from det_core.slurm._script import environment_file

TIME_LIMIT = "time limit"
POLL_INTERVAL = 1.0
KILL_MARGIN = 10.0
"""Seconds before the time limit at which a script that has not ended is killed, so that its end is recorded."""
CAUSE_TIMEOUT = 2.0
"""Seconds to wait for Slurm's line in the log after a signal."""
NOTICE_RETRY_INTERVAL = 30.0
TAIL_BYTES = 1 << 20
"""Bytes at the end of a log in which Slurm's line is looked for."""
SRUN = ("srun", "--ntasks-per-node=1", "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0", "--wait=0")


def main(arguments: list[str]) -> int:
    """Run one job of a chain: ``[options] FOLDER -- COMMAND``; an empty FOLDER begins a chain."""
    end = arguments.index("--")
    parser = argparse.ArgumentParser(prog="python -m det_core.slurm job")
    parser.add_argument("--name", required=True)
    parser.add_argument("--max-jobs", type=int, required=True)
    parser.add_argument("--stop-before", type=float, required=True)
    parser.add_argument("folder")
    args = parser.parse_args(arguments[:end])
    command = arguments[end + 1 :]
    environment = Environment.read()
    place = Path(args.folder)
    chain = Chain(place) if place.is_dir() else _begin_chain(place, environment, args.name, command)
    job = Job(chain, environment.launch, args.max_jobs, args.stop_before)
    try:
        return job.run(command)
    except BaseException:
        job.break_off()
        raise


def _begin_chain(batch_file: Path, environment: Environment, name: str, command: list[str]) -> Chain:
    """Make run and chain in the first job of a batch file that a person has submitted."""
    chain = Chain.create(environment.home, name=name, command=command)
    chain.write("env.sh", environment_file(changed_environment({}), environment.home).encode())
    chain.write("job.sh", batch_file.read_bytes())
    chain.log(environment.launch["SLURM_JOB_ID"]).symlink_to(os.readlink("/proc/self/fd/1"))
    print_notice(f"run {chain.run_id} in {chain.run_path}")
    return chain


class Job:
    """One job of a chain.

    Args:
        chain: the chain.
        launch: variables that Slurm has set.
        max_jobs: how many jobs the chain may have.
        stop_before: seconds before the time limit at which the script is asked to stop; at most a third of the limit.
    """

    def __init__(self, chain: Chain, launch: Mapping[str, str], max_jobs: int, stop_before: float) -> None:
        self._chain = chain
        self._id = launch["SLURM_JOB_ID"]
        self._requeues = int(launch.get("SLURM_RESTART_COUNT", "0"))
        self._nodes = int(launch.get("SLURM_JOB_NUM_NODES", "1"))
        self._max_jobs = max_jobs
        self._stop_before = stop_before
        self._began = _clock.now()
        self._log = chain.log(self._id)
        self._log_offset = self._log.stat().st_size if self._log.exists() else 0
        self._stop_file = chain.path(f"stop-{self._id}")
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*WATCHED, signal.SIGCHLD})
        number = len(chain.jobs()) + 1
        is_last = number >= max_jobs or chain.end() is not None
        self._controller = Controller(chain, self._id, None if is_last else number + 1)

    def run(self, command: list[str]) -> int:
        """Run the job and return its exit status."""
        with ExitStack() as turn:
            if self._take_turn(turn):
                end = self._find_end()
                return self._train(command) if end is None else self._finish(end)
        self._controller.close()
        return 0

    def break_off(self) -> None:
        """Let no job follow an error of this program, such as a full disk: each would fail as fast as this one."""
        self._controller.cancel_others()

    def _take_turn(self, turn: ExitStack) -> bool:
        """Wait until no other job of the chain and no process of an earlier one writes the run.

        A script may outlive its job, on a node that Slurm has given up or when the job's program was killed.
        """
        lock: WriterLock | None = None
        is_said = False
        while True:
            try:
                if lock is None:
                    lock = WriterLock(self._chain.path("lock"), self._chain.run_id)
                    turn.callback(lock.release)
                if not is_live(self._chain.run_path):
                    return True
            except RunLocked:
                pass
            if not is_said:
                print_notice(f"run {self._chain.run_id} is still being written by an earlier job: waiting for its end")
                is_said = True
            if received := wait_for_signal(POLL_INTERVAL):
                if self._find_cause(received) == CANCELLED:
                    self._finish(ChainEnd(CANCELLED))
                return False
            if _clock.now() >= self._stop_time():
                print_notice("this job has waited until its stop time; the next one goes on waiting")
                return False

    def _find_end(self) -> ChainEnd | None:
        """Return how the chain ended before this job, if it did; complete the record of a lost job."""
        if end := self._chain.end():
            return end
        if self._chain.cancel_request:
            return ChainEnd(CANCELLED)
        jobs = self._chain.jobs()
        if jobs and jobs[-1].end is None:
            last = jobs[-1]
            log = self._chain.log(last.job)
            cause = stop_cause(_read_from(log, last.log_offset), last.job) or LOST
            last.end = self._describe_end(last, None, LOST if cause.startswith("node fail") else cause)
            last.ended = log.stat().st_mtime if log.exists() else last.started
            self._chain.save(last)
            print_notice(f"job {last.job} on {last.host} ended without a record ({cause}); the run is {last.end.state}")
        return decide([job.end for job in jobs if job.end], self._max_jobs)

    def _train(self, command: list[str]) -> int:
        """Run the script and record how it ended."""
        checkpoint, _ = newest_checkpoint(RunRecord(self._chain.run_path))
        number = len(self._chain.jobs()) + 1
        record = JobRecord(
            self._id, self._requeues, number, socket.gethostname(), self._began, self._chain.run().starts, checkpoint,
            self._log_offset,
        )  # fmt: skip
        self._chain.save(record)
        status, stop = self._supervise(command)
        record.end = self._describe_end(record, status, stop)
        record.ended = _clock.now()
        self._chain.save(record)
        end = decide([job.end for job in self._chain.jobs() if job.end], self._max_jobs)
        if end is None and self._chain.cancel_request:
            end = ChainEnd(CANCELLED)
        causes = ", ".join(filter(None, (record.end.state, f"status {status}", stop)))
        print_notice(f"job {self._id}, number {number}, ended: {causes}")
        if stop and record.end.state == "died":
            self._explain_death()
        if end is not None:
            self._finish(end)
        else:
            self._controller.wait_until_queued()
        return shell_status(status)

    def _finish(self, end: ChainEnd) -> int:
        """Record the end of the chain and cancel what is queued of it."""
        self._chain.record_end(end)
        print_notice(
            f"chain {self._chain.name} has ended: {end}; to look at it: det-core runs show {self._chain.run_id}"
        )
        self._controller.cancel_others()
        return 0

    def _describe_end(self, record: JobRecord, status: int | None, stop: str) -> JobEnd:
        run = RunRecord(self._chain.run_path)
        checkpoint, _ = newest_checkpoint(run)
        state = self._chain.state_since(record.starts)
        ends = [r for r in run.records("run_end") if r.restart == run.starts - 1 and r.get("detail")]
        error = str(ends[0]["detail"]) if ends and state == "failed" else ""
        return JobEnd(state, status, stop, checkpoint not in (None, record.checkpoint), error)

    def _explain_death(self) -> None:
        from det_core.core._bare_run import cause_of_death  # its imports would delay the script's start

        if cause := cause_of_death(RunRecord(self._chain.run_path)):
            print_notice(f"the script died {cause}; it resumes from its last checkpoint")

    def _supervise(self, command: list[str]) -> tuple[int, str]:
        """Run the script, ask it to stop in time, and return its status and why it was asked."""
        environment = self._script_environment()
        if self._nodes > 1:
            self._stop_file.touch()
            cpus = [f"--cpus-per-task={count}"] if (count := environment.get("SLURM_CPUS_PER_TASK")) else []
            node = [sys.executable, "-m", "det_core.slurm", "node", str(self._stop_file)]
            command = [*SRUN, *cpus, *node, "--", *command]
        try:
            child = start(command, self._mask, environment)
        except OSError as e:
            print_notice(f"cannot run {command[0]}: {e.strerror}")
            return 127, ""
        notice = StepNotice(self._id, self._mask) if self._nodes == 1 else None
        stop = self._wait_for_stop(child, notice)
        if stop and child.poll() is None:
            self._stop(child, stop)
        if not stop:
            stop = self._received(0.0)
        if notice:
            notice.close()
        stop = self._find_cause(stop)
        self._stop_file.unlink(missing_ok=True)
        return child.returncode, stop

    def _wait_for_stop(self, child: subprocess.Popen[bytes], notice: StepNotice | None) -> str:
        """Wait until the script has to stop and return why; empty: it has ended before."""
        while child.poll() is None:
            received = self._received(min(POLL_INTERVAL, self._stop_time() - _clock.now()))
            if received or (notice and notice.has_come()):
                return received or SIGNAL
            if _clock.now() >= self._stop_time():
                self._controller.check_end()
                if _clock.now() >= self._stop_time():
                    return TIME_LIMIT
        return ""

    def _stop(self, child: subprocess.Popen[bytes], stop: str) -> None:
        """Ask the script to save and exit; kill it if it has not ended in time, or a person does not want to wait."""
        print_notice(f"{stop}: asking the script to save and exit")
        self._tell(child, STOP)
        is_killed = False
        while child.poll() is None:
            is_late = _clock.now() >= self._kill_time()
            if not is_killed and (is_late or self._chain.cancel_request == "now"):
                print_notice("killing the script" + (": it has not ended in time" if is_late else ""))
                self._tell(child, KILL)
                is_killed = True
            wait_for_signal(POLL_INTERVAL)

    def _script_environment(self) -> dict[str, str]:
        grace = max(self._time_to_save() - self._kill_margin(), 1.0)
        return {
            "DET_CORE_GRACE": f"{grace:g}",
            "PYTHONUNBUFFERED": "1",
            **changed_environment({}),
            "DET_CORE_HOME": str(self._chain.home),
            "DET_CORE_RESUME": self._chain.run_id,
            "DET_CORE_SECRET_FILE": str(self._chain.path("secret")),
        }

    def _tell(self, child: subprocess.Popen[bytes], word: str) -> None:
        """Ask the script to stop, or kill it; on several nodes by the file, as srun would signal every process."""
        if self._nodes > 1:
            add_word(self._stop_file, word)
        else:
            child.send_signal(signal.SIGTERM if word == STOP else signal.SIGKILL)

    def _received(self, timeout: float) -> str:
        """Wait for a signal to this program or to one of the nodes, and return its name."""
        received = wait_for_signal(timeout)
        if not received and self._nodes > 1 and SIGNAL in read_words(self._stop_file):
            return SIGNAL
        return received

    def _find_cause(self, stop: str) -> str:
        """Return why Slurm stopped the job, where it did, else ``stop``.

        A person's ``scancel`` and a preemption send the same signal, and only this job's output and the controller tell
        which it was. Slurm may write its line a moment after the signal.
        """
        with suppress(SlurmError):
            if stop == SIGNAL and not self._last_words() and is_preempted(self._id):
                return PREEMPTION
        deadline = _clock.monotonic() + (CAUSE_TIMEOUT if stop == SIGNAL else 0.0)
        while not (cause := self._last_words()) and _clock.monotonic() < deadline:
            time.sleep(0.1)
        if cause or stop != SIGNAL:
            return cause or stop
        return CANCELLED if self._chain.cancel_request else SIGNAL

    def _last_words(self) -> str | None:
        return stop_cause(_read_from(self._log, self._log_offset), self._id)

    def _time_to_save(self) -> float:
        limit = self._controller.end - self._began
        return min(self._stop_before, max(limit / 3, 1.0))

    def _kill_margin(self) -> float:
        return min(KILL_MARGIN, self._time_to_save() / 3)

    def _stop_time(self) -> float:
        return self._controller.end - self._time_to_save()

    def _kill_time(self) -> float:
        return self._controller.end - self._kill_margin()


class StepNotice:
    """A step of the job that ends when Slurm signals all steps, or has given up the node or the job.

    At the begin of a grace period Slurm signals steps alone.

    Args:
        job: the job's ID.
        mask: signals to block in srun.
    """

    def __init__(self, job: str, mask: Iterable[int]) -> None:
        self._command = [*SRUN, f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--gres=none",
                         "--quiet", "sh", "-c", "echo started; exec sleep infinity"]  # fmt: skip
        self._mask = mask
        self._is_said = False
        self._retry_at = 0.0
        self._step: subprocess.Popen[bytes] | None = None

    def has_come(self) -> bool:
        """Return whether the step has ended; start it where it does not run yet, or could not start."""
        if self._step is None:
            if _clock.monotonic() >= self._retry_at:
                self._retry_at = _clock.monotonic() + NOTICE_RETRY_INTERVAL
                with suppress(OSError):  # without srun on this node
                    self._step = start(self._command, self._mask, command_variables(), subprocess.PIPE, subprocess.PIPE)
            return False
        if self._step.poll() is None:
            return False
        output, errors = self._step.communicate()
        if b"started" in output:
            return True
        if not self._is_said:
            print_notice(f"a preemption may come without notice: {' '.join(errors.decode(errors='replace').split())}")
            self._is_said = True
        self._step = None
        return False

    def close(self) -> None:
        """End the step."""
        if self._step is not None:
            self._step.kill()
            self._step.communicate()


def _read_from(log: Path, offset: int) -> str:
    if not log.exists():
        return ""
    with log.open("rb") as f:
        f.seek(max(offset, log.stat().st_size - TAIL_BYTES))
        return f.read().decode(errors="replace")

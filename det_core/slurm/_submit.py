"""Submit a chain: make run and directory, and give Slurm the first job."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from det_core._env import changed_environment
from det_core.slurm._chain import Chain
from det_core.slurm._commands import SlurmError, run_slurm
from det_core.slurm._script import JobOptions, batch_file, environment_file


def submit(home: Path, options: JobOptions, variables: Sequence[str] = ()) -> Chain:
    """Make a chain and submit its first job, with ``options.chain`` so many at once.

    Args:
        home: where runs are kept; all nodes have to see it.
        options: what to run and where.
        variables: ``NAME`` or ``NAME=VALUE`` to add to the environment of the submit.

    Raises:
        ValueError: If options contradict each other.
        SlurmError: If sbatch refuses, in its words; nothing is left then.
        RunError: If the run's directory cannot be made.
    """
    options.check()
    environment = environment_file(changed_environment({}), home, variables)
    chain = Chain.create(home, name=options.chain_name, command=options.full_command())
    jobs: list[str] = []
    try:
        chain.write("env.sh", environment.encode())
        chain.write("job.sh", batch_file(options, os.getcwd()).encode())
        for number in range(1, (options.chain or 1) + 1):
            after = [f"--dependency=afterany:{jobs[-1]}"] if jobs else []
            jobs.append(run_slurm(*chain.submit_command(number, *after)).partition(";")[0])
        chain.write("submitted.json", json.dumps(jobs).encode())
    except BaseException as e:
        if jobs and isinstance(e, SlurmError):  # such as a limit of jobs in the queue
            run_slurm("scancel", *jobs)
        shutil.rmtree(chain.run_path)
        raise
    return chain

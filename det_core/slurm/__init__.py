"""A bare script as a chain of Slurm jobs: one run, saved and resumed until it is done, without a service.

``det-core slurm submit`` makes the run and its chain's folder and submits the first job. Each job queues the next one
beside the script, asks the script to save before its time limit, and cancels the next one when nothing is left to do.
Slurm stays the scheduler; the chain's folder is the only state.
"""

from det_core.slurm._chain import Chain, chain_of_run, find_chain, list_chains
from det_core.slurm._commands import SlurmError, list_jobs
from det_core.slurm._script import JobOptions, batch_file, submit
from det_core.slurm._views import cancel, describe, stream_logs

__all__ = [
    "Chain",
    "JobOptions",
    "SlurmError",
    "batch_file",
    "cancel",
    "chain_of_run",
    "describe",
    "find_chain",
    "list_chains",
    "list_jobs",
    "stream_logs",
    "submit",
]

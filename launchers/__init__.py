"""Launchers: one process per slot, around any entrypoint. Run one with ``python -m det_core.launch.NAME --help``.

============================  ======================================================================
``torch_distributed``         the variables that ``torchrun`` gives its ranks
``deepspeed``                 the variables that deepspeed's launcher gives its ranks
``horovod``                   the variables that ``horovodrun --gloo`` gives its ranks
``tensorflow``                one process on each machine, with ``TF_CONFIG``
``wrap_rank``                 one rank that another program starts (``mpirun``, ``torchrun``)
============================  ======================================================================

A launcher is the parent of its machine's ranks, and there is one on each machine. A framework's module computes the
variables of its ranks, nothing else. ``_cli`` reads the command line, ``_hosts`` finds the machines, ``_job`` starts
the ranks and ends them, ``_output`` carries what they print, ``_outcome`` says what they came to, and ``_links`` links
the launchers of several machines.
"""

from __future__ import annotations

__all__: list[str] = []

"""Launchers: one process per slot, around any entrypoint. Run one with ``python -m det_core.launch.NAME --help``.

============================  =====================================================
``torch_distributed``         PyTorch's elastic agent, the one that ``torchrun`` runs
``horovod``                   ``horovodrun``, with gloo
``deepspeed``                 deepspeed's own launcher, one on each machine
``mpi``                       Open MPI's ``mpirun``
``tensorflow``                one process on each machine, with ``TF_CONFIG``
``wrap_rank``                 no ranks at all: one script, with its rank on every line
============================  =====================================================

How the parts stand to each other::

    launcher (_supervisor/)         owns signals, grace, exit status; its children are adopted by it, whoever dies
      ├─ the framework's agent      (_supervisor/_agent) a session of its own; knows nothing of us
      │    └─ one wrapper per rank  (_wrapper/) prefixes lines, passes signals on, ends the script's process group
      │         └─ the script
      └─ a unix socket              launcher <-> every wrapper (_wrapper/_protocol)

A new framework is one module with a :class:`~._framework.Framework` that gives the command line of the framework's own
program, which the agent becomes; every other part here is shared: :mod:`._words` reads the command line,
:mod:`._machines` finds out where it runs, and brings the launcher's socket to other machines.
"""

from __future__ import annotations

__all__: list[str] = []

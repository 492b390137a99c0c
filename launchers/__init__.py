"""Launchers: one process per slot, around any script; see ``python -m det_core.launch.NAME --help``.

============================  ======================================================================
``torch_distributed``         the variables that ``torchrun`` gives its ranks
``deepspeed``                 the variables that deepspeed's launcher gives its ranks
``horovod``                   the variables that ``horovodrun --gloo`` gives its ranks
``tensorflow``                one process on each node, with ``TF_CONFIG``
``wrap_rank``                 one rank that another program starts (``mpirun``, ``torchrun``)
============================  ======================================================================

A launcher is the parent of its node's ranks, and each node runs one. A framework's module computes the variables of
its ranks, nothing else. ``_cli`` parses the command line, ``_hosts`` finds the nodes, ``_ports`` reserves ports,
``_job`` starts and ends the ranks, ``_output`` copies their output, ``_outcome`` determines the exit status, and
``_links`` connects the launchers of several nodes.
"""

from __future__ import annotations

__all__: list[str] = []

"""Launchers: one process per slot, around any entrypoint. Run one with ``python -m det_core.launch.NAME --help``.

============================  =====================================================
``torch_distributed``         PyTorch's elastic agent, the one that ``torchrun`` runs
============================  =====================================================

How the parts stand to each other::

    launcher (_supervisor)          owns signals, grace, exit status; its children are adopted by it, whoever dies
      ├─ the framework's agent      (_agent) a session of its own; knows nothing of us
      │    └─ one wrapper per rank  (_wrapper/) prefixes lines, passes signals on, ends the script's process group
      │         └─ the script
      └─ a unix socket              launcher <-> every wrapper (_wrapper/_protocol)

A new framework is one module that says how its agent is run (as ``torch_distributed`` and ``_torchrun`` do); every
other part here is shared.
"""

from __future__ import annotations

__all__: list[str] = []

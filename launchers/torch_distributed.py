"""``python -m det_core.launch.torch_distributed``: one process per GPU, under PyTorch's elastic agent."""

from __future__ import annotations

import sys

from ._supervisor._launch import launch
from ._torchrun import run_agent
from ._torchrun_help import print_help

__all__ = ["main"]


def main(words: list[str] | None = None) -> int:
    """Run the launcher on ``words`` (default: this process's arguments) and return its exit status."""
    arguments = sys.argv[1:] if words is None else words
    if arguments[:1] in (["-h"], ["--help"]):
        print_help()
        return 0
    return launch("torchrun's agent", lambda control, path: run_agent(arguments, control, path))


if __name__ == "__main__":
    raise SystemExit(main())

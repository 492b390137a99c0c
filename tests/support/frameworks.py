"""The frameworks that the launchers run, from the venv that ``make test-launchers`` makes (``frameworks.sh``)."""

from __future__ import annotations

import json
import os
import re
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support import warm
from support.hosts import NAMES, SECRET, skip_or_fail

VENV = os.environ.get("FRAMEWORKS_VENV", "")
PYTHON = f"{VENV}/bin/python"
WHO = """
    import json, os, socket, sys
    from det_core import core
    from det_core._env import Environment
    {context}
    with core.init(distributed=distributed) as ctx:
        d = ctx.distributed
        place = [d.rank, d.size, d.local_rank, d.local_size, d.cross_rank, d.cross_size]
        told = d.allgather([place, socket.gethostname(), Environment.read().secret])
    print("told", json.dumps(told))
"""
"""Script that prints numbers, host and secret of every rank, on every rank."""


@dataclass(frozen=True)
class Framework:
    """One framework under our launcher."""

    name: str
    context: str
    """Code that makes ``distributed``."""
    rank: str
    """Variable with the number of a rank."""
    size: str
    """Option for the number of processes on a node."""
    needs: tuple[str, ...] = ()
    """Programs that must be installed."""

    def launcher(self, *options: str) -> list[str]:
        """Return the command, without its script."""
        return [PYTHON, "-m", f"det_core.launch.{self.name}", *options]

    def local(self, processes: int, *options: str) -> list[str]:
        """Return the command, without its script, for ``processes`` ranks on this node."""
        return self.launcher(*options, self.size, str(processes))

    def who(self, folder: Path) -> str:
        """Write :data:`WHO` for this framework and return its path."""
        (folder / "who.py").write_text(textwrap.dedent(WHO).format(context=textwrap.dedent(self.context).strip()))
        return str(folder / "who.py")


HOROVOD = "import horovod.torch as hvd; hvd.init(); distributed = core.DistributedContext.from_horovod(hvd)"
FRAMEWORKS = {
    framework.name: framework
    for framework in (
        Framework(
            "torch_distributed",
            context="distributed = core.DistributedContext.from_torch_distributed()",
            rank="RANK",
            size="--nproc-per-node",
        ),
        Framework("horovod", context=HOROVOD, rank="HOROVOD_RANK", size="-np"),
        Framework(
            "deepspeed",
            context="distributed = core.DistributedContext.from_deepspeed()",
            rank="RANK",
            size="--num_gpus",
        ),
    )
}
MPI = Framework(
    "wrap_rank",
    context="distributed = core.DistributedContext.from_mpi()",
    rank="OMPI_COMM_WORLD_RANK",
    size="-np",
    needs=("mpirun",),
)
"""mpirun, which starts the ranks itself, with our ``wrap_rank`` before each."""


def variables() -> dict[str, str]:
    """Return the variables of an activated venv, and those that keep the frameworks quiet."""
    return {
        "VIRTUAL_ENV": VENV,
        "PATH": f"{VENV}/bin:{os.environ['PATH']}",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": f"{VENV}/torch_extensions",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }


WARM = warm.Kind(
    PYTHON,
    (
        *("torch.distributed", "torch.utils.data", "numpy", "sklearn.datasets", "horovod.torch", "deepspeed.pipe"),
        "torch._inductor.compile_fx",  # an engine of ZeRO 1 imports it: 1.6 CPU seconds
        *("det_core.core", "det_core.client", "det_core.pytorch.deepspeed", "det_core.exec.harness"),
    ),
    variables(),
)
"""Server of ranks for tests whose subject is neither a launcher nor the start of a framework."""


def mpirun(*options: str) -> list[str]:
    """Return the command, without its script, of mpirun with :data:`MPI`'s wrapper before each rank."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", *root, "--oversubscribe", *options, *MPI.launcher(MPI.rank)]


def need(*programs: str) -> None:
    """Skip this test, or fail it in CI, if the venv or a program is missing."""
    if not VENV or not os.access(PYTHON, os.X_OK):
        skip_or_fail("FRAMEWORKS_VENV does not name a venv with the frameworks: `make test-launchers` makes it")
    if absent := [name for name in programs if shutil.which(name) is None]:
        skip_or_fail(f"{', '.join(absent)} not installed: `make system-deps` does it")


@pytest.fixture(params=sorted(FRAMEWORKS))
def framework(request: pytest.FixtureRequest) -> Framework:
    """Return each framework in turn."""
    found = FRAMEWORKS[request.param]
    need(*found.needs)
    return found


def told(output: str) -> dict[int, list[Any]]:
    """Return the output of :data:`WHO` on each rank, by the number in the line's prefix."""
    found = re.findall(r"^\[rank=(\d+)\] told (.*)$", output, re.MULTILINE)
    return {int(rank): json.loads(text) for rank, text in found}


def places(counts: Mapping[str, int]) -> list[list[Any]]:
    """Return numbers and host of every rank, given the count of each host."""
    size, found = sum(counts.values()), []
    for machine, (host, count) in enumerate(counts.items()):
        for local in range(count):
            found.append([[len(found), size, local, count, machine, len(counts)], host])
    return found


def everyone_is_right(output: str) -> None:
    """Check the output of :data:`WHO`: numbers, host and secret of two ranks on each of two nodes."""
    expected = [[*place, SECRET] for place in places(dict.fromkeys(NAMES, 2))]
    assert told(output) == dict.fromkeys(range(4), expected), output
    assert unprefixed(output) == []


PRINTS = r"""
    import os, sys
    rank = os.environ[sys.argv[1]].encode()
    with os.fdopen(1, "wb", buffering=1 << 16, closefd=False) as out:
        out.write(b"\xff\xfe \xc3 no utf-8\n" + b"x" * int(sys.argv[2]) + b"\n")
        for i in range(int(sys.argv[3])):
            out.write(b"%s says %d\n" % (rank, i))
        out.write(b"no end")
    os.write(2, b"to stderr\n")
"""
"""Script that prints invalid UTF-8, a long line, many lines, and one without an end."""


def assert_all_was_printed(output: bytes, *, ranks: int, long: int, lines: int) -> None:
    """Check that the output of :data:`PRINTS` is complete, and every line has its prefix."""
    found = output.splitlines()
    assert len(found) == ranks * (lines + 3)
    for rank in range(ranks):
        prefix = b"[rank=%d] " % rank
        own = [line[len(prefix) :] for line in found if line.startswith(prefix)]
        assert own[0] == b"\xff\xfe \xc3 no utf-8"
        assert own[1] == b"x" * long
        assert own[2:-1] == [b"%d says %d" % (rank, i) for i in range(lines)]
        assert own[-1] == b"no end"


def unprefixed(output: str) -> list[str]:
    """Return the lines without the prefix of a rank."""
    return [line for line in output.splitlines() if not re.match(r"\[rank=\d+\] ", line)]

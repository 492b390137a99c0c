"""Scripts without ``if __name__ == "__main__":`` whose processes are started by spawn or forkserver."""

from __future__ import annotations

from pathlib import Path

import pytest

from det_core import client
from support.ranks import running

PROCESS = """
    import multiprocessing, sys
    from det_core import core

    def work():
        print("worked", flush=True)

    with core.init(distributed=core.DistributedContext.detect()) as ctx:
        process = multiprocessing.get_context(sys.argv[1]).Process(target=work)
        process.start()
        process.join()
        print("status", process.exitcode, flush=True)
"""
LOADER = """
    import sys
    from det_core import core

    with core.init() as ctx:
        from torch.utils.data import DataLoader

        loader = DataLoader(range(4), num_workers=1, multiprocessing_context=sys.argv[1])
        list(loader)
"""


@pytest.mark.parametrize(("method", "size"), [("spawn", 1), ("forkserver", 2)])
def test_init_in_child_that_imports_the_script_is_one_line_and_no_run(method: str, size: int, tmp_path: Path) -> None:
    with running(PROCESS, size, tmp_path, args=(method,), cold=True) as ranks:
        assert ranks.wait() == [0] * size, ranks.output(0)
    for rank in range(size):
        printed = ranks.output(rank)
        call = "core.init()" if size == 1 else "DistributedContext()"
        [line] = [line for line in printed.splitlines() if "__main__" in line]
        assert line.startswith(f"det_core: {call} ") and line.endswith('under `if __name__ == "__main__":`')
        assert "status 1" in printed
        assert "worked" not in printed and "Traceback" not in printed
    assert [run.state for run in client.runs()] == ["completed"]


def test_init_in_script_that_forks_needs_no_guard(tmp_path: Path) -> None:
    with running(PROCESS, 1, tmp_path, args=("fork",), cold=True) as ranks:
        assert ranks.wait() == [0], ranks.output(0)
    assert "worked\nstatus 0\n" in ranks.output(0)
    assert [run.state for run in client.runs()] == ["completed"]


def test_loader_worker_that_imports_the_script_makes_no_run(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with running(LOADER, 1, tmp_path, args=("forkserver",)) as ranks:
        assert ranks.wait() == [1], ranks.output(0)
    assert ranks.output(0).count('put the lines that train under `if __name__ == "__main__":`') == 1
    assert [run.state for run in client.runs()] == ["failed"]

"""``core.random_state()``: out of torch.load and JSON, and back."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from det_core import core
from det_core.errors import DetCoreError
from det_core.protocol.transport import retry_delay
from support import scripts

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


def drawn() -> list[Any]:
    """Return the next numbers of each generator; an odd number of normals leaves one cached."""
    return [
        [random.random() for _ in range(3)], random.gauss(0, 1),
        numpy.random.rand(3).tolist(), numpy.random.standard_normal(),
        torch.rand(3).tolist(), torch.randn(1).tolist(),
    ]  # fmt: skip


def test_set_random_state_repeats_numbers() -> None:
    drawn()
    state = core.random_state()
    before = drawn()
    assert drawn() != before
    core.set_random_state(state)
    assert drawn() == before


def test_random_state_is_read_by_weights_only(tmp_path: Path) -> None:
    state = core.random_state()
    before = drawn()
    torch.save({"random": [state, state]}, tmp_path / "state.pt")
    core.set_random_state(torch.load(tmp_path / "state.pt", weights_only=True)["random"][1])
    assert drawn() == before


def test_set_random_state_accepts_lists_of_json() -> None:
    state = core.random_state()
    kept = json.loads(json.dumps({key: state[key] for key in ("python", "numpy")}))
    before = drawn()[:4]
    core.set_random_state(kept)
    assert drawn()[:4] == before


def test_random_state_omits_libraries_that_are_not_imported(tmp_path: Path) -> None:
    script = (
        "import sys, random\nfrom det_core import core\n"
        "state = core.random_state()\n"
        "assert list(state) == ['python'] and 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "import numpy\nassert list(core.random_state()) == ['python', 'numpy']\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    script = (
        "import sys\nfrom det_core import core\ncore.set_random_state(eval(sys.argv[1]))\n"
        "import numpy\nprint(numpy.random.rand())"
    )
    numpy.random.seed(5)
    state = {key: value for key, value in core.random_state().items() if key in ("python", "numpy")}
    done = scripts.run(script, tmp_path, repr(state))
    assert float(done.stdout) == numpy.random.rand()


def test_set_random_state_of_something_else_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"expected what core.random_state\(\) returns, found the keys 'model'"):
        core.set_random_state({"model": 1})


def test_master_outage_draws_no_global_random_numbers() -> None:
    """Retries wait for a random while, in whichever thread; the script draws what it would have drawn."""
    asked = threading.Event()

    class Away:
        times = 0

        def preempted(self, timeout: float) -> bool:
            self.times += 1
            if self.times == 3:
                asked.set()
            raise DetCoreError("away")

        def stop_waiting(self) -> None:
            pass

    state = core.random_state()
    expected = drawn()
    core.set_random_state(state)
    away: Any = Away()
    with core.DistributedContext.detect() as distributed:
        preempt = core.PreemptContext(distributed, master=away)
        preempt.start()
        asked.wait()
    assert all(retry_delay(attempts) > 0 for attempts in range(3))
    assert drawn() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda() -> None:
    torch.rand(1, device="cuda")
    state = core.random_state()
    before = torch.rand(4, device="cuda").tolist()
    core.set_random_state({**state, "cuda": [each.cuda() for each in state["cuda"]]})
    assert torch.rand(4, device="cuda").tolist() == before

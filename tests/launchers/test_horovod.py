"""A trial under the real Horovod: gradients go through its optimizer, aggregated over batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import TESTS, warm
from support.frameworks import WARM, variables
from support.launcher import launched

TRIAL = """
import json
import torch
from det_core import pytorch
from support.trials import Tiny


class Trial(Tiny):
    records, batch_size = 8, 2

    def build(self):
        model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(model.weight, float(self.context.distributed.rank))  # the chief's count
        return model


if __name__ == "__main__":
    with pytorch.init(hparams={}, aggregation_frequency=AGGREGATION) as context:
        trial = Trial(context)
        pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(LENGTH))
        print("SAID", json.dumps([context.distributed.size, trial.weights, trial.seen]), flush=True)
"""


def weights(folder: Path, command: list[str], aggregation: int, length: int) -> list[tuple[int, list[float]]]:
    folder.mkdir()
    code = TRIAL.replace("AGGREGATION", str(aggregation)).replace("LENGTH", str(length))
    (folder / "train.py").write_text(code)
    env = {**variables(), "DET_CORE_HOME": str(folder / "home"), "PYTHONPATH": str(TESTS)}
    with launched(command, "train.py", folder=folder, **env) as job:
        assert job.wait() == 0, job.err
    said = [json.loads(line.partition("SAID ")[2]) for line in job.out.splitlines() if "SAID " in line]
    return [(size, found) for size, found, _ in said]


def test_two_ranks_with_aggregation_are_one_process_with_all_batches(tmp_path: Path) -> None:
    python = warm.python(WARM)
    two = weights(tmp_path / "two", [python, "-m", "det_core.launch.horovod", "-np", "2"], 2, 2)
    one = weights(tmp_path / "one", [python], 4, 4)
    assert [size for size, _ in two] == [2, 2] and two[0] == two[1]
    assert two[0][1] == pytest.approx(one[0][1], rel=1e-6)

"""The smaller parts that trainers share: metrics, devices, precision, strategies, the progress line."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from det_core._training.devices import mover, to_device  # noqa: E402
from det_core._training.metric_buffer import MetricBuffer  # noqa: E402
from det_core._training.precision import autocast_forward  # noqa: E402
from det_core._training.progress_line import ProgressLine  # noqa: E402
from det_core._training.strategy import OneProcess, load_model, load_optimizer  # noqa: E402
from support.ranks import running  # noqa: E402

CPU = torch.device("cpu")


def test_metrics_are_as_they_were_when_they_were_added() -> None:
    buffer = MetricBuffer()
    scalar, array, numpys = torch.tensor(1.0), torch.tensor([1.0, 2.0]), np.ones(2)
    buffer.add({"scalar": scalar, "array": array, "numpy": numpys, "text": "x", "none": None, "number": 3})
    scalar += 1
    array += 1
    numpys += 1
    (row,) = buffer.take()
    assert row.pop("array").tolist() == [1.0, 2.0] and row.pop("numpy").tolist() == [1.0, 1.0]
    assert row == {"scalar": 1.0, "text": "x", "none": None, "number": 3}
    assert buffer.take() == [] and len(buffer) == 0


def test_metrics_of_a_device_come_over_together_and_in_their_places() -> None:
    """The meta device has no values; so a stand-in counts as another device."""

    class Away(torch.Tensor):
        is_cpu = False

    buffer = MetricBuffer()
    for step in range(3):
        buffer.add({"a": torch.tensor(float(step)).as_subclass(Away), "b": torch.tensor([step, 9]).as_subclass(Away)})
    rows = buffer.take()
    assert [row["a"] for row in rows] == [0.0, 1.0, 2.0]
    assert [list(row["b"]) for row in rows] == [[0, 9], [1, 9], [2, 9]]


def test_containers_keep_their_types() -> None:
    Point = namedtuple("Point", "x y")
    data = OrderedDict(a=Point(torch.ones(1), np.ones(1, "f4")), b=[(np.array(["t"]), "t")])
    moved = to_device(data, CPU)
    assert type(moved) is OrderedDict and type(moved["a"]) is Point
    assert isinstance(moved["a"].y, torch.Tensor) and moved["b"][0][1] == "t"

    class Strange(dict):  # type: ignore[type-arg]
        def __init__(self) -> None:
            super().__init__(x=torch.ones(1))

    assert to_device(Strange(), CPU)["x"].item() == 1.0
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    moved = to_device(packed, torch.device("meta"))  # by its own to(), which leaves the sizes where they are
    assert moved.data.is_meta and moved.batch_sizes.is_cpu
    batch = [torch.ones(1), torch.ones(2)]
    assert mover(CPU)(batch) is batch, "nothing is done on a CPU"
    assert isinstance(mover(CPU)([np.ones(1)])[0], torch.Tensor)


def test_autocast_around_forward() -> None:
    class Model(torch.nn.Linear):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            out = super().forward(x)
            assert out.dtype is torch.bfloat16
            return {"out": (out, out)}

    model = Model(2, 2)
    autocast_forward(model, "cpu", torch.bfloat16)
    out = model(torch.ones(1, 2))
    assert type(model) is Model and set(model.state_dict()) == {"weight", "bias"}
    assert out["out"][0].dtype is torch.float32
    average = copy.deepcopy(model)
    torch.nn.init.zeros_(average.weight)
    torch.nn.init.zeros_(average.bias)
    assert average(torch.ones(1, 2))["out"][0].tolist() == [[0.0, 0.0]], "a copy has its own weights"


def test_states_with_and_without_the_prefix_of_ddp() -> None:
    model, strategy = torch.nn.Linear(1, 1), OneProcess(CPU)
    state = {f"module.{name}": torch.full_like(value, 4.0) for name, value in model.state_dict().items()}
    load_model(model, state)
    assert model.weight.item() == 4.0

    class Holder(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(1, 1)

    holder = Holder()
    load_model(holder, state)
    assert holder.module.weight.item() == 4.0, "its own part of that name"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    strategy.load([model], [optimizer], strategy.state([model], [optimizer]))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_on_a_terminal_and_nothing_in_a_file() -> None:
    silent = io.StringIO()
    ProgressLine(silent).update(1, 10)
    assert silent.getvalue() == ""
    screen = Terminal()
    line = ProgressLine(screen)
    line.update(5, 100, {"loss": 0.123456, "text": "no"})
    line.update(6, 100)
    assert "5/100" in screen.getvalue() and "loss 0.1235" in screen.getvalue() and "no" not in screen.getvalue()
    assert "6/100" not in screen.getvalue(), "drawn by time"
    line.close()
    assert screen.getvalue().endswith("\r\x1b[K") and "\n" not in screen.getvalue()
    line.say("accuracy 0.9")
    assert screen.getvalue().endswith("\r\x1b[Kaccuracy 0.9\n")


DDP = """
import torch
from det_core._training.process_group import destroy_group
from det_core._training.strategy import DDP

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
strategy = DDP(torch.device("cpu"))


class Model(torch.nn.Module):
    kind = "mine"

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1, bias=False)
        self.norm = torch.nn.BatchNorm1d(1)
        torch.nn.init.zeros_(self.linear.weight)

    def forward(self, x):
        return self.norm(self.linear(x)) if self.training else self.linear(x)


model = strategy.wrap(Model())
frozen = strategy.wrap(torch.nn.Linear(1, 1).requires_grad_(False))
assert type(frozen) is torch.nn.Linear and model.kind == "mine"
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model.train()
with strategy.no_sync([model, frozen]):
    strategy.backward(model(torch.randn(4, 1)).sum() * 0 + model.linear.weight.sum() * (rank + 1))
assert model.linear.weight.grad.item() == rank + 1
optimizer.zero_grad()
model.module.norm.running_mean.fill_(float(rank))
model.eval()
with torch.no_grad(), strategy.evaluating([model, frozen]):
    for _ in range(1 + 5 * rank):  # ranks with different numbers of batches
        model(torch.ones(1, 1))
assert model.module.norm.running_mean.item() == 0.0, "the chief's"
state = strategy.state([model], [optimizer])
assert not any(name.startswith("module.") for name in state["models_state_dict"][0])
strategy.load([model], [optimizer], state)
print("done", flush=True)
destroy_group()
"""


def test_two_ranks(tmp_path: Path) -> None:
    with running(DDP, 2, tmp_path) as ranks:
        assert ranks.wait() == [0, 0], ranks.output(0) + ranks.output(1)


@pytest.mark.parametrize(("saved", "loaded", "lacks"), [
    (torch.optim.SGD, torch.optim.Adam, "betas"),
    (torch.optim.Adam, torch.optim.SGD, "dampening, momentum"),
    (torch.optim.Adam, torch.optim.AdamW, None),
])  # fmt: skip
def test_the_state_of_another_kind_of_optimizer_is_told(saved: Any, loaded: Any, lacks: str | None) -> None:
    model = torch.nn.Linear(1, 1)
    before, after = saved(model.parameters(), lr=0.1), loaded(model.parameters(), lr=0.1)
    model(torch.ones(1)).backward()
    before.step()
    if lacks is None:
        load_optimizer(after, before.state_dict())
        return
    with pytest.raises(ValueError, match=f"not that of {loaded.__name__}: it lacks .*{lacks}"):
        load_optimizer(after, before.state_dict())

"""Values on a GPU that are saved, written to event files or sampled; skipped on a machine without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from det_core import client, core
from support.processes import until

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


def queue_work() -> None:
    """Occupy this stream for a third of a second or so."""
    torch.cuda._sleep(500_000_000)


def test_background_save_of_gpu_tensors_has_values_of_the_save(tmp_path: Path) -> None:
    """Kernels queued before the save are in it, later writes are not."""
    weight = torch.zeros(1 << 20, device="cuda")
    state = {
        "weight": weight,
        "tied": weight[1024:].view(-1, 256),
        "transposed": torch.zeros(64, 32, device="cuda", dtype=torch.bfloat16).t(),
        "parameter": torch.nn.Parameter(torch.zeros(7, device="cuda")),
        "beside": torch.zeros(3),
    }

    def fill(number: float) -> None:
        queue_work()
        with torch.no_grad():
            for name in ("weight", "transposed", "parameter", "beside"):
                state[name].fill_(number)

    saved: dict[str, float] = {}
    with core.init(checkpoint_storage=tmp_path) as ctx:
        for number in range(1, 4):  # from the second on into the memory of the first
            fill(number)
            saved[ctx.checkpoint.save(state, {"steps_completed": number}, blocking=False)] = number
            fill(-1)
    for storage_id, number in saved.items():
        found = torch.load(tmp_path / storage_id / "state.pt")
        held = {name: set(tensor.flatten().tolist()) for name, tensor in found.items()}
        assert held == {name: {number} for name in state}
        assert {tensor.device.type for tensor in found.values()} == {"cpu"}
        assert found["tied"].untyped_storage().data_ptr() == found["weight"].untyped_storage().data_ptr()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_background_save_of_non_dense_gpu_tensors_has_values_of_the_save(tmp_path: Path) -> None:
    """Such a tensor stays on its device, where its copy may still be on its way when the loop goes on."""
    sparse = torch.eye(8, device="cuda").to_sparse().coalesce()
    with core.init(checkpoint_storage=tmp_path) as ctx:
        queue_work()
        sparse.values().fill_(3)
        storage_id = ctx.checkpoint.save({"sparse": sparse}, {"steps_completed": 1}, blocking=False)
        sparse.values().fill_(-1)
    found = torch.load(tmp_path / storage_id / "state.pt")["sparse"]
    assert found.is_cuda and found.to_dense().equal(3 * torch.eye(8, device="cuda"))


def test_event_files_of_gpu_tensors_have_reported_values() -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    loss = torch.zeros((), device="cuda")
    with core.init(tensorboard_mode=core.TensorboardMode.AUTO) as ctx:
        for step in range(3):
            queue_work()
            loss.fill_(step)
            ctx.train.report_metrics("g", step, {"loss": loss})
            ctx.train.write_scalars(step, {"direct": loss})
            loss.fill_(-1)
        folder = ctx.train.get_tensorboard_path()
    accumulator = reading.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    for tag in ("g/loss", "direct"):
        assert [(event.step, event.value) for event in accumulator.Scalars(tag)] == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_profiler_reports_the_gpu() -> None:
    pytest.importorskip("pynvml")
    pytest.importorskip("psutil")
    with core.init() as ctx:
        ctx.profiler.on(0.1, 1)
        torch.zeros(1 << 20, device="cuda")
        until(lambda: "gpu" in client.run(ctx.run_id).groups())
    (agent,) = next(client.run(ctx.run_id).rows("gpu")).metrics.values()
    gpu = next(iter(agent.values()))
    assert 0 <= gpu["gpu_util"] <= 100 and gpu["gpu_free_memory"] > 2**30
    assert gpu["gpu_power"] > 1 and 0 < gpu["gpu_temperature"] < 120

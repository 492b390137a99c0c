"""Parts of DeepSpeed trials that work without DeepSpeed: configurations, units, mistakes."""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from det_core import core, pytorch
from det_core._training.data_order import Position
from det_core.errors import CheckpointError, InvalidExperimentException, MissingExtra
from det_core.pytorch import deepspeed
from det_core.pytorch._loaders import Loaders
from det_core.pytorch._reducer import check_names, training_results
from det_core.pytorch.deepspeed import (
    DeepSpeedTrialContext,
    ModelParallelUnit,
    _context,
    make_data_parallel_mpu,
    overwrite_deepspeed_config,
)
from det_core.pytorch.deepspeed._checkpoint import Shards
from det_core.storage import DirectoryStore
from support.checkpoints import Recorder
from support.trials import Numbers

BASE = {"train_batch_size": 16, "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.9, 0.99]}}, "fp16": {}}


def test_case_59_a_configuration_is_overwritten(tmp_path: Path) -> None:
    before = copy.deepcopy(BASE)
    source = {"optimizer": {"params": {"lr": 0.2}}, "gradient_clipping": 1.0, "fp16": {"enabled": True}}
    found = overwrite_deepspeed_config(BASE, source)
    assert found == {
        "train_batch_size": 16, "gradient_clipping": 1.0, "fp16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 0.2, "betas": [0.9, 0.99]}},
    }  # fmt: skip
    found["optimizer"]["params"]["betas"].append(1)
    found["fp16"]["enabled"] = False
    assert before == BASE and source["fp16"] == {"enabled": True}
    (tmp_path / "ds.json").write_text(json.dumps(BASE))
    assert overwrite_deepspeed_config(str(tmp_path / "ds.json"), {"optimizer": 3}) == {**BASE, "optimizer": 3}


def test_case_59_mistakes_in_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "twice.json").write_text('{"fp16": {"enabled": true, "enabled": false}}')
    with pytest.raises(ValueError, match=r"twice.json has duplicate key\(s\) enabled"):
        overwrite_deepspeed_config(str(tmp_path / "twice.json"), {})
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken.json is not JSON"):
        overwrite_deepspeed_config(str(tmp_path / "broken.json"), {})
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(TypeError, match="has a list"):
        overwrite_deepspeed_config(str(tmp_path / "list.json"), {})
    with pytest.raises(TypeError, match="expected a path or a dict, found a list"):
        overwrite_deepspeed_config([("a", 1)], {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"source_ds_dict=.*found a list"):
        overwrite_deepspeed_config({}, [])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer.type is 'Adam'"):
        overwrite_deepspeed_config(BASE, {"optimizer": {"type": {"name": "SGD"}}})


def test_a_key_with_a_dot_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Published files write it so, and DeepSpeed passes over it."""
    found = overwrite_deepspeed_config(BASE, {"optimizer.lr": 2, "optimizer": {"params.lr": 3}, "other.thing": 4})
    assert found["optimizer.lr"] == 2
    assert [record.getMessage() for record in caplog.records] == [
        "optimizer.lr is added as one key, which DeepSpeed ignores: nest it below optimizer",
        "optimizer.params.lr is added as one key, which DeepSpeed ignores: nest it below params",
    ]


@pytest.fixture
def context() -> Any:
    with core.init() as ctx:
        yield DeepSpeedTrialContext(ctx, torch.device("cpu"), hparams={"lr": 1})


def test_case_62_a_unit_before_an_engine(context: DeepSpeedTrialContext) -> None:
    assert make_data_parallel_mpu(context.distributed) == ModelParallelUnit(0, 1, True, True)
    with pytest.raises(InvalidExperimentException, match="no engine is wrapped"):
        context.set_mpu(ModelParallelUnit(0, 1, True, True))
    with pytest.raises(TypeError, match="expected a ModelParallelUnit, found a dict"):
        context.set_mpu({})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "asked", ["get_train_micro_batch_size_per_gpu", "get_num_micro_batches_per_slot", "num_micro_batches_per_slot"]
)
def test_batch_sizes_before_an_engine(context: DeepSpeedTrialContext, asked: str) -> None:
    with pytest.raises(InvalidExperimentException, match="no engine is wrapped"):
        found = getattr(context, asked)
        found()


@pytest.mark.parametrize("name", ["train_micro_batch_size_per_gpu", "num_micro_batches_per_slot"])
def test_names_that_published_trials_read(
    context: DeepSpeedTrialContext, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The private names as attributes; the deprecated ones tell so once a process."""
    context._sizes = (4, 3)
    expected = 4 if name.startswith("train") else 3
    assert getattr(context, f"_{name}") == getattr(context, f"get_{name}")() == expected
    with pytest.raises(AttributeError):
        setattr(context, f"_{name}", 5)
    _context._warn_deprecated.cache_clear()
    caplog.clear()
    assert [getattr(context, name) for _ in range(3)] == [expected] * 3
    assert [r.getMessage() for r in caplog.records] == [f"context.{name} is deprecated: use get_{name}()"]


def test_a_missing_option_is_told_as_one_of_deepspeeds_init() -> None:
    with core.init() as ctx:
        context = DeepSpeedTrialContext(ctx, torch.device("cpu"))
        with pytest.raises(ValueError, match=r": pass deepspeed.init\(hparams={…}\)"):
            context.get_hparams()
        with pytest.raises(ValueError, match=r": pass deepspeed.init\(exp_conf={…}\)"):
            context.get_data_config()


class RepeatingLoader:
    """As DeepSpeed's: without a length, and without an end."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        raise AssertionError("what it repeats is gone through")


def test_a_repeating_loader_has_the_length_of_what_it_repeats(context: DeepSpeedTrialContext) -> None:
    class Own(Bare):
        def build_training_data_loader(self) -> Any:
            return RepeatingLoader([1, 2, 3])

        build_validation_data_loader = build_training_data_loader

    context.disable_dataset_reproducibility_checks()
    loaders = Loaders(Own(context), context)
    batches, length = loaders.build(Position(7, 0, 0, 0, None, 1), full_validation=False)
    assert length == 3 and [next(batches) for _ in range(5)] == [1, 2, 3, 1, 2]
    validation, length = loaders.validation()
    assert length == 3 and list(validation) == [1, 2, 3]


def test_a_loader_that_can_be_gone_through_once(context: DeepSpeedTrialContext) -> None:
    class Spent(Bare):
        def build_training_data_loader(self) -> Any:
            return (number for number in range(2))

    context.disable_dataset_reproducibility_checks()
    batches, _ = Loaders(Spent(context), context).build(Position(7, 0, 0, 0, None, 1), full_validation=False)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(RuntimeError, match=r"no batch in pass 2: it can be iterated only once"):
        next(batches)


def test_a_loader_of_another_kind_is_a_runtime_error_too(context: DeepSpeedTrialContext) -> None:
    class Foreign(Bare):
        def build_training_data_loader(self) -> Any:
            return [1, 2]

    loaders = Loaders(Foreign(context), context)
    for kind in (RuntimeError, InvalidExperimentException):
        with pytest.raises(kind, match=r"expected a det_core\.pytorch\.DataLoader"):
            loaders.build(Position(7, 0, 0, 0, None, 1), full_validation=False)


class Bare(deepspeed.DeepSpeedTrial):
    def __init__(self, context: Any) -> None:
        self.context = context

    def build_training_data_loader(self) -> Any:
        return pytorch.DataLoader(Numbers(14), 2)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        return None

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        return {}


def test_a_trial_without_an_engine(context: DeepSpeedTrialContext) -> None:
    with pytest.raises(InvalidExperimentException, match=r"Bare.__init__\(\) wraps no engine"):
        deepspeed.Trainer(Bare(context), context).fit(max_length=pytorch.Batch(1))


def test_each_trainer_takes_its_own_trials(context: DeepSpeedTrialContext) -> None:
    with pytest.raises(TypeError, match="an instance of a PyTorchTrial"):
        pytorch.Trainer(Bare(context), context).fit(max_length=pytorch.Batch(1))  # type: ignore[arg-type]


def test_without_deepspeed_there_is_a_command_to_install_it() -> None:
    if any((Path(path) / "deepspeed").is_dir() for path in sys.path):
        pytest.skip("it is installed")
    with pytest.raises(MissingExtra, match=r"a DeepSpeedTrial needs deepspeed.*\[deepspeed\]"), deepspeed.init():
        pass


def test_a_folder_of_another_kind_is_no_checkpoint(context: DeepSpeedTrialContext, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "state_dict.pth").touch()
    shards = Shards(Bare(context), context, None)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"expected det_state_dict_rank<r>.pth, found state_dict.pth"):
        shards.read(tmp_path / "other", "none")


def test_others_pickles_are_not_read_unasked(
    context: DeepSpeedTrialContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's own are; a checkpoint without a manifest is nobody's, and the error names both ways out."""
    state = {"callbacks": {}, "rng_state": core.random_state()}
    checkpoint = context._core.checkpoint
    with checkpoint.store_path({"steps_completed": 1}) as (path, own):
        torch.save(state, path / "det_state_dict_rank0.pth")
    root = Path(client_run_folder(context)) / "checkpoints"
    foreign = "0" * 8 + "-1111-2222-3333-444444444444"
    (root / foreign).mkdir()
    torch.save(state, root / foreign / "det_state_dict_rank0.pth")

    def read(storage_id: str) -> Any:
        with checkpoint.restore_path(storage_id) as path:
            return Shards(Bare(context), context, None).read(path, storage_id)  # type: ignore[arg-type]

    assert read(own).random is not None
    with pytest.raises(CheckpointError, match=r"DET_CORE_ALLOW_PICKLE=1, or pass deepspeed.init\(allow_pickle=True\)"):
        read(foreign)
    context._allow_pickle = True
    assert read(foreign).random is not None
    context._allow_pickle = None
    monkeypatch.setenv("DET_CORE_ALLOW_PICKLE", "1")
    assert read(foreign).random is not None


@pytest.mark.parametrize(
    ("reader", "own"), [("7.a", True), ("7.b", True), ("70.a", False), ("run-1", False), ("7", False)]
)
def test_whose_a_checkpoint_is(tmp_path: Path, reader: str, own: bool) -> None:
    """This run's, or under a master, where runs are called EXPERIMENT.REQUEST, its experiment's."""
    alone = core.DistributedContext(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)

    def context_of(run_id: str) -> core.CheckpointContext:
        return core.CheckpointContext(
            alone, DirectoryStore(tmp_path / "store"), run_id=run_id, restart=0, observer=Recorder()
        )

    with contextlib.closing(context_of("7.a")) as writes, contextlib.closing(context_of(reader)) as reads:
        with writes.store_path({"steps_completed": 1}) as (path, storage_id):
            (path / "file").touch()
        assert reads.is_own(storage_id) is own
        (tmp_path / "store" / "nobodys").mkdir()
        (tmp_path / "store" / "nobodys" / "file").touch()
        assert not reads.is_own("nobodys")


def client_run_folder(context: DeepSpeedTrialContext) -> str:
    from det_core import client

    return str(client.run(context._core.run_id).path)


@pytest.mark.parametrize(("size", "each", "trained"), [(1, 1, 5), (2, 1, 4), (2, 3, 3), (1, 2, 11), (3, 2, 2)])
def test_the_next_micro_batch_is_taken(context: DeepSpeedTrialContext, size: int, each: int, trained: int) -> None:
    """Whatever is trained, saved and gone on from, again and again: the stream of micro batches has no gap."""

    def micro_batches(start: Position, count: int) -> tuple[list[list[list[float]]], Position]:
        per_rank, end = [], start
        for rank in range(size):
            loaders = Loaders(Bare(context), context, rank=rank, size=size, each=each)
            batches, length = loaders.build(start, full_validation=False)
            assert length == 7 // size + (7 % size > rank)
            per_rank.append([next(batches)[0].flatten().tolist() for _ in range(count * each)])
            end = loaders.position(start, start.batches + count)
        return per_rank, end

    begin = Position(7, 0, 0, 0, None, size)
    straight, straight_end = micro_batches(begin, 2 * trained + 1)
    first, middle = micro_batches(begin, trained)
    second, end = micro_batches(middle, 1)
    third, last = micro_batches(end, trained)
    for rank in range(size):
        assert first[rank] + second[rank] + third[rank] == straight[rank]
    assert last == straight_end and last.batches == 2 * trained + 1


def test_averages_leave_out_ranks_that_do_not_report() -> None:
    assert training_results([[], [{"a": 1.0}, {"a": 2.0}], [{"a": 3.0}, {"a": 6.0}]]) == (
        {"a": 3.0}, [{"a": 2.0}, {"a": 4.0}],
    )  # fmt: skip
    assert training_results([[], []]) == ({}, [])
    with pytest.raises(ValueError, match=r"on rank 2, but .a. on rank 1"):
        training_results([[], [{"a": 1.0}], [{"b": 1.0}]])
    with pytest.raises(ValueError, match="for batch 4,"):
        check_names([{"a": 1}, {"a": 1}, {"b": 1}, {"b": 1}], "train_batch", 3, rows_per_batch=2)

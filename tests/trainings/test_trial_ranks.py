"""The acceptance cases of trials that are about ranks, by their numbers; ranks are real processes.

Those that can share a start of two ranks do; what they do is in :mod:`support.rank_cases`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import TESTS

pytest.importorskip("torch")

from support.processes import free_port
from support.rank_cases import FAILING, WHERE
from support.ranks import running
from support.trials import Tiny, fit

CODE = "from support.rank_cases import main; main()"


class Told:
    """Results of each case on two ranks, and their whole outputs."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        path = str(TESTS)
        env = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DET_CORE_HOME": str(folder / "home")}
        with running(CODE, 2, folder, env=env, args=arguments) as ranks:
            statuses = ranks.wait()
            self.outputs = [ranks.output(rank) for rank in range(2)]
        assert statuses == [0, 0], "\n".join(self.outputs)
        said = [
            [json.loads(line[5:]) for line in each.splitlines() if line.startswith("SAID ")] for each in self.outputs
        ]
        self._said = [dict(each) for each in said]

    def __getitem__(self, case: str) -> list[Any]:
        return [each[case] for each in self._said]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return Told(tmp_path_factory.mktemp("told"), "together")


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return Told(tmp_path_factory.mktemp("failed"), "failing", *(str(free_port()) for _ in FAILING))


def test_case_29_who_saves(told: Told) -> None:
    (first, its_uuid), (second, uuid) = told["case_29_who_saves"]
    assert first == ["on_checkpoint_save_start", "on_checkpoint_write_end", "on_checkpoint_upload_end"]
    assert second == ["on_checkpoint_upload_end"] and its_uuid == uuid


def test_case_29_a_file_of_the_chief_alone_gives_all_its_random_states(told: Told) -> None:
    (chiefs, after), (workers, same) = told["case_29_a_file_of_the_chief_alone"]
    assert chiefs != workers and after == same


def test_case_30_and_case_31_batches_are_dealt_out_and_skipped(told: Told) -> None:
    (first, ends, skipped), (second, same_ends, its_skipped) = told["case_30_and_case_31"]
    assert first == [0, 2, 4, 6, 1, 3, 5, 0] and second == [1, 3, 5, 0, 2, 4, 6, 1]
    assert ends == same_ends == ["epoch ends with 3", "epoch ends with 7"], "the chief's length is everybody's"
    assert (skipped, its_skipped) == (first[2:], second[2:])


def test_case_35_validation_over_uneven_shards(told: Told) -> None:
    first, second = told["case_35"]
    assert first == second == {"AVG": pytest.approx(14.5 / 3), "SUM": 14.5, "MIN": 0.5, "MAX": 9.5}


def test_case_36_a_rank_without_a_validation_batch(told: Told) -> None:
    assert told["case_36"] == [["e0", "e0"], []]


def test_case_36_no_rank_has_one(failed: Told) -> None:
    for error in failed["case_36_no_batch_at_all"]:
        assert error == "RuntimeError: the validation loader has no batch on any rank"


def test_case_39_metrics_are_averaged_over_ranks(told: Told) -> None:
    assert told["case_39"] == [[[0.5, [0.5, 0.5], [0.0, 1.0]]]] * 2


def test_case_40_the_whole_set_on_the_chief_alone(told: Told) -> None:
    assert told["case_40"] == [[2, 2, 1], None]


def test_case_43_and_case_44_reducers_over_ranks(told: Told) -> None:
    assert told["case_43_and_case_44"] == [[[0.0, 2.0, 4.0, 6.0], [2, 4], ["everything", "loss"]]] * 2


def test_case_53_ddp_with_aggregation_is_one_process_with_all_batches(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = told["case_53"]
    alone = fit(Tiny, 4, init={"aggregation_frequency": 4})
    assert first == second == pytest.approx(alone.trial.weights, rel=1e-6)


def test_a_stop_between_updates_changes_nothing(told: Told) -> None:
    (first, resumed, gradients), (second, again, others) = told["a_stop_between_updates"]
    assert first == second == resumed == again
    assert all(mine != other for mine, other in zip(gradients[:3], others[:3], strict=True))


def test_a_frozen_model_is_rank_0s_everywhere(told: Told) -> None:
    first, second = told["a_frozen_model"]
    assert first == second


def test_ranks_and_contexts_that_are_given(told: Told) -> None:
    assert told["ranks_that_are_given"] == [[["DistributedDataParallel"] * 2, True, True]] * 2


def test_a_callback_on_one_rank_alone(told: Told) -> None:
    (mine, other), (second, its_own) = told["a_callback_on_one_rank_alone"]
    assert [mine[0], other[0], second[0], its_own[0]] == [4] * 4
    assert mine[1] > its_own[1] > 0 and other[1] == second[1] == 0


def test_a_stop_that_one_rank_requests_stops_all_at_one_batch(told: Told) -> None:
    first, second = told["a_stop_that_one_rank_requests"]
    assert first == second and 4 <= first <= 6
    assert "stopped by the script: stop requested" in told.outputs[0]


def test_different_reducers_are_told_of(failed: Told) -> None:
    for error in failed["different_reducers"]:
        assert (
            "ValueError: ranks differ in wrapped reducers: [('sum', 's', True, True)] on rank 1, [] on rank 0" in error
        )


def test_different_data_and_options_are_one_error_on_both(failed: Told) -> None:
    for error in failed["different_data"]:
        assert error == "ValueError: ranks differ in records of training data: 52 on rank 1, 40 on rank 0"
    for error in failed["different_options"]:
        assert "ranks differ in fit(validation_period=): Batch(value=3) on rank 1, Batch(value=2) on rank 0" in error


def test_a_loader_that_ends_early_is_an_error_on_both(failed: Told) -> None:
    for error in failed["a_validation_that_ends_early"]:
        assert "the validation loader ended after 1 of 2 batches" in error


def test_a_part_of_the_model_that_is_called_alone_is_an_error_on_both(failed: Told) -> None:
    for error in failed["a_part_called_alone"]:
        assert error.startswith("RuntimeError: ranks would train apart") and "(0.weight, 0.bias)" in error


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("where", WHERE)
def test_an_exception_on_one_rank_ends_the_others_with_its_text(failed: Told, where: str, culprit: int) -> None:
    errors = failed[f"{where}-{culprit}"]
    other = errors[1 - culprit]
    assert errors[culprit] == "ValueError: bad sample 4711"
    assert failed[f"{where}-{culprit} ended with"] == [1, 1]
    assert other.startswith("PeerLost: ") and f"rank {culprit}" in other and "ValueError: bad sample 4711" in other

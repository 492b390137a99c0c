"""The run history, and the average of a loss."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from det_core.accelerated.tracking import InMemoryRunHistory, LossTracker, RunHistory


def test_metrics_are_kept_in_the_order_of_first_recording() -> None:
    history = InMemoryRunHistory()
    for name, value in (("b", 1.0), ("a", 2.0), ("c", 3.0), ("b", 4.0)):
        history.update_metric(name, value)
    names = history.get_metric_names()
    assert list(names) == ["b", "a", "c"]
    assert names == {"a", "b", "c"} and names | {"d"} == {"a", "b", "c", "d"} and "a" in names
    assert history.get_metric_values("b") == [1.0, 4.0] and history.get_latest_metric("b") == 4.0
    history.update_metric("d", 5.0)
    assert "d" not in names, "what was asked before is a copy"


def test_reads_change_nothing() -> None:
    history = InMemoryRunHistory()
    history.update_metric("a", 1.0)
    assert history.get_metric_values("missing") == []
    with pytest.raises(ValueError, match=r"^No values have been recorded for the metric missing$"):
        history.get_latest_metric("missing")
    history.get_metric_values("a").append(2.0)
    assert history.get_metric_names() == {"a"} and history.get_metric_values("a") == [1.0]


def test_a_prefix_is_in_the_names() -> None:
    history = InMemoryRunHistory()
    history.set_metric_name_prefix("ema_model_")
    history.update_metric("loss", 1.0)
    assert history.metric_name_prefix == "ema_model_"
    assert history.get_latest_metric("ema_model_loss") == 1.0 and history.get_metric_values("loss") == []
    history._increment_epoch()
    history.reset()
    assert (history.current_epoch, history.metric_name_prefix) == (1, "ema_model_")
    assert history.get_metric_names() == set()
    history.set_metric_name_prefix()
    assert history.metric_name_prefix == ""


def test_epochs_and_deletion() -> None:
    history = InMemoryRunHistory()
    assert history.current_epoch == 1
    history._increment_epoch()
    assert history.current_epoch == 2
    history._set_epoch(7)
    assert history.current_epoch == 7
    history.update_metric("a", 1.0)
    history.delete_metric("a")
    assert history.get_metric_names() == set()
    with pytest.raises(KeyError, match="a"):
        history.delete_metric("a")


def test_a_history_of_ones_own_must_have_all_of_it() -> None:
    class Half(RunHistory):
        def reset(self) -> None: ...

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]


def test_the_loss_tracker_averages_over_records() -> None:
    tracker = LossTracker()
    assert (tracker.loss_value, tracker.total_loss, tracker.running_count, tracker.average) == (0, 0, 0, 0)
    for loss, size in ((1.0, 10), (2.0, 10), (4.0, 4)):
        tracker.update(loss, size)
    assert (tracker.loss_value, tracker.total_loss, tracker.running_count) == (4.0, 46.0, 24)
    assert tracker.average == 46 / 24
    tracker.update(2.0)
    assert tracker.running_count == 25
    tracker.reset()
    assert (tracker.loss_value, tracker.total_loss, tracker.running_count, tracker.average) == (0, 0, 0, 0)

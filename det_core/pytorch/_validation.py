"""Run validations, from the first hook to the report and the decision about a checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch

from det_core._training.metric_buffer import MetricBuffer
from det_core.pytorch._callback import Hooks
from det_core.pytorch._loop import Counters
from det_core.pytorch._reducer import evaluation_results, local_results
from det_core.pytorch._steps import TrialSteps
from det_core.pytorch._trial import Trial, overrides
from det_core.pytorch._trial_context import TrialContext

logger = logging.getLogger("det_core.pytorch")
POLICIES = ("best", "all", "none")


class Validation:
    """Validations of one fit.

    Args:
        policy: one of :data:`POLICIES`, which decides about checkpoints.
        test_mode: validate one batch only.
    """

    def __init__(
        self, trial: Trial, steps: TrialSteps, context: TrialContext, hooks: Hooks, *, policy: str, test_mode: bool
    ) -> None:
        self._trial = trial
        self._steps = steps
        self._context = context
        self._hooks = hooks
        self._core = context._core
        self._chief = context.distributed.rank == 0
        self._policy = policy
        self._test_mode = test_mode
        self._full = overrides(trial, "evaluate_full_dataset")

    def run(self, counters: Counters, step: int) -> tuple[dict[str, Any], bool]:
        """Validate, report at ``step``, and set ``counters.last_val``.

        Returns:
            the metrics, and whether the policy asks for a checkpoint; on every rank.
        """
        context = self._context
        hooks = self._hooks
        if self._chief:
            self._core.train.set_status("validating")
        context._reducers.reset()
        for model in context.models:
            model.eval()
        with torch.no_grad(), context._evaluating():
            hooks.call("on_validation_start")
            if self._full:
                metrics = self._full_set()
            else:
                metrics = self._batches()
        hooks.call("on_validation_end", metrics)
        counters.last_val = counters.batches_trained
        should_save = False
        if self._chief:
            should_save = self._report(metrics, step, counters.epochs_trained)
        return metrics, bool(context.distributed.broadcast(should_save))

    def _full_set(self) -> dict[str, Any]:
        metrics = self._steps.evaluate_full()
        reducers = self._context._reducers
        buffer = MetricBuffer()
        if metrics is not None:
            buffer.add(metrics)
        gathered = self._context.distributed.allgather((buffer.take(), reducers.slots(training=False)))
        return {**gathered[0][0][0], **reducers.reduce([each[1] for each in gathered], training=False)}

    def _batches(self) -> dict[str, Any]:
        """Evaluate this rank's batches; return the metrics reduced over all ranks."""
        hooks = self._hooks
        hooks.call("on_validation_epoch_start")
        outputs: list[Mapping[str, Any]] = []
        buffer = MetricBuffer()
        batches = self._steps.validation()
        if self._test_mode:
            batches = islice(batches, 1)
        for batch_idx, batch in enumerate(batches):
            metrics = self._steps.evaluate(batch, batch_idx)
            if metrics is not None:
                buffer.add(metrics)
                outputs.append(metrics)
        hooks.call("on_validation_epoch_end", outputs)
        reducer = self._trial.evaluation_reducer()
        reducers = self._context._reducers
        mine = local_results(buffer.take(), reducer), reducers.slots(training=False)
        gathered = self._context.distributed.allgather(mine)
        reduced = evaluation_results([results for results, _ in gathered], reducer)
        return {**reduced, **reducers.reduce([slots for _, slots in gathered], training=False)}

    def _report(self, metrics: dict[str, Any], step: int, epochs: int) -> bool:
        """Report on the chief; return whether the policy asks for a checkpoint."""
        train = self._core.train
        reportable = {name: value for name, value in metrics.items() if not isinstance(value, bytes)}
        if dropped := sorted(metrics.keys() - reportable.keys()):
            logger.warning("ignoring validation metrics that are bytes: %s", ", ".join(dropped))
        best = None
        if self._policy == "best":
            best = train.get_experiment_best_validation()  # before this one is reported
        train.report_validation_metrics(step, {"batches": step, "epochs": epochs, **reportable})
        if self._context._tensorboard:
            scalars = {}
            for name, value in reportable.items():
                prefix = "Determined/"
                if not name.startswith("val"):
                    prefix += "val_"
                scalars[prefix + name] = value
            train.write_scalars(step, scalars)
        return self._policy == "all" or (self._policy == "best" and self._is_better(reportable, best))

    def _is_better(self, metrics: Mapping[str, Any], best: float | None) -> bool:
        value = self._core.searcher.metric_of(metrics)
        if math.isnan(value):
            return False
        if best is None:
            return True
        if self._core.searcher.smaller_is_better:
            return value < best
        return value > best

"""A validation from its first hook to its report, and whether its result is worth a checkpoint."""

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
    """Validates, again and again; in ``test_mode`` one batch. ``policy`` says which results are worth a checkpoint."""

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
        """Validate, report at ``step``, and decide. ``counters.last_val`` is set.

        Returns:
            the metrics, and whether the policy wants a checkpoint; on every rank.
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
            metrics = self._full_set() if self._full else self._batches()
        hooks.call("on_validation_end", metrics)
        counters.last_val = counters.batches_trained
        wanted = self._report(metrics, step, counters.epochs_trained) if self._chief else None
        return metrics, bool(context.distributed.broadcast(wanted))

    def _full_set(self) -> dict[str, Any]:
        found = self._steps.evaluate_full()
        reducers = self._context._reducers
        buffer = MetricBuffer()
        if found is not None:
            buffer.add(found)
        gathered = self._context.distributed.allgather((buffer.take(), reducers.slots(training=False)))
        return {**gathered[0][0][0], **reducers.reduce([each[1] for each in gathered], training=False)}

    def _batches(self) -> dict[str, Any]:
        """Evaluate this rank's batches; what all ranks have found, reduced. A rank without a batch has no weight."""
        hooks = self._hooks
        hooks.call("on_validation_epoch_start")
        outputs: list[Mapping[str, Any]] = []
        buffer = MetricBuffer()
        for batch_idx, batch in enumerate(islice(self._steps.validation(), 1 if self._test_mode else None)):
            found = self._steps.evaluate(batch, batch_idx)
            if found is not None:
                buffer.add(found)
                outputs.append(found)
        hooks.call("on_validation_epoch_end", outputs)
        reducer = self._trial.evaluation_reducer()
        reducers = self._context._reducers
        mine = local_results(buffer.take(), reducer), reducers.slots(training=False)
        gathered = self._context.distributed.allgather(mine)
        metrics = evaluation_results([each[0] for each in gathered], reducer)
        return {**metrics, **reducers.reduce([each[1] for each in gathered], training=False)}

    def _report(self, metrics: dict[str, Any], step: int, epochs: int) -> bool:
        """Report on the chief; whether the policy wants a checkpoint."""
        train = self._core.train
        kept = {name: value for name, value in metrics.items() if not isinstance(value, bytes)}
        if dropped := sorted(metrics.keys() - kept.keys()):
            logger.warning("validation metrics that are bytes are not reported: %s", ", ".join(dropped))
        best = train.get_experiment_best_validation() if self._policy == "best" else None
        train.report_validation_metrics(step, {"batches": step, "epochs": epochs, **kept})
        if self._context._tensorboard:
            named = {name if name.startswith("val") else f"val_{name}": value for name, value in kept.items()}
            train.write_scalars(step, {f"Determined/{name}": value for name, value in named.items()})
        return self._policy == "all" or (self._policy == "best" and self._is_better(kept, best))

    def _is_better(self, metrics: Mapping[str, Any], best: float | None) -> bool:
        value = self._core.searcher.metric_of(metrics)
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value < best if self._core.searcher.smaller_is_better else value > best

"""The Trainer for DeepSpeed: that of ``det_core.pytorch`` with these steps."""

from __future__ import annotations

from det_core import pytorch
from det_core.errors import InvalidExperimentException
from det_core.pytorch._callback import Hooks
from det_core.pytorch._steps import TrialSteps
from det_core.pytorch.deepspeed._context import DeepSpeedTrialContext
from det_core.pytorch.deepspeed._steps import DeepSpeedTrialSteps
from det_core.pytorch.deepspeed._trial import DeepSpeedTrial


class Trainer(pytorch.Trainer):
    """Trains a :class:`DeepSpeedTrial`; ``fit()`` is that of ``det_core.pytorch.Trainer``.

    Args:
        trial: an instance of the user's class, built with ``context``.
        context: what ``init()`` gave.
    """

    _kind = DeepSpeedTrial

    def __init__(self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext) -> None:
        super().__init__(trial, context)  # type: ignore[arg-type]

    def _steps(self, hooks: Hooks) -> TrialSteps:
        return DeepSpeedTrialSteps(self._trial, self._context, hooks)

    def _check_trial(self) -> None:
        if not self._context.models:
            raise InvalidExperimentException(
                f"{type(self._trial).__name__}.__init__() wraps no engine: "
                "self.engine = context.wrap_model_engine(deepspeed.initialize(…)[0])"
            )
        self._check_evaluation()

"""``init()`` and ``Trainer``: opening a context, the checks before training, the order of construction."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from det_core import core
from det_core._env import Environment
from det_core._training.data_order import seed_generators
from det_core._training.process_group import destroy_group, local_device, make_group
from det_core._training.strategy import DDP, OneProcess, parameters_of
from det_core.errors import InvalidExperimentException
from det_core.pytorch._callback import Hooks
from det_core.pytorch._context import PyTorchTrialContext
from det_core.pytorch._loop import Batch, Epoch, TrainUnit
from det_core.pytorch._runner import FitOptions, Runner
from det_core.pytorch._steps import PyTorchTrialSteps, TrialSteps
from det_core.pytorch._trial import PyTorchTrial, overrides
from det_core.pytorch._validation import POLICIES

logger = logging.getLogger("det_core.pytorch")
_LATEST: Any = object()
"""A ``latest_checkpoint`` that was left out."""


@contextmanager
def init(
    *,
    hparams: Mapping[str, Any] | None = None,
    exp_conf: Mapping[str, Any] | None = None,
    distributed: core.DistributedContext | None = None,
    aggregation_frequency: int = 1,
    enable_tensorboard_logging: bool = True,
    core_context: core.Context | None = None,
    **core_options: Any,
) -> Iterator[PyTorchTrialContext]:
    """Open what a trial needs, as ``with pytorch.init(hparams={…}) as context:``.

    Under a launcher (ours, torchrun) the process group and the ranks are set up, unless that is done. In a trial of an
    experiment random, numpy and torch are seeded with the trial's seed, the same on every rank.

    Args:
        hparams: hyperparameters, for ``context.get_hparam()``. Left out in a trial of an experiment: the trial's.
        exp_conf: a configuration for ``context.get_experiment_config()``; in a trial it is the experiment's.
        distributed: the ranks. Left out: as the launcher says.
        aggregation_frequency: batches whose gradients are aggregated before optimizers step.
        enable_tensorboard_logging: write metrics as TensorBoard events, where the extra ``tensorboard`` is installed.
        core_context: the context to train in. Left out: the one that is open, else one is opened and closed here.
        core_options: further arguments of ``core.init()``: ``name``, ``resume``, ``checkpoint_storage``,
            ``searcher_metric``, …

    Raises:
        ValueError: the launcher says that there are several ranks, and their process group cannot be made; or
            ``core_options`` for a context that is open already.
    """
    with ExitStack() as stack:
        horovod = _horovod()

        def make(ranks: core.DistributedContext) -> None:
            if ranks.size > 1 and horovod is None:
                _make_group(stack)

        if distributed is None and horovod and core_context is None and core.current_context() is None:
            distributed = core.DistributedContext.from_horovod(horovod)
        context = opened(stack, core_context, distributed, core_options, make, hparams)
        hparams, exp_conf = told(context, hparams, exp_conf)
        yield PyTorchTrialContext(
            context, _strategy(context.distributed, horovod), hparams=hparams, exp_conf=exp_conf,
            aggregation_frequency=aggregation_frequency, horovod=horovod,
            enable_tensorboard_logging=enable_tensorboard_logging and tensorboard_is_there(),
        )  # fmt: skip


def opened(
    stack: ExitStack,
    core_context: core.Context | None,
    distributed: core.DistributedContext | None,
    core_options: Mapping[str, Any],
    make: Callable[[core.DistributedContext], None],
    hparams: Mapping[str, Any] | None,
) -> core.Context:
    """The core's context to train in: the one that is given, else the one that is open, else one is opened.

    Args:
        stack: closes what is opened here.
        core_context: the one to use.
        distributed: the ranks; None: as the launcher says.
        core_options: arguments of ``core.init()``; ValueError, if a context is open already.
        make: makes torch's process group of the ranks.
        hparams: stand in the record of a run that is opened here.
    """
    context = core_context if core_context is not None else core.current_context()
    if context is None:
        distributed = core.DistributedContext.detect() if distributed is None else distributed
        make(distributed)
        options = {"tensorboard_mode": core.TensorboardMode.MANUAL, "hparams": hparams, **core_options}
        return stack.enter_context(core.init(distributed=distributed, **options))
    if core_options:
        raise ValueError(f"a core context is open already, so {', '.join(core_options)}= must be given to that")
    make(context.distributed)
    return context


def told(
    context: core.Context, hparams: Mapping[str, Any] | None, exp_conf: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """Hyperparameters and configuration, a trial's being the master's; a trial's seed is set."""
    if not context.managed:
        return hparams, exp_conf
    if context.trial is not None:
        torch.manual_seed(context.trial.trial_seed)
        seed_generators(context.trial.trial_seed)
    return context.hparams if hparams is None else hparams, context.config


def _horovod() -> Any:
    """Horovod, initialised, under its launcher; else None."""
    if not Environment.read().launch.get("USE_HOROVOD"):
        return None
    from det_core._optional import require

    hvd = require("horovod.torch", extra="horovod", purpose="training under the Horovod launcher")
    hvd.init()
    return hvd


def _make_group(stack: ExitStack) -> None:
    """Make torch's process group, unless there is one. After an error it is destroyed, with ``stack``."""
    if make_group():
        stack.push(lambda kind, _error, _trace: None if kind is None else destroy_group())


def _strategy(distributed: core.DistributedContext, horovod: Any) -> OneProcess:
    device = local_device(distributed.local_rank if distributed.size > 1 else 0)
    if distributed.size > 1 and horovod is None:
        return DDP(device)
    return OneProcess(device)


def tensorboard_is_there() -> bool:
    from det_core._optional import is_installed

    return is_installed("tensorboard")


class Trainer:
    """Trains a :class:`PyTorchTrial`.

    Args:
        trial: an instance of the user's class, built with ``context``.
        context: what :func:`init` gave.
    """

    _kind: type[Any] = PyTorchTrial

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext) -> None:
        self._trial: Any = trial
        self._context: Any = context

    def configure_profiler(self, sync_timings: bool, enabled: bool, begin_on_batch: int, end_after_batch: int) -> None:
        """Does nothing: use ``fit(profiling_enabled=True)``, or ``context.set_profiler()`` for torch's profiler."""
        logger.error(
            "configure_profiler() does nothing: use fit(profiling_enabled=True) for samples of the machine, or "
            "context.set_profiler() for torch's profiler"
        )

    def fit(
        self,
        checkpoint_period: TrainUnit | None = None,
        validation_period: TrainUnit | None = None,
        max_length: TrainUnit | None = None,
        reporting_period: TrainUnit | None = Batch(100),  # noqa: B008
        checkpoint_policy: str | None = None,
        latest_checkpoint: str | None = _LATEST,
        step_zero_validation: bool = False,
        test_mode: bool = False,
        profiling_enabled: bool = False,
    ) -> None:
        """Train until ``max_length``, or as the searcher says in a trial; stop when the job is preempted.

        After each stop and each pause, the same call goes on where it was: with the data, batch index and random
        numbers that it would have had.

        Args:
            checkpoint_period: save whenever so many batches or epochs are trained, as ``Batch(100)``, ``Epoch(1)`` or
                at certain ones, as ``Batch([5, 30])``. Left out: as ``checkpoint_policy`` says, and at the end.
            validation_period: validate likewise. Left out: at the end.
            max_length: how long to train in all. Needed in a bare run.
            reporting_period: report training metrics likewise; they are reported at every other boundary too.
            checkpoint_policy: after a validation, save ``"all"``, ``"none"``, or only the ``"best"`` so far, which is
                the default and needs the searcher's metric (in a bare run:
                ``pytorch.init(searcher_metric=…)``; else all are).
            latest_checkpoint: the checkpoint to start from; None: none. Left out: that of the run that is resumed, or
                what the master hands over.
            step_zero_validation: validate before the first batch.
            test_mode: train one batch and validate one, to try a trial out. Not in a trial of an experiment.
            profiling_enabled: sample the machine, as ``ctx.profiler`` does.

        Raises:
            InvalidExperimentException, TypeError, ValueError: a mistake in the trial or in an argument; before
                training, where it can be known then.
            PeerLost: another rank has failed.
        """
        if self._context._preempted:
            logger.warning("the fit() before was preempted: this one begins after the resume")
            return
        options = self._checked(
            FitOptions(
                checkpoint_period, validation_period, max_length, reporting_period, self._policy(checkpoint_policy),
                latest_checkpoint, step_zero_validation, test_mode, profiling_enabled,
            )
        )  # fmt: skip
        trial = self._trial
        context = self._context
        if not isinstance(trial, self._kind):
            raise TypeError(f"Trainer() takes an instance of a {self._kind.__name__}, not {trial!r}")
        hooks = Hooks(trial.build_callbacks())
        if hooks.on_checkpoint_end:
            logger.warning("on_checkpoint_end() is deprecated: use on_checkpoint_write_end()")
        self._check_trial()
        self._context._fits += 1
        Runner(trial, self._steps(hooks), context, hooks, options).run()

    def _steps(self, hooks: Hooks) -> TrialSteps:
        """How the trial is called and saved."""
        return PyTorchTrialSteps(self._trial, self._context, hooks)

    def _checked(self, options: FitOptions) -> FitOptions:
        """Check the arguments of a fit, and find the checkpoint to start from."""
        ctx = self._context._core
        max_length = options.max_length
        latest = options.latest_checkpoint
        for name in ("validation_period", "checkpoint_period", "reporting_period", "max_length"):
            if (unit := getattr(options, name)) is not None and not isinstance(unit, Batch | Epoch):
                raise TypeError(f"fit({name}=) takes Batch(…) or Epoch(…), not {unit!r}")
        if max_length is not None and (isinstance(max_length.value, bool) or not isinstance(max_length.value, int)):
            raise TypeError(f"fit(max_length={max_length!r}): it needs a single number")
        if not ctx.managed and max_length is None and not options.test_mode:
            raise ValueError("fit() needs max_length in a bare run, as fit(max_length=Epoch(10))")
        if ctx.managed and options.test_mode:
            raise ValueError("fit(test_mode=True) is for a bare run, not for a trial of an experiment")
        if ctx.managed and max_length is not None and ctx.searcher.get_configured_units() is not None:
            logger.warning("fit(max_length=%r) does not count: the searcher says how long to train", max_length)
        if options.profiling_enabled and not ctx.managed:
            logger.info("the profiler's samples are in the run's journal: det-core runs export")
        if latest is _LATEST:
            return replace(options, latest_checkpoint=None, resumes=True)
        self._context._resumed = True
        if latest is None and ctx.latest_checkpoint is not None:
            logger.warning(
                "fit(latest_checkpoint=None) starts from scratch, though there is checkpoint %s", ctx.latest_checkpoint
            )
        return options

    def _policy(self, policy: str | None) -> str:
        if policy is not None and policy not in POLICIES:
            raise ValueError(f"fit(checkpoint_policy={policy!r}): expected one of {', '.join(map(repr, POLICIES))}")
        if policy not in (None, "best"):
            return policy
        if self._context._core.searcher.metric is not None:
            return "best"
        level = logging.INFO if policy is None else logging.WARNING
        logger.log(level, "no best metric is known (pytorch.init(searcher_metric=)): every validation is saved")
        return "all"

    def _check_trial(self) -> None:
        """Refuse a trial that cannot be trained, in one line."""
        trial = self._trial
        context = self._context
        name = type(trial).__name__
        if not context.models:
            raise InvalidExperimentException(f"{name}.__init__() wraps no model: self.model = context.wrap_model(…)")
        if not context.optimizers:
            raise InvalidExperimentException(
                f"{name}.__init__() wraps no optimizer: self.optimizer = context.wrap_optimizer(…)"
            )
        wrapped = {id(parameter) for model in context.models for parameter in model.parameters()}
        for number, optimizer in enumerate(context.optimizers, 1):
            shapes = [tuple(p.shape) for p in parameters_of([optimizer]) if id(p) not in wrapped]
            if shapes:
                raise InvalidExperimentException(
                    f"optimizer {number} of {len(context.optimizers)} updates {len(shapes)} parameter(s) of no wrapped "
                    f"model, such as one of shape {shapes[0]}: checkpoints would lack them, and ranks would train them "
                    "apart; give their module to context.wrap_model()"
                )
        self._check_evaluation()

    def _check_evaluation(self) -> None:
        trial = self._trial
        both = [m for m in ("evaluate_batch", "evaluate_full_dataset") if overrides(trial, m)]
        if len(both) != 1:
            found = "both" if both else "neither"
            raise InvalidExperimentException(
                f"{type(trial).__name__} must override one of evaluate_batch() and evaluate_full_dataset(); it "
                f"overrides {found}"
            )

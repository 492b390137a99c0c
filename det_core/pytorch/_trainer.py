"""``init()`` and ``Trainer``: open a context, and check a trial before training."""

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
_LATEST: Any = object()  # None means to start from scratch
"""Default of ``fit(latest_checkpoint=)``."""


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
    """Open the context of a trial, as ``with pytorch.init(hparams={…}) as context:``.

    Under a launcher (det_core's or torchrun) this makes the process group, unless it exists. In a trial of an
    experiment it seeds random, numpy and torch with the trial's seed, the same on every rank.

    Args:
        hparams: hyperparameters for ``context.get_hparam()``. Defaults to the trial's in an experiment.
        exp_conf: configuration for ``context.get_experiment_config()``. In a trial, the experiment's counts.
        distributed: the ranks. Defaults to those of the launcher.
        aggregation_frequency: number of batches whose gradients are aggregated before optimizers step.
        enable_tensorboard_logging: write metrics as TensorBoard events, if the extra ``tensorboard`` is installed.
        core_context: the context to train in. Defaults to the open one; without one, a context is opened and closed.
        core_options: further arguments of ``core.init()``, such as ``name``, ``resume`` and ``checkpoint_storage``.

    Raises:
        ValueError: If the process group of several ranks cannot be made, or if ``core_options`` are given while a
            context is open.
    """
    with ExitStack() as stack:
        horovod = _horovod()

        def init_group(ranks: core.DistributedContext) -> None:
            if ranks.size > 1 and horovod is None:
                _make_group(stack)

        if distributed is None and horovod and core_context is None and core.current_context() is None:
            distributed = core.DistributedContext.from_horovod(horovod)
        context = open_core_context(stack, core_context, distributed, core_options, init_group, hparams)
        hparams, exp_conf = trial_settings(context, hparams, exp_conf)
        yield PyTorchTrialContext(
            context, _strategy(context.distributed, horovod), hparams=hparams, exp_conf=exp_conf,
            aggregation_frequency=aggregation_frequency, horovod=horovod,
            enable_tensorboard_logging=enable_tensorboard_logging and is_tensorboard_installed(),
        )  # fmt: skip


def open_core_context(
    stack: ExitStack,
    core_context: core.Context | None,
    distributed: core.DistributedContext | None,
    core_options: Mapping[str, Any],
    init_group: Callable[[core.DistributedContext], None],
    hparams: Mapping[str, Any] | None,
) -> core.Context:
    """Return the given core context or the open one; if there is none, open one.

    Args:
        stack: closes a context opened here.
        core_context: the context to use, or None.
        distributed: the ranks. Defaults to those of the launcher.
        core_options: arguments of ``core.init()``.
        init_group: makes torch's process group of the ranks.
        hparams: hyperparameters for the record of a run opened here.

    Raises:
        ValueError: If ``core_options`` are given while a context is open.
    """
    context = core_context or core.current_context()
    if context is None:
        if distributed is None:
            distributed = core.DistributedContext.detect()
        init_group(distributed)
        options = {"tensorboard_mode": core.TensorboardMode.MANUAL, "hparams": hparams, **core_options}
        return stack.enter_context(core.init(distributed=distributed, **options))
    if core_options:
        raise ValueError(f"a core context is open: pass {', '.join(core_options)}= to its core.init()")
    init_group(context.distributed)
    return context


def trial_settings(
    context: core.Context, hparams: Mapping[str, Any] | None, exp_conf: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """Return hyperparameters and configuration, in a trial the master's; there, also seed the generators."""
    if not context.managed:
        return hparams, exp_conf
    if context.trial is not None:
        torch.manual_seed(context.trial.trial_seed)  # before the trial builds its models
        seed_generators(context.trial.trial_seed)
    if hparams is None:
        hparams = context.hparams
    return hparams, context.config


def _horovod() -> Any:
    """Return initialized Horovod under its launcher, otherwise None."""
    if not Environment.read().launch.get("USE_HOROVOD"):
        return None
    from det_core._optional import require

    hvd = require("horovod.torch", extra="horovod", purpose="training under the Horovod launcher")
    hvd.init()
    return hvd


def _make_group(stack: ExitStack) -> None:
    """Make torch's process group, unless it exists."""
    if make_group():
        destroy_after_error(stack)


def destroy_after_error(stack: ExitStack) -> None:
    """Destroy torch's process group if an error leaves ``stack``; scripts may use the group after a training."""

    def destroy(kind: type[BaseException] | None, _error: object, _trace: object) -> None:
        if kind is not None:
            destroy_group()

    stack.push(destroy)


def _strategy(distributed: core.DistributedContext, horovod: Any) -> OneProcess:
    if distributed.size == 1:
        return OneProcess(local_device(0))
    device = local_device(distributed.local_rank)
    if horovod is None:
        return DDP(device)
    return OneProcess(device)


def is_tensorboard_installed() -> bool:
    """Return whether the extra ``tensorboard`` is installed."""
    from det_core._optional import is_installed

    return is_installed("tensorboard")


class Trainer:
    """Trainer of a :class:`PyTorchTrial`.

    Args:
        trial: an instance of your class, built with ``context``.
        context: the context from :func:`init`.
    """

    _kind: type[Any] = PyTorchTrial

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext) -> None:
        self._trial: Any = trial
        self._context: Any = context

    def configure_profiler(self, sync_timings: bool, enabled: bool, begin_on_batch: int, end_after_batch: int) -> None:
        """Log an error: use ``fit(profiling_enabled=True)``, or ``context.set_profiler()`` for torch's profiler."""
        logger.error(
            "configure_profiler() has no effect: use fit(profiling_enabled=True) to sample the machine, or "
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
        """Train until ``max_length``, or in a trial as long as the searcher asks; stop when the job is preempted.

        After a stop or a pause, the same call continues with the data, batch index and random numbers that it would
        have had.

        Args:
            checkpoint_period: save after a period, as ``Batch(100)`` or ``Epoch(1)``, or at certain batches, as
                ``Batch([5, 30])``. Defaults to ``checkpoint_policy``, and the end.
            validation_period: validate after a period, likewise. Defaults to the end.
            max_length: total length of the training. Required in a bare run.
            reporting_period: report training metrics after a period, and at every other boundary.
            checkpoint_policy: after a validation, save ``"all"``, ``"none"``, or only the ``"best"`` so far (the
                default). ``"best"`` uses the searcher's metric, which a bare run sets by
                ``pytorch.init(searcher_metric=…)``; without a metric, all are saved.
            latest_checkpoint: ID of the checkpoint to start from; None starts from scratch. Defaults to that of the
                resumed run, or the one the master selected.
            step_zero_validation: validate before the first batch.
            test_mode: train one batch and validate one, to test a trial. Not in a trial of an experiment.
            profiling_enabled: sample the machine with ``ctx.profiler``.

        Raises:
            InvalidExperimentException, TypeError, ValueError: For a mistake in the trial or in an argument; before
                training if possible.
            PeerLost: If another rank has failed.
        """
        if self._context._preempted:
            logger.warning("skipping fit(): the one before was preempted; this one begins after the resume")
            return
        options = self._check_options(
            FitOptions(
                checkpoint_period, validation_period, max_length, reporting_period, self._policy(checkpoint_policy),
                latest_checkpoint, step_zero_validation, test_mode, profiling_enabled,
            )
        )  # fmt: skip
        trial = self._trial
        context = self._context
        if not isinstance(trial, self._kind):
            raise TypeError(f"Trainer(): expected an instance of a {self._kind.__name__}, found {trial!r}")
        hooks = Hooks(trial.build_callbacks())
        if hooks.on_checkpoint_end:
            logger.warning("on_checkpoint_end() is deprecated: use on_checkpoint_write_end()")
        self._check_trial()
        self._context._fits += 1
        Runner(trial, self._steps(hooks), context, hooks, options).run()

    def _steps(self, hooks: Hooks) -> TrialSteps:
        return PyTorchTrialSteps(self._trial, self._context, hooks)

    def _check_options(self, options: FitOptions) -> FitOptions:
        """Check the arguments of a fit, and select the checkpoint to start from."""
        ctx = self._context._core
        max_length = options.max_length
        latest = options.latest_checkpoint
        for name in ("validation_period", "checkpoint_period", "reporting_period", "max_length"):
            if (unit := getattr(options, name)) is not None and not isinstance(unit, Batch | Epoch):
                raise TypeError(f"fit({name}={unit!r}): expected Batch(…) or Epoch(…)")
        if max_length is not None and (isinstance(max_length.value, bool) or not isinstance(max_length.value, int)):
            raise TypeError(f"fit(max_length={max_length!r}): expected a single number")
        if not ctx.managed and max_length is None and not options.test_mode:
            raise ValueError("fit() requires max_length in a bare run, as fit(max_length=Epoch(10))")
        if ctx.managed and options.test_mode:
            raise ValueError("fit(test_mode=True) requires a bare run, and this is a trial of an experiment")
        if ctx.managed and max_length is not None and ctx.searcher.get_configured_units() is not None:
            logger.warning("ignoring fit(max_length=%r): the searcher decides how long to train", max_length)
        if options.profiling_enabled and not ctx.managed:
            logger.info("to get the profiler's samples from the run's journal: det-core runs export")
        if latest is _LATEST:
            return replace(options, latest_checkpoint=None, resumes=True)
        self._context._resumed = True  # a later fit does not start from the run's checkpoint
        if latest is None and ctx.latest_checkpoint is not None:
            logger.warning(
                "starting from scratch because of fit(latest_checkpoint=None), ignoring checkpoint %s",
                ctx.latest_checkpoint,
            )
        return options

    def _policy(self, policy: str | None) -> str:
        if policy is not None and policy not in POLICIES:
            raise ValueError(f"fit(checkpoint_policy={policy!r}): expected one of {', '.join(map(repr, POLICIES))}")
        if policy not in (None, "best"):
            return policy
        if self._context._core.searcher.metric is not None:
            return "best"
        level = logging.INFO
        if policy == "best":
            level = logging.WARNING
        logger.log(level, "saving after every validation: none is the best without pytorch.init(searcher_metric=)")
        return "all"

    def _check_trial(self) -> None:
        """Raise InvalidExperimentException if the trial cannot be trained."""
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
                    f"optimizer {number} of {len(context.optimizers)} updates {len(shapes)} parameter(s) outside of "
                    f"wrapped models, such as one of shape {shapes[0]}: checkpoints would lack them, and ranks would "
                    "train them apart; pass their module to context.wrap_model()"
                )
        self._check_evaluation()

    def _check_evaluation(self) -> None:
        trial = self._trial
        overridden = [m for m in ("evaluate_batch", "evaluate_full_dataset") if overrides(trial, m)]
        if len(overridden) != 1:
            count = "neither"
            if overridden:
                count = "both"
            raise InvalidExperimentException(
                f"{type(trial).__name__} must override one of evaluate_batch() and evaluate_full_dataset(); it "
                f"overrides {count}"
            )

"""The experiment file as a whole (wire contract, section 11)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from det_core.config._entrypoint import LAUNCHERS, entrypoint_trial, foreign_launchers
from det_core.config._hyperparameters import Nested, grid_mistakes
from det_core.config._place import Environment, Resources
from det_core.config._rules import (
    AnyList,
    AnyObject,
    Command,
    Count,
    Flag,
    Name,
    Period,
    Positive,
    Text,
    integer,
    number,
    one_of,
)
from det_core.config._searchers import Searcher
from det_core.config._section import Cross, Section, option
from det_core.config._storage import Storage


class Optimizations(Section):
    """For the horovod launcher and the trial classes."""

    aggregation_frequency: Positive = option(1, "over how many batches gradients are summed up")
    average_aggregated_gradients: Flag = option(True, "whether their mean is taken")
    average_training_metrics: Flag = option(True, "whether training metrics are the mean over all ranks")
    gradient_compression: Flag = option(False, "whether gradients travel with half the bits")
    mixed_precision: Annotated[str, one_of("O0", "O1", "O2", "O3")] = option("O0", "as apex counts it")
    tensor_fusion_threshold: Count = option(64, "horovod's fusion threshold, in MB")
    tensor_fusion_cycle_time: Annotated[float, number(least=0)] = option(1, "horovod's cycle time, in ms")
    auto_tune_tensor_fusion: Flag = option(False, "whether horovod finds both by itself")
    grad_updates_size_file: Text | None = option(None, "a file with the sizes of gradients")


class Profiling(Section):
    """For the trial classes; other scripts call ``ctx.profiler.on()``."""

    enabled: Flag = option(False, "whether samples of the machine are taken")
    begin_on_batch: Count = option(0, "the first batch")
    end_after_batch: Count | None = option(None, "the last batch")
    sync_timings: Flag = option(True, "whether to wait for the GPU before a time is taken")


class Reproducibility(Section):
    """What makes a search come out the same again."""

    experiment_seed: Annotated[int, integer(0, 2**32 - 1)] | None = option(
        None, "the seed of the search; null: made up"
    )


class RetentionPolicy(Section):
    """How long logs are kept."""

    log_retention_days: Annotated[int, integer(-1, 32767)] | None = option(
        None, "days; -1: for ever", unused=True, anyway=-1
    )


class ExperimentFile(Section):
    """An experiment file."""

    name: Name | None = option(None, "what it is called; null: a name is made up")
    entrypoint: Command | None = option(
        None, "what each trial runs: a text for `sh`, or a list with a program and its arguments"
    )
    searcher: Searcher = option(..., "how the hyperparameters of trials are chosen, and how long each trains")
    hyperparameters: Nested = option({}, "what the search chooses from")
    max_restarts: Count = option(
        5,
        "how often a trial that fails is started again; a fault of the machine is no failure, up to five in a row "
        "without a new checkpoint",
    )
    resources: Resources = option({}, "what trials get")
    checkpoint_storage: Storage = option({}, "where checkpoints go, and which stay at the end")
    preemption_timeout: Annotated[float, number(least=0)] | None = option(
        None, "seconds that a trial has to save when it is told to stop, before it is killed; null: 3600"
    )
    environment: Environment = option({}, "in what surroundings trials run")
    data: AnyObject = option({}, "anything for your scripts, which find it in `info.user_data`")
    description: Text | None = option(None, "a sentence for people")
    labels: list[Name] = option([], "words to find it by")
    workspace: Text | None = option(None, "where it belongs; kept and shown")
    project: Text | None = option(None, "where it belongs; kept and shown")
    debug: Flag = option(False, "whether launchers and trial classes say more")
    reproducibility: Reproducibility = option({}, "the seed")
    profiling: Profiling = option({}, "for the trial classes: samples of the machine")
    min_validation_period: Period = option({"batches": 0}, "for the trial classes: validate at least so often")
    min_checkpoint_period: Period = option({"batches": 0}, "for the trial classes: checkpoint at least so often")
    perform_initial_validation: Flag = option(False, "for the trial classes: validate before training")
    scheduling_unit: Positive = option(100, "for the trial classes: batches between two reports")
    records_per_epoch: Count = option(0, "for the trial classes: what an epoch is")
    checkpoint_policy: Annotated[str, one_of("best", "all", "none")] = option(
        "best", "for the trial classes: which validations are followed by a checkpoint"
    )
    optimizations: Optimizations = option({}, "for the horovod launcher and the trial classes")
    retention_policy: RetentionPolicy | None = option(None, "how long logs are kept")
    bind_mounts: AnyList = option([], "folders for containers", unused=True)
    log_policies: AnyList = option([], "what to do when a log line matches", unused=True)
    slurm: AnyObject = option({}, "for Slurm", unused=True)
    pbs: AnyObject = option({}, "for PBS", unused=True)
    security: AnyObject | None = option(None, "for Kerberos and the like", unused=True)
    integrations: AnyObject | None = option(None, "for other services", unused=True)
    unmanaged: Flag = option(False, "set by the master for what it only keeps a record of")

    @classmethod
    def cross(cls, given: Mapping[str, Any]) -> Iterator[Cross]:
        searcher, hyperparameters = given.get("searcher"), given.get("hyperparameters")
        if isinstance(searcher, Mapping) and searcher.get("name") == "grid":
            for mistake in grid_mistakes(hyperparameters):
                yield Cross(("hyperparameters", *mistake.path), mistake.allowed)
        if isinstance(hyperparameters, Mapping) and not _whole(hyperparameters.get("global_batch_size", 1)):
            yield Cross(("hyperparameters", "global_batch_size"), "an integer, or an int or categorical of integers")
        try:
            launchers = foreign_launchers(given.get("entrypoint") or "")
            trial_class = entrypoint_trial(given.get("entrypoint") or "")
        except TypeError:
            return  # no command at all, which is said elsewhere
        length = searcher.get("max_length") if isinstance(searcher, Mapping) else None
        if trial_class and type(length) is int:
            allowed = (
                f"{{batches: {length}}}, {{epochs: {length}}} or {{records: {length}}}, as a trial class counts for you"
            )
            yield Cross(("searcher", "max_length"), allowed)
        for name in launchers:
            if name not in LAUNCHERS:
                known = ", ".join(f"det_core.launch.{ours}" for ours in LAUNCHERS)
                yield Cross(("entrypoint",), f"a command without determined.launch.{name}: there is {known}")


def _whole(value: Any) -> bool:
    """Whether a hyperparameter only takes integers."""
    if isinstance(value, Mapping):
        if value.get("type") == "const":
            return _whole(value.get("val"))
        if value.get("type") == "categorical":
            return isinstance(value.get("vals"), list) and all(map(_whole, value["vals"]))
        return value.get("type") == "int"
    return type(value) is int

"""The sections of an experiment file (wire contract, section 11), one class each, the whole file last.

What stands beside a key goes into ``docs/reference-experiment.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, PlainValidator, TypeAdapter, field_validator, model_validator

from det_core._storage_settings import find_conflicts
from det_core.config._entrypoint import LAUNCHERS, entrypoint_trial, foreign_launchers
from det_core.config._fields import (
    AbsolutePath,
    Bucket,
    ClassName,
    Concurrency,
    Count,
    Days,
    ExactInt,
    Flag,
    HttpUrl,
    Length,
    Period,
    Positive,
    Prefix,
    Priority,
    Rungs,
    Section,
    SectionUnion,
    Seed,
    Text,
    Trials,
    Url,
    Variable,
    ignored,
    key,
)

MAX_GRID = 100_000
"""How many points a grid may have."""
_DEVICES = ("cpu", "cuda", "rocm")


class Searcher(Section):
    """What all searchers have."""

    name: str = key(..., "which searcher")
    metric: Text = key(..., "the validation metric that the search goes by")
    smaller_is_better: Flag = key(True, "which end of the metric is best")
    source_trial_id: Count | None = key(None, "every trial starts from the latest checkpoint of this trial")
    source_checkpoint_uuid: Text | None = key(None, "as `source_trial_id`, from this checkpoint")


class Concurrent(Searcher):
    """What all searchers of several trials have."""

    max_concurrent_trials: Concurrency = key(16, "how many are there at once; 0: as many as the method likes")


class Single(Searcher):
    """One trial."""

    name: Literal["single"]
    max_length: Length | None = key(None, "how long each trial trains")


class Random(Concurrent):
    """Trials with random hyperparameters."""

    name: Literal["random"]
    max_length: Length | None = key(None, "how long each trial trains")
    max_trials: Trials = key(..., "how many trials there are")


class Grid(Concurrent):
    """A trial for each point of a grid: each `int`, `double` and `log` hyperparameter needs a `count`."""

    name: Literal["grid"]
    max_length: Length | None = key(None, "how long each trial trains")


class Halving(Concurrent):
    """What the methods by successive halving have.

    How far trials train is told either by ``max_length``, and then they are told by operations; or by ``time_metric``
    and ``max_time``, and then they are stopped by the validations that they report.
    """

    max_length: Length | None = key(None, "how long the best trials train; or give `time_metric`")
    time_metric: Text | None = key(None, "the validation metric that tells how far a trial is, as `batches`")
    max_time: Positive | None = key(None, "up to which value of `time_metric` the best trials train")
    max_trials: Trials = key(..., "how many trials there are")
    divisor: float = key(4, "one of so many trials goes on at each rung", gt=1, le=1000)
    stop_once: Flag = key(False, "the others do not wait for a promotion; by `time_metric` they never do")

    @model_validator(mode="after")
    def _has_a_length(self) -> Halving:
        if (self.time_metric is None) != (self.max_time is None):
            raise ValueError("time_metric and max_time go together: give both, or neither and max_length")
        if self.max_length in (None, 0) and self.max_time is None:
            raise ValueError("max_length is missing: how long to train at most, as {batches: N}")
        return self


class AsyncHalving(Halving):
    """Asynchronous successive halving."""

    name: Literal["async_halving"]
    num_rungs: Rungs = key(..., "how many rungs there are")


class AdaptiveAsha(Halving):
    """Several brackets of asynchronous successive halving."""

    name: Literal["adaptive_asha"]
    mode: Literal["standard", "aggressive", "conservative"] = key("standard", "how early trials are stopped")
    max_rungs: Rungs = key(5, "how many rungs a bracket has at most")
    bracket_rungs: list[Rungs] = key([], "how many rungs each bracket has; empty: made from the others")


class Optuna(Concurrent):
    """Hyperparameters proposed by a sampler of Optuna's, which learns from the trials before."""

    name: Literal["optuna"]
    sampler: Literal["tpe", "gp", "cmaes", "random", "qmc", "nsgaii"] = key("tpe", "which of Optuna's samplers")
    sampler_options: dict[str, Any] = key({}, "arguments of the sampler")
    max_length: Length | None = key(None, "how long each trial trains")
    max_trials: Trials = key(..., "how many trials there are")


class Custom(Searcher):
    """A method of your own: a class, which gets all other keys too, or a program that talks to the master."""

    model_config = ConfigDict(extra="allow")

    name: Literal["custom"]
    class_: ClassName | None = key(
        None, "`module:Class`; without one, a program outside steers the search", alias="class"
    )
    unit: Literal["batches", "records", "epochs"] | None = key(None, "what lengths are counted in")


SEARCHERS = SectionUnion("name", [Single, Random, Grid, AsyncHalving, AdaptiveAsha, Optuna, Custom])
AnySearcher = Annotated[Any, PlainValidator(SEARCHERS)]


class Const(Section):
    """Always the same. Also written as the value alone."""

    type: Literal["const"]
    val: Any = key(..., "the value")


class Range(Section):
    """What lies between two numbers."""

    minval: float = key(..., "the smallest")
    maxval: float = key(..., "the largest")
    count: Positive | None = key(None, "how many values a grid takes of it")

    @model_validator(mode="after")
    def _has_an_inside(self) -> Range:
        if not self.minval < self.maxval:
            raise ValueError("minval should be less than maxval")
        if not math.isfinite(self.maxval - self.minval):
            raise ValueError("minval should be so close to maxval that their difference is a finite number")
        return self


class Int(Range):
    """An integer between two, both included."""

    type: Literal["int"]
    minval: ExactInt = key(..., "the smallest")
    maxval: ExactInt = key(..., "the largest")


class Double(Range):
    """A number between two."""

    type: Literal["double"]


class Log(Range):
    """A power of `base`, whose exponent lies between two: `minval` and `maxval`."""

    type: Literal["log"]
    base: float = key(..., "what is raised to the power", gt=0)

    @model_validator(mode="after")
    def _has_powers(self) -> Log:
        for name, exponent in (("minval", self.minval), ("maxval", self.maxval)):
            try:
                power: float = self.base**exponent
            except OverflowError:
                power = math.inf
            if not 0 < power < math.inf:
                raise ValueError(f"{name} should be the logarithm of the value: base to its power is 0 or infinite")
        return self


class Categorical(Section):
    """One of several values."""

    type: Literal["categorical"]
    vals: list[Any] = key(..., "the values", min_length=1)


HYPERPARAMETERS = SectionUnion("type", [Const, Int, Double, Log, Categorical])


def _hyperparameter(given: Any) -> Any:
    """A value alone is a constant; an object without ``type`` is an object of hyperparameters again."""
    if not isinstance(given, Mapping):
        return Const(type="const", val=given)
    return HYPERPARAMETERS(given) if "type" in given else _NESTED.validate_python(given)


Hyperparameter = Annotated[Any, PlainValidator(_hyperparameter)]
_NESTED: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Hyperparameter])


class Storage(Section):
    """What all places for checkpoints have."""

    save_experiment_best: Count = key(0, "how many of the experiment's best checkpoints stay when it has ended")
    save_trial_best: Count = key(1, "how many of each trial's best checkpoints stay when it has ended")
    save_trial_latest: Count = key(1, "how many of each trial's latest checkpoints stay when it has ended")

    @model_validator(mode="after")
    def _check_conflicts(self) -> Storage:
        if conflicts := find_conflicts(self.model_dump()):
            raise ValueError("; ".join(conflicts))
        return self


class DefaultStorage(Storage):
    """Where the master's default says: without a `type`, only what stays is said."""

    type: None = None


class Directory(Storage):
    """A folder, under the path by which the trials see it."""

    type: Literal["directory"]
    container_path: AbsolutePath = key(..., "the folder, an absolute path")


class SharedFs(Storage):
    """A folder that all machines share."""

    type: Literal["shared_fs"]
    host_path: AbsolutePath = key(..., "the folder, an absolute path")
    storage_path: Text | None = key(None, "a folder in it: relative, or an absolute path inside `host_path`")
    propagation: Text | None = ignored(None, "how a container mounts it")
    container_path: Text | None = ignored(None, "of former times")
    checkpoint_path: Text | None = ignored(None, "of former times")
    tensorboard_path: Text | None = ignored(None, "of former times")


class S3(Storage):
    """A bucket of S3's, or of a server that speaks its protocol."""

    type: Literal["s3"]
    bucket: Bucket = key(..., "its bare name")
    prefix: Prefix | None = key(None, "a folder in it")
    endpoint_url: HttpUrl | None = key(None, "the URL of the server, if it is not Amazon's")
    access_key: Text | None = key(None, "with `secret_key`; without: as the AWS tools find them")
    secret_key: Text | None = key(None, "with `access_key`")
    session_token: Text | None = key(None, "with `access_key`, if it is a temporary one")
    region: Text | None = key(None, "of the bucket")
    anonymous: Flag | None = key(None, "use no keys at all")


class Gcs(Storage):
    """A bucket of Google Cloud Storage."""

    type: Literal["gcs"]
    bucket: Bucket = key(..., "its bare name")
    prefix: Prefix | None = key(None, "a folder in it")
    endpoint_url: HttpUrl | None = key(None, "the URL of the server, if it is not Google's")
    anonymous: Flag | None = key(None, "use no keys at all")


class Azure(Storage):
    """A container of Azure Blob Storage: with exactly one of `connection_string` and `account_url`."""

    type: Literal["azure"]
    container: Text = key(..., "its name")
    prefix: Prefix | None = key(None, "a folder in it")
    connection_string: Text | None = key(None, "how to connect")
    account_url: HttpUrl | None = key(None, "the account, `https://…`")
    credential: Any = key(None, "for `account_url`")


class Fsspec(Storage):
    """A store of any protocol that fsspec has a driver for."""

    type: Literal["fsspec"]
    url: Url = key(..., "where, `protocol://…`")
    options: dict[str, Any] | None = key(None, "arguments of the driver")


STORAGES = SectionUnion("type", [Directory, SharedFs, S3, Gcs, Azure, Fsspec], default=DefaultStorage)
AnyStorage = Annotated[Any, PlainValidator(STORAGES)]


class Resources(Section):
    """What each trial gets, and what all of them may have."""

    slots_per_trial: Count = key(1, "how many slots (GPUs, or places where there are none) each trial gets")
    max_slots: Count | None = key(None, "how many slots all trials of the experiment may have at once; null: all")
    priority: Priority | None = key(None, "1 comes first, 99 last, and is preempted; null: the master's default")
    weight: float = ignored(1, "for schedulers that share fairly")
    resource_pool: str = ignored("", "which machines")
    shm_size: Any = ignored(None, "how much shared memory a container gets")
    is_single_node: Flag | None = ignored(None, "whether a trial must be on one machine")
    native_parallel: Flag = ignored(False, "whether each process is a container of its own")
    devices: list[Any] = ignored([], "devices for containers")

    @model_validator(mode="after")
    def _has_room_for_a_trial(self) -> Resources:
        if self.max_slots is not None and self.slots_per_trial > self.max_slots:
            raise ValueError("max_slots should be at least slots_per_trial, or no trial could ever start")
        return self


class PerDevice(Section):
    """Environment variables: a list for all trials, or one for each kind of device that they run on."""

    cpu: list[Variable] = key([], "for trials without a GPU")
    cuda: list[Variable] = key([], "for trials on NVIDIA's GPUs; also as `gpu`")
    rocm: list[Variable] = key([], "for trials on AMD's GPUs")
    gpu: list[Variable] = key([], "former name of `cuda`", exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _spread(cls, given: Any) -> Any:
        return dict.fromkeys(_DEVICES, given) if isinstance(given, list) else given

    @model_validator(mode="after")
    def _rename(self) -> PerDevice:
        self.cuda, self.gpu = [*self.gpu, *self.cuda], []
        return self


class Environment(Section):
    """In what surroundings trials run."""

    environment_variables: PerDevice = key(PerDevice(), "a list of `NAME=VALUE`, or one for each of cpu, cuda, rocm")
    image: Any = ignored(None, "the container's image")
    ports: Any = ignored(None, "the container's ports")
    proxy_ports: list[Any] = ignored([], "ports that the master forwards")
    force_pull_image: Flag = ignored(False, "whether to fetch the image each time")
    registry_auth: dict[str, Any] | None = ignored(None, "how to log in where the image is")
    add_capabilities: list[str] = ignored([], "of the container")
    drop_capabilities: list[str] = ignored([], "of the container")
    pod_spec: dict[str, Any] | None = ignored(None, "for Kubernetes")


class Optimizations(Section):
    """For the horovod launcher and the trial classes."""

    aggregation_frequency: Positive = key(1, "over how many batches gradients are summed up")
    average_aggregated_gradients: Flag = key(True, "whether their mean is taken")
    average_training_metrics: Flag = key(True, "whether training metrics are the mean over all ranks")
    gradient_compression: Flag = key(False, "whether gradients travel with half the bits")
    mixed_precision: Literal["O0", "O1", "O2", "O3"] = key("O0", "as apex counts it")
    tensor_fusion_threshold: Count = key(64, "horovod's fusion threshold, in MB")
    tensor_fusion_cycle_time: float = key(1, "horovod's cycle time, in ms", ge=0)
    auto_tune_tensor_fusion: Flag = key(False, "whether horovod finds both by itself")
    grad_updates_size_file: str | None = key(None, "a file with the sizes of gradients")


class Profiling(Section):
    """For the trial classes; other scripts call ``ctx.profiler.on()``."""

    enabled: Flag = key(False, "whether samples of the machine are taken")
    begin_on_batch: Count = key(0, "the first batch")
    end_after_batch: Count | None = key(None, "the last batch")
    sync_timings: Flag = key(True, "whether to wait for the GPU before a time is taken")


class Reproducibility(Section):
    """What makes a search come out the same again."""

    experiment_seed: Seed | None = key(None, "the seed of the search; null: made up")


class RetentionPolicy(Section):
    """How long logs are kept."""

    log_retention_days: Days | None = ignored(-1, "days; -1: for ever")


def _command(given: Any) -> str | list[str]:
    words = [given.strip()] if isinstance(given, str) else given
    if not (isinstance(words, list) and words and words[0] and all(isinstance(word, str) for word in words)):
        raise ValueError("should be a command: a text for sh, or a list of texts")
    unknown = [name for name in foreign_launchers(words) if name not in LAUNCHERS]
    if unknown:
        known = ", ".join(f"det_core.launch.{name}" for name in LAUNCHERS)
        raise ValueError(f"should do without determined.launch.{unknown[0]}: there is {known}")
    return given if isinstance(given, str) else words


Command = Annotated[str | list[str], PlainValidator(_command)]


class ExperimentFile(Section):
    """An experiment file."""

    name: Text | None = key(None, "what it is called; null: a name is made up")
    entrypoint: Command | None = key(None, "what each trial runs: a text for `sh`, or a program and its arguments")
    searcher: AnySearcher = key(..., "how the hyperparameters of trials are chosen, and how long each trains")
    hyperparameters: dict[str, Hyperparameter] = key({}, "what the search chooses from")
    # A fault of the machine is no failure, up to five in a row without a new checkpoint.
    max_restarts: Count = key(5, "how often a trial that fails is started again; a fault of the machine does not count")
    resources: Resources = key(Resources(), "what trials get")
    checkpoint_storage: AnyStorage = key(DefaultStorage(), "where checkpoints go, and which stay at the end")
    preemption_timeout: float | None = key(None, "seconds between being told to stop and killed; null: 3600", ge=0)
    environment: Environment = key(Environment(), "in what surroundings trials run")
    data: dict[str, Any] = key({}, "anything for your scripts, which find it in `info.user_data`")
    description: str | None = key(None, "a sentence for people")
    labels: list[Text] = key([], "words to find it by")
    workspace: str | None = key(None, "where it belongs; kept and shown")
    project: str | None = key(None, "where it belongs; kept and shown")
    debug: Flag = key(False, "whether launchers and trial classes say more")
    reproducibility: Reproducibility = key(Reproducibility(), "the seed")
    profiling: Profiling = key(Profiling(), "for the trial classes: samples of the machine")
    min_validation_period: Period = key({"batches": 0}, "for the trial classes: validate at least so often")
    min_checkpoint_period: Period = key({"batches": 0}, "for the trial classes: checkpoint at least so often")
    perform_initial_validation: Flag = key(False, "for the trial classes: validate before training")
    scheduling_unit: Positive = key(100, "for the trial classes: batches between two reports")
    records_per_epoch: Count = key(0, "for the trial classes: what an epoch is")
    checkpoint_policy: Literal["best", "all", "none"] = key("best", "for the trial classes: checkpoints by validations")
    optimizations: Optimizations = key(Optimizations(), "for the horovod launcher and the trial classes")
    retention_policy: RetentionPolicy | None = key(None, "how long logs are kept")
    bind_mounts: list[Any] = ignored([], "folders for containers")
    log_policies: list[Any] = ignored([], "what to do when a log line matches")
    slurm: dict[str, Any] = ignored({}, "for Slurm")
    pbs: dict[str, Any] = ignored({}, "for PBS")
    security: dict[str, Any] | None = ignored(None, "for Kerberos and the like")
    integrations: dict[str, Any] | None = ignored(None, "for other services")
    unmanaged: Flag = key(False, "set by the master for what it only keeps a record of")

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_sections(cls, given: Any) -> Any:
        """``data:`` with nothing below it is null in YAML."""
        if not isinstance(given, Mapping):
            return given
        defaults = {name: info.get_default(call_default_factory=True) for name, info in cls.model_fields.items()}
        sections = {name for name, default in defaults.items() if isinstance(default, BaseModel | dict | list)}
        return {key: value for key, value in given.items() if value is not None or key not in sections}

    @field_validator("hyperparameters")
    @classmethod
    def _batch_size_is_whole(cls, given: dict[str, Any]) -> dict[str, Any]:
        size = given.get("global_batch_size", Const(type="const", val=1))
        values = size.vals if isinstance(size, Categorical) else [size.val] if isinstance(size, Const) else [None]
        if not isinstance(size, Int) and not all(type(value) is int for value in values):
            raise ValueError("global_batch_size should be an integer, or an int or categorical of integers")
        return given

    @model_validator(mode="after")
    def _fits_together(self) -> ExperimentFile:
        if isinstance(self.searcher, Grid):
            _check_grid(self.hyperparameters)
        length = getattr(self.searcher, "max_length", None)
        if self.entrypoint is not None and entrypoint_trial(self.entrypoint) and isinstance(length, int):
            raise ValueError(
                "searcher.max_length needs a unit for a trial class: {batches: N}, {epochs: N}, {records: N}"
            )
        return self


def _check_grid(hyperparameters: Mapping[str, Any]) -> None:
    """Look whether the hyperparameters are a grid, and not too many points.

    Raises:
        ValueError: a count is missing, or there are more than `MAX_GRID` points.
    """
    axes = list(flatten_hyperparameters(hyperparameters, "hyperparameters"))
    uncounted = [path for path, axis in axes if isinstance(axis, Range) and axis.count is None]
    if uncounted:
        raise ValueError(f"a grid needs a count, an integer of at least 1, in {', '.join(uncounted)}")
    points = math.prod(_points(axis) for _, axis in axes)
    if points > MAX_GRID:
        raise ValueError(f"hyperparameters should be a grid of at most {MAX_GRID:,} points; these make {points:,}")


def flatten_hyperparameters(hyperparameters: Mapping[str, Any], path: str) -> Iterator[tuple[str, Section]]:
    """Yield each hyperparameter of a nested mapping with its path."""
    for name, value in hyperparameters.items():
        if isinstance(value, Section):
            yield f"{path}.{name}", value
        else:
            yield from flatten_hyperparameters(value, f"{path}.{name}")


def _points(axis: Section) -> int:
    if isinstance(axis, Categorical):
        return len(axis.vals)
    if isinstance(axis, Int):
        return min(axis.count or 1, axis.maxval - axis.minval + 1)
    return axis.count or 1 if isinstance(axis, Range) else 1

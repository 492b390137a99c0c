"""Sections of an experiment file (wire contract, section 11), one class each, the whole file last.

Descriptions of keys and classes go into ``docs/reference-experiment.md``.
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
"""Points of a grid: each is a trial."""
_DEVICES = ("cpu", "cuda", "rocm")


class Searcher(Section):
    """Keys of every searcher."""

    name: str = key(..., "the method of search")
    metric: Text = key(..., "the validation metric that the search optimizes")
    smaller_is_better: Flag = key(True, "whether the smallest metric is the best")
    source_trial_id: Count | None = key(None, "a trial from whose latest checkpoint every trial starts")
    source_checkpoint_uuid: Text | None = key(None, "a checkpoint from which every trial starts")


class Concurrent(Searcher):
    """Keys of every searcher of several trials."""

    max_concurrent_trials: Concurrency = key(16, "trials at the same time; 0: as many as the method chooses")


class Single(Searcher):
    """One trial."""

    name: Literal["single"]
    max_length: Length | None = key(None, "training length of each trial")


class Random(Concurrent):
    """Trials with random hyperparameters."""

    name: Literal["random"]
    max_length: Length | None = key(None, "training length of each trial")
    max_trials: Trials = key(..., "number of trials")


class Grid(Concurrent):
    """A trial for each point of a grid: each `int`, `double` and `log` hyperparameter needs a `count`."""

    name: Literal["grid"]
    max_length: Length | None = key(None, "training length of each trial")


class Halving(Concurrent):
    """Keys of the methods by successive halving.

    Either ``max_length`` limits training, and trials get operations; or ``time_metric`` and ``max_time`` do, and trials
    are stopped at the validations that they report.
    """

    max_length: Length | None = key(None, "training length of the best trials, unless `time_metric` is given")
    time_metric: Text | None = key(None, "a validation metric that counts a trial's training, such as `batches`")
    max_time: Positive | None = key(None, "value of `time_metric` at which the best trials end")
    max_trials: Trials = key(..., "number of trials")
    divisor: float = key(4, "one in this many trials continues at each rung", gt=1, le=1000)
    stop_once: Flag = key(False, "whether the others end at once; with `time_metric` they always do")

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
    num_rungs: Rungs = key(..., "number of rungs")


class AdaptiveAsha(Halving):
    """Several brackets of asynchronous successive halving."""

    name: Literal["adaptive_asha"]
    mode: Literal["standard", "aggressive", "conservative"] = key("standard", "how early trials are stopped")
    max_rungs: Rungs = key(5, "largest number of rungs of a bracket")
    bracket_rungs: list[Rungs] = key([], "number of rungs of each bracket; empty: computed from the other keys")


class Optuna(Concurrent):
    """Hyperparameters proposed by an Optuna sampler, which learns from earlier trials."""

    name: Literal["optuna"]
    sampler: Literal["tpe", "gp", "cmaes", "random", "qmc", "nsgaii"] = key("tpe", "the Optuna sampler")
    sampler_options: dict[str, Any] = key({}, "arguments of the sampler")
    max_length: Length | None = key(None, "training length of each trial")
    max_trials: Trials = key(..., "number of trials")


class Custom(Searcher):
    """Your own method: a class, which also gets all other keys."""

    model_config = ConfigDict(extra="allow")

    name: Literal["custom"]
    class_: ClassName = key(..., "`module:Class`", alias="class")
    unit: Literal["batches", "records", "epochs"] | None = key(None, "unit of lengths")


SEARCHERS = SectionUnion("name", [Single, Random, Grid, AsyncHalving, AdaptiveAsha, Optuna, Custom])
AnySearcher = Annotated[Any, PlainValidator(SEARCHERS)]


class Const(Section):
    """A constant; also written as the value alone."""

    type: Literal["const"]
    val: Any = key(..., "the value")


class Range(Section):
    """Keys of every range of numbers."""

    minval: float = key(..., "smallest value")
    maxval: float = key(..., "largest value")
    count: Positive | None = key(None, "number of values on a grid")

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
    minval: ExactInt = key(..., "smallest value")
    maxval: ExactInt = key(..., "largest value")


class Double(Range):
    """A number between two."""

    type: Literal["double"]


class Log(Range):
    """A power of `base`, whose exponent lies between two: `minval` and `maxval`."""

    type: Literal["log"]
    base: float = key(..., "base of the power", gt=0)

    @model_validator(mode="after")
    def _has_powers(self) -> Log:
        for name, exponent in (("minval", self.minval), ("maxval", self.maxval)):
            # Python raises where the power is too large, and returns 0 where it is too small.
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
    """Validate a constant, a hyperparameter, or, without ``type``, an object of hyperparameters."""
    if not isinstance(given, Mapping):
        return Const(type="const", val=given)
    if "type" in given:
        return HYPERPARAMETERS(given)
    return _NESTED.validate_python(given)


Hyperparameter = Annotated[Any, PlainValidator(_hyperparameter)]
_NESTED: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Hyperparameter])


class Storage(Section):
    """Keys of every checkpoint storage."""

    save_experiment_best: Count = key(0, "number of the experiment's best checkpoints kept after its end")
    save_trial_best: Count = key(1, "number of each trial's best checkpoints kept after the experiment's end")
    save_trial_latest: Count = key(1, "number of each trial's latest checkpoints kept after the experiment's end")

    @model_validator(mode="after")
    def _check_conflicts(self) -> Storage:
        if conflicts := find_conflicts(self.model_dump()):
            raise ValueError("; ".join(conflicts))
        return self


class DefaultStorage(Storage):
    """The master's default storage: without a `type`, only retention is set."""

    type: None = None


class Directory(Storage):
    """A directory, by the path at which the trials see it."""

    type: Literal["directory"]
    container_path: AbsolutePath = key(..., "absolute path of the directory")


class SharedFs(Storage):
    """A directory that all nodes share."""

    type: Literal["shared_fs"]
    host_path: AbsolutePath = key(..., "absolute path of the directory")
    storage_path: Text | None = key(None, "a directory in it: a relative path, or an absolute one inside `host_path`")
    propagation: Text | None = ignored(None, "mount propagation in a container")
    container_path: Text | None = ignored(None, "obsolete")
    checkpoint_path: Text | None = ignored(None, "obsolete")
    tensorboard_path: Text | None = ignored(None, "obsolete")


class S3(Storage):
    """A bucket of S3, or of a server with its protocol."""

    type: Literal["s3"]
    bucket: Bucket = key(..., "name of the bucket")
    prefix: Prefix | None = key(None, "key prefix")
    endpoint_url: HttpUrl | None = key(None, "URL of a server other than Amazon's")
    access_key: Text | None = key(None, "access key, with `secret_key`; null: found as the AWS tools do")
    secret_key: Text | None = key(None, "secret key, with `access_key`")
    session_token: Text | None = key(None, "session token of a temporary `access_key`")
    region: Text | None = key(None, "region of the bucket")
    anonymous: Flag | None = key(None, "whether to use no credentials")


class Gcs(Storage):
    """A bucket of Google Cloud Storage."""

    type: Literal["gcs"]
    bucket: Bucket = key(..., "name of the bucket")
    prefix: Prefix | None = key(None, "key prefix")
    endpoint_url: HttpUrl | None = key(None, "URL of a server other than Google's")
    anonymous: Flag | None = key(None, "whether to use no credentials")


class Azure(Storage):
    """A container of Azure Blob Storage: with exactly one of `connection_string` and `account_url`."""

    type: Literal["azure"]
    container: Text = key(..., "name of the container")
    prefix: Prefix | None = key(None, "key prefix")
    connection_string: Text | None = key(None, "connection string")
    account_url: HttpUrl | None = key(None, "URL of the account, `https://…`")
    credential: Any = key(None, "credential for `account_url`")


class Fsspec(Storage):
    """A store of any protocol with an fsspec driver."""

    type: Literal["fsspec"]
    url: Url = key(..., "URL of the store, `protocol://…`")
    options: dict[str, Any] | None = key(None, "arguments of the driver")


STORAGES = SectionUnion("type", [Directory, SharedFs, S3, Gcs, Azure, Fsspec], default=DefaultStorage)
AnyStorage = Annotated[Any, PlainValidator(STORAGES)]


class Resources(Section):
    """Resources of each trial, and of all trials together."""

    slots_per_trial: Count = key(1, "slots of each trial: GPUs, or CPU slots on a node without them")
    max_slots: Count | None = key(None, "slots of all trials of the experiment at the same time; null: all")
    priority: Priority | None = key(None, "1 runs first, 99 last and is preempted first; null: the master's default")
    weight: float = ignored(1, "weight for fair-share schedulers")
    resource_pool: str = ignored("", "pool of nodes")
    shm_size: Any = ignored(None, "shared memory of a container")
    is_single_node: Flag | None = ignored(None, "whether a trial must run on a single node")
    native_parallel: Flag = ignored(False, "whether each process has its own container")
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
    gpu: list[Variable] = key([], "old name of `cuda`", exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _spread(cls, given: Any) -> Any:
        if isinstance(given, list):
            return dict.fromkeys(_DEVICES, given)
        return given

    @model_validator(mode="after")
    def _rename(self) -> PerDevice:
        # The present name comes last, so that its value of a variable wins.
        self.cuda = [*self.gpu, *self.cuda]
        self.gpu = []
        return self


class Environment(Section):
    """Environment of trials."""

    environment_variables: PerDevice = key(PerDevice(), "a list of `NAME=VALUE`, or one for each of cpu, cuda, rocm")
    image: Any = ignored(None, "the container's image")
    ports: Any = ignored(None, "the container's ports")
    proxy_ports: list[Any] = ignored([], "ports forwarded by the master")
    force_pull_image: Flag = ignored(False, "whether to fetch the image each time")
    registry_auth: dict[str, Any] | None = ignored(None, "credentials of the image registry")
    add_capabilities: list[str] = ignored([], "capabilities of the container")
    drop_capabilities: list[str] = ignored([], "capabilities of the container")
    pod_spec: dict[str, Any] | None = ignored(None, "pod specification for Kubernetes")


class Optimizations(Section):
    """Optimizations of the horovod launcher and of trial classes."""

    aggregation_frequency: Positive = key(1, "batches over which gradients are summed")
    average_aggregated_gradients: Flag = key(True, "whether the sum is divided by that number")
    average_training_metrics: Flag = key(True, "whether training metrics are averaged over all ranks")
    gradient_compression: Flag = key(False, "whether gradients are sent in half precision")
    mixed_precision: Literal["O0", "O1", "O2", "O3"] = key("O0", "optimization level of apex")
    tensor_fusion_threshold: Count = key(64, "horovod's fusion threshold in MB")
    tensor_fusion_cycle_time: float = key(1, "horovod's cycle time in ms", ge=0)
    auto_tune_tensor_fusion: Flag = key(False, "whether horovod tunes both")
    grad_updates_size_file: str | None = key(None, "a file with the sizes of gradients")


class Profiling(Section):
    """Profiling of trial classes; other scripts call ``ctx.profiler.on()``."""

    enabled: Flag = key(False, "whether to sample the node")
    begin_on_batch: Count = key(0, "first batch")
    end_after_batch: Count | None = key(None, "last batch")
    sync_timings: Flag = key(True, "whether to wait for the GPU before taking a time")


class Reproducibility(Section):
    """Keys that make a search reproducible."""

    experiment_seed: Seed | None = key(None, "seed of the search; null: generated")


class RetentionPolicy(Section):
    """Retention of logs."""

    log_retention_days: Days | None = ignored(-1, "days; -1: for ever")


def _command(given: Any) -> str | list[str]:
    words = given
    if isinstance(given, str):
        words = [given.strip()]
    if not (isinstance(words, list) and words and words[0] and all(isinstance(word, str) for word in words)):
        raise ValueError("should be a command: a text for sh, or a list of texts")
    unknown = [name for name in foreign_launchers(words) if name not in LAUNCHERS]
    if unknown:
        known = ", ".join(f"det_core.launch.{name}" for name in LAUNCHERS)
        raise ValueError(f"should do without determined.launch.{unknown[0]}: there is {known}")
    return given  # type: ignore[no-any-return]


Command = Annotated[str | list[str], PlainValidator(_command)]


class ExperimentFile(Section):
    """An experiment file."""

    name: Text | None = key(None, "name of the experiment; null: generated")
    entrypoint: Command | None = key(None, "command of each trial: a text for `sh`, or a program and its arguments")
    searcher: AnySearcher = key(..., "choice of hyperparameters, and training length of each trial")
    hyperparameters: dict[str, Hyperparameter] = key({}, "space of hyperparameters")
    # A fault of the node is not a failure, up to five in a row without a new checkpoint.
    max_restarts: Count = key(5, "restarts of a trial that fails; a fault of the node does not count")
    resources: Resources = key(Resources(), "resources of trials")
    checkpoint_storage: AnyStorage = key(DefaultStorage(), "storage of checkpoints, and which are kept at the end")
    preemption_timeout: float | None = key(None, "seconds between a preemption and the kill; null: 3600", ge=0)
    environment: Environment = key(Environment(), "environment of trials")
    data: dict[str, Any] = key({}, "your own data, in scripts as `info.user_data`")
    description: str | None = key(None, "description for people")
    labels: list[Text] = key([], "labels, for display")
    workspace: str | None = key(None, "workspace, for display")
    project: str | None = key(None, "project, for display")
    debug: Flag = key(False, "whether launchers and trial classes log more")
    reproducibility: Reproducibility = key(Reproducibility(), "seed of the search")
    profiling: Profiling = key(Profiling(), "for trial classes: samples of the node")
    min_validation_period: Period = key({"batches": 0}, "for trial classes: longest training between validations")
    min_checkpoint_period: Period = key({"batches": 0}, "for trial classes: longest training between checkpoints")
    perform_initial_validation: Flag = key(False, "for trial classes: whether to validate before training")
    scheduling_unit: Positive = key(100, "for trial classes: batches between two reports")
    records_per_epoch: Count = key(0, "for trial classes: records of an epoch")
    checkpoint_policy: Literal["best", "all", "none"] = key(
        "best", "for trial classes: which validations lead to a checkpoint"
    )
    optimizations: Optimizations = key(Optimizations(), "for the horovod launcher and trial classes")
    retention_policy: RetentionPolicy | None = key(None, "retention of logs")
    bind_mounts: list[Any] = ignored([], "directories mounted in containers")
    log_policies: list[Any] = ignored([], "reactions to log lines")
    slurm: dict[str, Any] = ignored({}, "options for Slurm")
    pbs: dict[str, Any] = ignored({}, "options for PBS")
    security: dict[str, Any] | None = ignored(None, "settings of Kerberos and similar systems")
    integrations: dict[str, Any] | None = ignored(None, "settings of other services")
    unmanaged: Flag = key(False, "set by the master for runs that it only records")

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_sections(cls, given: Any) -> Any:
        # YAML reads `data:` with nothing below it as null.
        if not isinstance(given, Mapping):
            return given
        defaults = {name: info.get_default(call_default_factory=True) for name, info in cls.model_fields.items()}
        sections = {name for name, default in defaults.items() if isinstance(default, BaseModel | dict | list)}
        return {key: value for key, value in given.items() if value is not None or key not in sections}

    @field_validator("hyperparameters")
    @classmethod
    def _batch_size_is_whole(cls, given: dict[str, Any]) -> dict[str, Any]:
        size = given.get("global_batch_size", Const(type="const", val=1))
        values: list[Any] = [None]
        if isinstance(size, Categorical):
            values = size.vals
        elif isinstance(size, Const):
            values = [size.val]
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
    """Check that the hyperparameters are a grid of not too many points.

    Raises:
        ValueError: If a count is missing, or there are more than `MAX_GRID` points.
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
    if isinstance(axis, Range):
        return axis.count or 1
    return 1

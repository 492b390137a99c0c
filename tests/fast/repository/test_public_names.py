"""Public names of each package, pinned here: a change to the public API changes this file with it."""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import subprocess
import sys
from importlib.metadata import version
from types import ModuleType

import pytest

import det_core as det
from det_core import errors

PUBLIC = {
    "det_core": """
        LOG_FORMAT ClusterInfo InvalidHP RendezvousInfo ResourcesInfo TrialInfo __version__ core get_cluster_info
    """,
    "det_core.core": """
        AnyOf CheckpointContext Context DistributedContext DownloadMode EarlyExitReason KeepBest KeepEvery KeepLatest
        KeepWithin PreemptContext PreemptMode ProfilerContext ResumableLoader RetentionPolicy SearcherContext
        SearcherMode SearcherOperation TensorboardMode TrainContext Unit current_context init random_state resumable
        set_random_state
    """,
    "det_core.pytorch": """
        Batch CheckpointLoadContext DataLoader Epoch LRScheduler MetricReducer PyTorchCallback
        PyTorchExperimentalContext PyTorchTrial PyTorchTrialContext Reducer TorchData TrainUnit Trainer
        adapt_batch_sampler data_length init load_trial_from_checkpoint_path samplers to_device
    """,
    "det_core.accelerated.schedulers": "CosineLrScheduler SchedulerBase StatefulSchedulerBase WSDLrScheduler",
    "det_core.pytorch.deepspeed": """
        DeepSpeedTrial DeepSpeedTrialContext ModelParallelUnit Trainer init make_data_parallel_mpu make_deepspeed_mpu
        overwrite_deepspeed_config
    """,
    "det_core.search": """
        Action Close Completed Create Event ExitReason Exited Progress Search SearchMethod SearchSetup
        SetProgress Shutdown SimulatedTrial Simulation Started Stop TrainTo TrialCreated Validated action_from_dict
        create_search event_from_dict simulate
    """,
    "det_core.config": """
        ConfigError ConfigProblem Experiment defines_name entrypoint_command
        entrypoint_scripts entrypoint_trial parse_experiment read_changes read_overrides
    """,
    "det_core.client": """
        Checkpoint Checkpoints Experiment Master Run Trial checkpoints connect create_experiment delete_run experiment
        experiments run runs trial
    """,
    "det_core.journal": """
        Cursor Journal Line PendingValue Record Report Row RunFolder RunRecord RunSummary SUCCESS_OUTCOMES
        ambiguous_id list_runs lock_run match_id match_run_id open_cursors rank_cursors read_run records_before
    """,
    "det_core.storage": """
        AnyOf Candidate DirectoryStore Disk FileEntry Header KeepBest KeepEvery KeepLatest KeepWithin
        Listing Manifest Owner Progress RetentionDecision RetentionPolicy Selector SourceFile Staging Store
        StoredCheckpoint calls_were_left check_policy check_storage_id copy_in digests evaluate
        event_files_of_experiment event_files_of_run host_id open_store parent_folders scan split_files
        storage_without_secrets
    """,
    "det_core.master.scheduler": """
        DEFAULT_PRIORITY Cause Decision ExitKind Kept Losses Next PendingAllocation Phase Placement Pool
        RunningAllocation State Step TrialFacts after_exit classify decide expired
    """,
    "det_core.ipc": "Channel Communicator Communicators connect",
    "det_core.backend": "Backend LocalBackend",
    "det_core.protocol": "IDLE_TIMEOUT MasterSession",
    "det_core.master.engines": """
        EVERY_LINE ID_PATTERN POSITION_PATTERN AllocationFolder Cause Claim Copy Ended Engine Event ExitReport
        LineFilter Listener LocalEngine LogLine Moved Notice Piece PlacedLine Pool Position Slots Ticket TrialLog
        append_lines check_archive delete_folders encode_line pack_files read_archived unpack_archive
    """,
    "det_core.master.store": "METADATA MetricRow Store change",
    "det_core.testing": "SearchSuite",
}


ERRORS = """
    CheckpointBusy CheckpointConflict CheckpointCorrupt CheckpointError CheckpointNotFound CloseError
    CollectiveMismatch CollectiveTimeout ConfigError ConfigProblem ContextClosed DetCoreError DistributedError
    ExperimentInvalid InfoError InternalException InvalidExperimentException InvalidHP LauncherNotFound MasterDenied
    MasterError MasterUnreachable MissingExtra PeerLost RendezvousError ReportsLost ReportsNotShipped RunError
    RunLocked RunNotFound SearchError StorageError StoreConflict StoreError StoreLocked TensorboardError
    UnknownToMaster
"""


def exported(module: ModuleType) -> set[str]:
    """Return the names that a module offers: no private ones, no modules, and no import that its own code uses."""
    names = {n for n, value in vars(module).items() if not n.startswith("_") and not isinstance(value, ModuleType)}
    tree = ast.parse(inspect.getsource(module))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return names - {"annotations"} - (used - set(module.__all__))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_pinned(name: str) -> None:
    assert importlib.import_module(name).__all__ == sorted(PUBLIC[name].split(), key=order)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "det_core"])
def test_all_lists_exported_names(name: str) -> None:
    module = importlib.import_module(name)
    assert all(hasattr(module, public) for public in module.__all__)  # which also loads what is loaded on first use
    offered = {name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)}
    assert exported(module) == offered


@pytest.mark.parametrize("name", PUBLIC)
def test_public_packages_and_names_are_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    offered = [getattr(module, public) for public in module.__all__]
    assert [o for o in offered if (inspect.isclass(o) or inspect.isfunction(o)) and not o.__doc__] == []


def test_public_errors_are_pinned_and_documented() -> None:
    own = {name: each for name, each in vars(errors).items() if getattr(each, "__module__", "") == errors.__name__}
    assert sorted(own) == ERRORS.split()
    assert all(each.__doc__ for each in own.values())
    assert all(issubclass(each, errors.DetCoreError) for each in own.values() if each is not errors.ConfigProblem)


def order(name: str) -> tuple[int, str]:
    """Sort as ruff sorts ``__all__``: constants, classes, then the rest."""
    kind = 0 if name.isupper() else 1 if name[:1].isupper() else 2
    return kind, name


def test_package_exports_names_of_all_with_lazy_ones() -> None:
    assert all(hasattr(det, name) for name in det.__all__)
    assert exported(det) - {"TrialContext"} == set(det.__all__) - {"core", "__version__"}
    assert dir(det) == sorted(det.__all__)
    with pytest.raises(AttributeError, match=r"det_core.*'nothing'"):
        _ = det.nothing


def test_version_equals_installed_package() -> None:
    assert det.__version__ == version("det-core")


def test_log_format_formats_a_record() -> None:
    record = logging.LogRecord("name", logging.WARNING, "f.py", 1, "hello %s", ("you",), None)
    record.process = 7
    assert logging.Formatter(det.LOG_FORMAT).format(record) == "WARNING: [7] name: hello you"


def test_import_of_core_is_deferred_to_first_use() -> None:
    script = (
        "import sys, det_core as det\n"
        "assert 'det_core.core' not in sys.modules\n"
        "assert det.core.init is sys.modules['det_core.core'].init\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)

"""``det-core checkpoint``: checkpoints of runs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from det_core.cli._groups import Group
from det_core.cli._options import COUNT, home_option, json_option, limit_of, limit_option, yes_option
from det_core.cli._output import (
    FAILED,
    INVALID,
    Failure,
    confirm,
    counted,
    interrupted_by_sigterm,
    note,
    number,
    print_facts,
    print_json,
    print_rows,
    print_table,
    progress_bar,
    say,
    size,
    when,
)
from det_core.cli.completion import complete_checkpoints, complete_runs

if TYPE_CHECKING:
    from det_core.client import Checkpoint, Checkpoints
    from det_core.storage import RetentionDecision, RetentionPolicy

COMPLETE = "complete"
IN_USE = "in use"
DAMAGED = "damaged"
UNVERIFIED = "unverified"
STATES = {True: COMPLETE, False: UNVERIFIED}
"""States by whether every byte can be compared."""
SHOWN_FILES = 100
MANIFEST_THREADS = 8
"""Manifests that are read at a time."""
SMALLER_IS_BETTER = ("loss", "err", "perplexity", "ppl", "nll", "mse", "mae")
"""Parts of the names of metrics whose smallest value is best."""
_EPILOG = """\
Without --storage and --run: the checkpoints of the newest run, wherever it kept them. Secrets of a cloud store come
from the environment, as its own tools read them; the record of a run holds none."""
_DOWNLOAD_EXAMPLES = """\
examples:
  det-core checkpoint download latest model
  det-core checkpoint download 3f2a model --run 20261121-11
  det-core checkpoint download 3f2a91c4-… model --storage s3://bucket/prefix

Every byte is compared with the manifest. Everything is copied aside first: if the command fails, the directory is as it
was. Other files in the directory stay."""
_VERIFY_EXAMPLES = """\
examples:
  det-core checkpoint verify latest
  det-core checkpoint verify --all --storage s3://bucket/prefix

Names each file that is damaged or missing, and goes on. The exit status is 1 if any checkpoint is damaged."""
_GC_EXAMPLES = """\
examples:
  det-core checkpoint gc --keep-latest 3 --dry-run
  det-core checkpoint gc --keep-latest 3 --keep-best 1 --metric accuracy --larger-is-better
  det-core checkpoint gc --keep-every 1000 --keep-newer 7d --run 20261121-11

A checkpoint stays if any of the options keeps it. These always stay: the newest of the run that is intact, one that a
process reads, one that det_core has not written, and those of other runs; and all, as long as none has the metric. The
values of a metric are those of the run's validation rows at the checkpoint's steps, else of the checkpoint's own
metadata."""
_HOW = (
    "say what is to stay: --keep-latest N, --keep-best N --metric M, --keep-every STEPS or --keep-newer 7d, or "
    "several of them; with --dry-run nothing is deleted"
)

id_argument = click.argument("storage_id", metavar="ID", shell_complete=complete_checkpoints)


@click.group("checkpoint", cls=Group, epilog=_EPILOG)
def command() -> None:
    """Look at checkpoints of runs. ID is a checkpoint's ID, the beginning of one, or `latest`."""


def on_store(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare --storage, --run, --home and --json, and call the command with the checkpoints that they name."""

    @functools.wraps(function)
    def call(storage: str | None, run: str | None, home: str | None, **options: Any) -> Any:
        from det_core import client

        with client.checkpoints(storage=storage, run=run, home=home) as checkpoints:
            return function(checkpoints, **options)

    storage_help = "A folder, a URL, or the JSON of a checkpoint_storage (default: where the run kept them)."
    run_help = "Only this run's: its ID, the beginning of one, or `latest`."
    of_run = click.option("--run", metavar="RUN", shell_complete=complete_runs, help=run_help)
    of_storage = click.option("--storage", metavar="URL", help=storage_help)
    return of_storage(of_run(home_option(json_option(call))))


@command.command("list")
@limit_option
@on_store
def list_checkpoints(checkpoints: Checkpoints, limit: int | None, as_json: bool) -> None:
    """List checkpoints, newest first."""
    every = list(checkpoints)[::-1]
    shown = every[: limit_of(limit, as_json)]
    views = _views(checkpoints, shown)
    if as_json:
        print_json(views)
        return
    rows = [
        (v["storage_id"], v["run_id"], v["steps_completed"], size(v["size"]), v["files"], when(v["time"]), v["state"])
        for v in views
    ]
    head = ("CHECKPOINT", "RUN", "STEPS", "SIZE", "FILES", "SAVED", "STATE")
    empty = f"no checkpoints in {checkpoints.root}"
    if checkpoints.run_id:
        empty = f"no checkpoints of run {checkpoints.run_id} in {checkpoints.root}"
    print_rows(head, rows, empty=empty, hidden=len(every) - len(shown))


def _views(checkpoints: Checkpoints, several: Sequence[Checkpoint]) -> list[dict[str, Any]]:
    """Return what is shown of each checkpoint, without those that were deleted meanwhile."""
    from concurrent.futures import ThreadPoolExecutor

    from det_core.errors import CheckpointCorrupt, CheckpointNotFound

    in_use = checkpoints.in_use

    def view(c: Checkpoint) -> dict[str, Any] | None:
        shown = {name: getattr(c, name) for name in ("storage_id", "run_id", "restart", "steps_completed", "time")}
        try:
            state = STATES[c.verified]
            if c.storage_id in in_use:
                state = IN_USE
            return {**shown, "size": c.size, "files": c.files, "state": state}
        except CheckpointCorrupt:
            return {**shown, "size": None, "files": None, "state": DAMAGED}
        except CheckpointNotFound:
            return None

    # Each reads a manifest, which of a cloud store takes a round trip.
    with ThreadPoolExecutor(MANIFEST_THREADS) as pool:
        return [shown for shown in pool.map(view, several) if shown is not None]


def _content(checkpoint: Checkpoint) -> str:
    return f"{size(checkpoint.size)} in {checkpoint.files} file(s)"


@command.command()
@id_argument
@on_store
def describe(checkpoints: Checkpoints, storage_id: str, as_json: bool) -> int:
    """Describe one checkpoint: its files, its metadata."""
    from det_core.errors import CheckpointCorrupt

    checkpoint = checkpoints[storage_id]
    resources = checkpoint.resources
    assert resources is not None  # which reads the manifest, or raises an error that names the fault
    (view,) = _views(checkpoints, [checkpoint])
    view |= {"storage": checkpoints.root, "path": checkpoint.path and str(checkpoint.path)}
    metadata: dict[str, Any] = {}
    status = 0
    try:
        metadata = checkpoint.metadata
    except CheckpointCorrupt as e:
        view["problem"] = str(e)
        status = FAILED
    if as_json:
        print_json({**view, "metadata": metadata, "resources": resources})
        return status
    view |= {"size": size(view["size"]), "time": when(view["time"])}
    view |= {f"metadata.{key}": number(value) for key, value in metadata.items()}
    print_facts(view.items())
    print("\nfiles")
    print_table(("SIZE", "PATH"), [(size(count), path) for path, count in list(resources.items())[:SHOWN_FILES]])
    if len(resources) > SHOWN_FILES:
        print(f"and {len(resources) - SHOWN_FILES} more; --json has all")
    return status


@command.command(epilog=_DOWNLOAD_EXAMPLES)
@id_argument
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@on_store
def download(checkpoints: Checkpoints, storage_id: str, directory: str, as_json: bool) -> None:
    """Copy a checkpoint into the directory DIR, and compare it with its manifest."""
    download_into(checkpoints[storage_id], directory, as_json)


def download_into(checkpoint: Checkpoint, directory: str, as_json: bool) -> None:
    """Copy a checkpoint into a directory, and print what is there now."""
    title = f"downloading {checkpoint.storage_id}"
    with interrupted_by_sigterm(), progress_bar(title, checkpoint.size) as advance:
        checkpoint.download(directory, progress=advance)
    folder = os.path.abspath(directory)
    if as_json:
        view = {"storage_id": checkpoint.storage_id, "folder": folder, "verified": checkpoint.verified}
        print_json({**view, "size": checkpoint.size, "files": checkpoint.files})
        return
    say(f"downloaded checkpoint {checkpoint.storage_id} to {folder}: {_content(checkpoint)}")
    if not checkpoint.verified:
        note("unverified: it has no manifest to compare with")


@command.command(epilog=_VERIFY_EXAMPLES)
@click.argument("ids", metavar="[ID]...", nargs=-1, shell_complete=complete_checkpoints)
@click.option("--all", "every", is_flag=True, help="Every checkpoint of the run, or of the storage.")
@on_store
def verify(checkpoints: Checkpoints, ids: Sequence[str], every: bool, as_json: bool) -> int:
    """Compare every byte of checkpoints with their manifests."""
    from det_core.errors import CheckpointNotFound

    if bool(ids) == every:
        text = "name the checkpoints to verify, or --all (and not both); `det-core checkpoint list` shows them"
        raise Failure(text, INVALID)
    results = []
    chosen = _named(checkpoints, ids)
    if every:
        # Those without a usable manifest are in no list: the journals of runs know them.
        for storage_id, problem in checkpoints.damaged().items():
            results.append(_result(storage_id, DAMAGED, [problem], as_json))
        chosen = list(checkpoints)
    for checkpoint in chosen:
        prefix = f"checkpoint {checkpoint.storage_id} in {checkpoints.root}: "
        try:
            with progress_bar(f"verifying {checkpoint.storage_id}", checkpoint.size) as advance:
                problems = [problem.removeprefix(prefix) for problem in checkpoint.verify(progress=advance)]
        except CheckpointNotFound:
            note(f"{checkpoint.storage_id} was deleted meanwhile")
            continue
        state = STATES[checkpoint.verified]
        if problems:
            state = DAMAGED
        results.append(_result(checkpoint.storage_id, state, problems, as_json, checkpoint))
    damaged = any(result["state"] == DAMAGED for result in results)
    if as_json:
        print_json(results)
    elif damaged:
        note("`det-core checkpoint rm` a damaged checkpoint, and its run resumes from the one before")
    elif not results:
        note(f"no checkpoints in {checkpoints.root}")
    return int(damaged)


def _named(checkpoints: Checkpoints, ids: Sequence[str]) -> list[Checkpoint]:
    """Return each checkpoint that is named, once."""
    return list({c.storage_id: c for c in (checkpoints[name] for name in ids)}.values())


def _result(
    storage_id: str, state: str, problems: list[str], as_json: bool, checkpoint: Checkpoint | None = None
) -> dict[str, Any]:
    """Return what was found of a checkpoint; print it for a person, as the next one may take long."""
    if not as_json:
        content = "no manifest" if checkpoint is None else _content(checkpoint)
        say(f"{storage_id}  {state}: {content}")
        for problem in problems:
            say(f"  {problem}")
    sizes = {"size": checkpoint and checkpoint.size, "files": checkpoint and checkpoint.files}
    return {"storage_id": storage_id, "state": state, **sizes, "problems": problems}


@command.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True, shell_complete=complete_checkpoints)
@yes_option
@on_store
def rm(checkpoints: Checkpoints, ids: Sequence[str], yes: bool, as_json: bool) -> None:
    """Delete checkpoints.

    One that a process reads, or that cannot be found, stops the command before anything is deleted.
    """
    from det_core.errors import CheckpointError

    chosen = _named(checkpoints, ids)
    if used := checkpoints.in_use.intersection(c.storage_id for c in chosen):
        raise CheckpointError(f"{', '.join(sorted(used))}: a process is reading it. Nothing was deleted")
    _warn_of_newest(checkpoints, chosen)  # before the question: it may change the answer
    items = [f"{c.storage_id}  run {c.run_id or '-'}  steps {c.steps_completed}  saved {when(c.time)}" for c in chosen]
    confirm(items, f"delete {counted(len(chosen), 'checkpoint')}?", yes)
    with progress_bar("deleting", len(chosen), unit="checkpoints") as advance:
        for checkpoint in chosen:
            checkpoint.delete()
            advance(1)
            if not as_json:
                say(f"deleted {checkpoint.storage_id}")
    if as_json:
        print_json([c.storage_id for c in chosen])


def _warn_of_newest(checkpoints: Checkpoints, chosen: Sequence[Checkpoint]) -> None:
    """Warn what runs, live trials among them, will start from without the newest of their checkpoints."""
    ids = {c.storage_id for c in chosen}
    for run_id in dict.fromkeys(c.run_id for c in chosen if c.run_id is not None):
        of_run = list(checkpoints.of_run(run_id))
        if not of_run or of_run[-1].storage_id not in ids:
            continue
        left = [c for c in of_run if c.storage_id not in ids]
        start = "without a checkpoint"
        if left:
            start = f"from {left[-1].storage_id}, steps {left[-1].steps_completed}"
        note(f"warning: {of_run[-1].storage_id} is the newest of its run {run_id}: its next start will be {start}")


@command.command(epilog=_GC_EXAMPLES)
@click.option("--keep-latest", type=COUNT, metavar="N", help="The newest N.")
@click.option("--keep-best", type=COUNT, metavar="N", help="The N with the best value of --metric.")
@click.option("--metric", metavar="M", help="A validation metric; a.b for b within a.")
@click.option("--smaller-is-better/--larger-is-better", default=None, help="As of a loss, or of an accuracy.")
@click.option("--keep-every", type=COUNT, metavar="STEPS", help="The first at or after each multiple of STEPS.")
@click.option("--keep-newer", metavar="AGE", help="Those younger than this: 90m, 12h, 7d, 2w.")
@click.option("--all-runs", is_flag=True, help="Of each run in --storage, evaluated by itself.")
@click.option("--dry-run", "-n", is_flag=True, help="Delete nothing; print what would be deleted, and why not.")
@on_store
def gc(checkpoints: Checkpoints, all_runs: bool, dry_run: bool, as_json: bool, **keep: Any) -> int:
    """Delete the checkpoints that no option keeps."""
    policy = _policy(**keep)
    if checkpoints.run_id is None and not all_runs and len(runs := checkpoints.run_ids()) > 1:
        text = f"{checkpoints.root} has checkpoints of {len(runs)} runs: name one with --run, or add --all-runs"
        raise Failure(text, INVALID)
    decisions = checkpoints.preview_gc(policy)
    chosen = {d.candidate.storage_id for d in decisions if not d.reasons}
    # A misspelt metric keeps all: that would look like a successful run of gc.
    unknown = _unknown_metric(checkpoints, decisions)
    if unknown and not dry_run:
        raise Failure(unknown)
    deleted: list[str] = []
    if not dry_run:
        with progress_bar("deleting", len(chosen), unit="checkpoints") as advance:

            def on_deleted(storage_id: str) -> None:
                advance(1)
                if not as_json:
                    say(f"deleted {storage_id}")

            deleted = checkpoints.gc(policy, deleted=on_deleted, judged=decisions)
    if as_json:
        print_json([_decision_json(d, deleted) for d in decisions])
    elif dry_run:
        rows = []
        for c, reasons, _ in reversed(decisions):
            decision = f"stays: {', '.join(reasons)}" if reasons else "would be deleted"
            rows.append((c.storage_id, c.steps_completed, when(c.time), decision))
        print_rows(("CHECKPOINT", "STEPS", "SAVED", "DECISION"), rows, empty=f"no checkpoints in {checkpoints.root}")
        note(unknown or f"{len(chosen)} of {len(decisions)} checkpoint(s) would be deleted; nothing was")
    else:
        say(f"deleted {len(deleted)} of {len(decisions)} checkpoint(s); kept: {policy}")
    left = chosen.difference(deleted)
    if dry_run or not left:
        return 0
    # Others may have deleted some meanwhile, or begun to read them: these were not deleted here, which is fine.
    return int(any(d.candidate.storage_id in left for d in checkpoints.preview_gc(policy) if not d.reasons))


def _policy(
    keep_latest: int | None,
    keep_best: int | None,
    metric: str | None,
    smaller_is_better: bool | None,
    keep_every: int | None,
    keep_newer: str | None,
) -> RetentionPolicy:
    """Return the policy that the options of ``gc`` describe."""
    from det_core.storage import AnyOf, KeepBest, KeepEvery, KeepLatest, KeepWithin

    if (keep_best is None) != (metric is None):
        raise Failure("--keep-best N and --metric M go together: by which validation metric?", INVALID)
    if smaller_is_better is None and metric is not None:
        # A deletion cannot be undone: only the direction of a loss or an error is obvious.
        if not any(word in metric.lower() for word in SMALLER_IS_BETTER):
            raise Failure(f"which {metric} is best? Add --larger-is-better or --smaller-is-better", INVALID)
        smaller_is_better = True
    policies: list[RetentionPolicy] = []
    try:
        if keep_latest is not None:
            policies.append(KeepLatest(keep_latest))
        if keep_best is not None and metric is not None:
            policies.append(KeepBest(keep_best, metric, smaller_is_better=bool(smaller_is_better)))
        if keep_every is not None:
            policies.append(KeepEvery(keep_every))
        if keep_newer is not None:
            policies.append(KeepWithin(keep_newer))
    except ValueError as e:
        raise Failure(str(e), INVALID) from None
    if not policies:
        raise Failure(_HOW, INVALID)
    return AnyOf(*policies)


def _decision_json(decision: RetentionDecision, deleted: list[str]) -> dict[str, Any]:
    c = decision.candidate
    return {
        "storage_id": c.storage_id,
        "run_id": c.run_id,
        "steps_completed": c.steps_completed,
        "time": c.time,
        "metrics": dict(c.metrics),
        "delete": not decision.reasons,
        "deleted": c.storage_id in deleted,
        "reasons": list(decision.reasons),
    }


def _unknown_metric(checkpoints: Checkpoints, decisions: list[RetentionDecision]) -> str | None:
    """Return which metrics there are, if no checkpoint has the one of --metric."""
    missing = [reason for d in decisions for reason in d.unknown]
    if not missing:
        return None
    names = ", ".join(checkpoints.metrics()) or "none"
    return f"{missing[0]}, so all stay; validation metrics are {names}"

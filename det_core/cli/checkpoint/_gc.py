"""``det-core checkpoint gc``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from det_core.cli._bar import bar
from det_core.cli._say import age, error, note, print_json, print_table
from det_core.cli.checkpoint._found import on_found

if TYPE_CHECKING:
    from det_core.client import Checkpoints
    from det_core.storage import RetentionDecision, RetentionPolicy

_EXAMPLES = """
examples:
  det-core checkpoint gc --keep-latest 3 --dry-run
  det-core checkpoint gc --keep-latest 3 --keep-best 1 --metric accuracy --larger-is-better
  det-core checkpoint gc --keep-every 1000 --keep-newer 7d --run 20261121-11

A checkpoint stays if any of the options keeps it. Whatever they say, these stay: the newest of the run that is
whole, one that a process reads, one that det_core has not written, and those of other runs; and all, as long as
none has the metric. The values of a metric are those of the run's validation rows at the checkpoint's steps, else
of the checkpoint's own metadata."""
SMALLER = ("loss", "err", "perplexity", "ppl", "nll", "mse", "mae")
"""Metrics with one of these in their names are better if they are smaller."""
_HOW = (
    "say what is to stay: --keep-latest N, --keep-best N --metric M, --keep-every STEPS or --keep-newer 7d, or "
    "several of them; with --dry-run nothing is deleted"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = _EXAMPLES.strip()
    parser.add_argument("--keep-latest", type=int, metavar="N", help="the newest N")
    parser.add_argument("--keep-best", type=int, metavar="N", help="the N with the best value of --metric")
    parser.add_argument("--metric", metavar="M", help="a validation metric; a.b for b within a")
    better = parser.add_mutually_exclusive_group()
    better.add_argument("--larger-is-better", action="store_false", dest="smaller", help="as of an accuracy")
    better.add_argument("--smaller-is-better", action="store_true", dest="smaller", help="as of a loss or an error")
    parser.set_defaults(smaller=None)
    parser.add_argument("--keep-every", type=int, metavar="STEPS", help="the first at or after each multiple of STEPS")
    parser.add_argument("--keep-newer", metavar="AGE", help="those younger than this: 90m, 12h, 7d, 2w")
    parser.add_argument("--all-runs", action="store_true", help="of each run in --storage, judged by itself")
    parser.add_argument("--dry-run", "-n", action="store_true", help="delete nothing; say what would go, and why not")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Delete what no option keeps."""
    try:
        args.policy = _policy(args)
    except ValueError as e:
        error(str(e))
        return 2
    return on_found(_collect)(args)


def _collect(args: argparse.Namespace, checkpoints: Checkpoints) -> int:
    policy: RetentionPolicy = args.policy
    if checkpoints.run_id is None and not args.all_runs and len(runs := checkpoints.run_ids()) > 1:
        error(f"{checkpoints.root} has checkpoints of {len(runs)} runs: name one with --run, or add --all-runs")
        return 2
    verdicts = checkpoints.preview_gc(policy)
    if (unknown := _unknown_metric(checkpoints, verdicts)) and not args.dry_run:
        error(unknown)
        return 1
    going = [v.candidate.storage_id for v in verdicts if not v.reasons]
    gone = [] if args.dry_run else _delete(checkpoints, policy, verdicts, not args.json)
    if args.json:
        print_json([_as_json(v, gone) for v in verdicts])
    elif args.dry_run:
        _print(checkpoints, verdicts, len(going))
        if unknown:
            note(unknown)
    else:
        print(f"deleted {len(gone)} of {len(verdicts)} checkpoint(s); kept: {policy}")
    left = set(going) - set(gone)
    if args.dry_run or not left:
        return 0
    # Others may have deleted some meanwhile, or begun to read them: it is no failure that these were not deleted here.
    return int(any(v.candidate.storage_id in left for v in checkpoints.preview_gc(policy) if not v.reasons))


def _policy(args: argparse.Namespace) -> RetentionPolicy:
    from det_core.storage import AnyOf, KeepBest, KeepEvery, KeepLatest, KeepWithin

    policies: list[RetentionPolicy] = []
    if args.keep_latest is not None:
        policies.append(KeepLatest(args.keep_latest))
    if args.keep_best is not None:
        if args.metric is None:
            raise ValueError("--keep-best N needs --metric M: by which validation metric?")
        policies.append(KeepBest(args.keep_best, args.metric, smaller_is_better=_smaller(args)))
    elif args.metric is not None or args.smaller is not None:
        raise ValueError("--metric, --larger-is-better and --smaller-is-better go with --keep-best N")
    if args.keep_every is not None:
        policies.append(KeepEvery(args.keep_every))
    if args.keep_newer is not None:
        policies.append(KeepWithin(args.keep_newer))
    if not policies:
        raise ValueError(_HOW)
    return AnyOf(*policies)


def _smaller(args: argparse.Namespace) -> bool:
    """Whether a smaller value is better; what is deleted by mistake is gone, so only a loss or an error is obvious."""
    if args.smaller is None and not any(word in args.metric.lower() for word in SMALLER):
        raise ValueError(f"which {args.metric} is best? Add --larger-is-better or --smaller-is-better")
    return args.smaller is not False


def _delete(
    checkpoints: Checkpoints, policy: RetentionPolicy, verdicts: list[RetentionDecision], tell: bool
) -> list[str]:
    with bar("deleting", sum(not v.reasons for v in verdicts), bytes=False) as advance:

        def deleted(storage_id: str) -> None:
            advance(1)
            if tell:
                print(f"deleted {storage_id}")

        return checkpoints.gc(policy, deleted=deleted, judged=verdicts)


def _print(checkpoints: Checkpoints, verdicts: list[RetentionDecision], going: int) -> None:
    if not verdicts:
        note(f"no checkpoints in {checkpoints.root}")
        return
    rows = []
    for c, reasons, _ in reversed(verdicts):
        why = f"stays: {', '.join(reasons)}" if reasons else "would be deleted"
        rows.append((c.storage_id, str(c.steps_completed), age(c.time), why))
    print_table(("CHECKPOINT", "STEPS", "AGE", "VERDICT"), rows)
    note(f"{going} of {len(verdicts)} checkpoint(s) would be deleted; nothing was")


def _as_json(verdict: RetentionDecision, gone: list[str]) -> dict[str, Any]:
    c, reasons = verdict.candidate, verdict.reasons
    return {
        "storage_id": c.storage_id,
        "run_id": c.run_id,
        "steps_completed": c.steps_completed,
        "time": c.time,
        "metrics": dict(c.metrics),
        "delete": not reasons,
        "deleted": c.storage_id in gone,
        "reasons": list(reasons),
    }


def _unknown_metric(checkpoints: Checkpoints, verdicts: list[RetentionDecision]) -> str | None:
    """Which metrics there are, if no checkpoint has the one that was asked for."""
    missing = [reason for v in verdicts for reason in v.unknown]
    if not missing:
        return None
    names = checkpoints.metrics()
    there = f"validation metrics are {', '.join(names)}" if names else "there is no validation metric at all"
    return f"{missing[0]}, so all stay; {there}"

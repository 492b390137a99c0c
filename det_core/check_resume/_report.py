"""Report of a check as a summary in Markdown, and as plain data."""

from __future__ import annotations

import shlex
from typing import Any

from det_core.check_resume._check import ENDED, Report
from det_core.check_resume._diagnosis import Finding
from det_core.check_resume._records import Training


def as_json(report: Report) -> dict[str, Any]:
    """Return a report as what JSON holds."""
    return {
        "equal": report.is_equal,
        "command": list(report.command),
        "findings": [
            {
                "cause": finding.cause,
                "text": finding.text,
                "step": finding.step,
                "trainings": list(finding.trainings),
            }
            for finding in report.findings
        ],
        "remarks": list(report.remarks),
        "runs": [_training(training) for training in report.trainings],
        "folder": None if report.folder is None else str(report.folder),
        "seconds": round(report.seconds, 1),
    }


def _training(training: Training) -> dict[str, Any]:
    starts = training.starts
    if training.name == ENDED:  # its earlier starts are those of the undisturbed training
        starts = starts[-1:]
    restored = training.save_restored(1)
    first = [step for group, step in training.reported.get(1, ()) if group == training.main_group]
    return {
        "training": training.name,
        "statuses": [start.status for start in starts],
        "seconds": [round(start.seconds, 1) for start in starts],
        "runs": training.runs,
        "ranks": list(training.sizes),
        "rows": sum(map(len, training.rows.values())),
        "checkpoints": len(training.saves),
        "resumed_from": None if restored is None else restored.steps_completed,
        "first_step": next(iter(first), None),
    }


def as_markdown(report: Report) -> str:
    """Return a report as text for a pull request."""
    command = shlex.join(report.command)
    count = len(report.findings)
    verdict = "resumes exactly"
    if not report.is_equal:
        verdict = f"does not resume exactly: {_count(count, 'finding')}"
    lines = [f"### `{command}` {verdict}", ""]
    lines += [f"- {_finding(finding)}" for finding in report.findings]
    lines += [f"- remark: {remark}" for remark in report.remarks]
    if report.findings or report.remarks:
        lines.append("")
    lines += [
        "| training | ended with | ranks | rows | checkpoints | resumed from | first step | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_table_row(_training(training)) for training in report.trainings]
    return "\n".join(lines)


def _finding(finding: Finding) -> str:
    return f"`{finding.cause}` ({', '.join(finding.trainings)}): {finding.text}"


def _table_row(training: dict[str, Any]) -> str:
    cells = [
        training["training"],
        ", ".join(_status(status) for status in training["statuses"]),
        ", ".join(map(str, sorted(set(training["ranks"])))),
        training["rows"],
        training["checkpoints"],
        training["resumed_from"],
        training["first_step"],
        f"{sum(training['seconds']):.1f}",
    ]
    return f"| {' | '.join('-' if cell is None else str(cell) for cell in cells)} |"


def _status(status: int) -> str:
    if status < 0:
        return f"signal {-status}"
    return str(status)


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}s"

"""Scripts ported to det_core, right ones, and what people get wrong when they port: an edit of a right one each."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support import EXAMPLES, TESTS, commands, pages, warm

PORTS = TESTS / "trainings" / "ports"


@dataclass(frozen=True)
class Wrong:
    """A mistake.

    Attributes:
        base: the right port that it is made in.
        cause: what ``det-core check-resume`` names first; None where it ends with the API's own error.
        edits: old and new text of the script; each old one occurs once.
        said: what the API says of it, if it does.
    """

    base: str
    cause: str | None
    edits: tuple[tuple[str, str], ...]
    said: str | None = None

    @property
    def ranks(self) -> int:
        """Number of processes of the training."""
        return 2 if self.base == "ranks" else 1

    def script(self) -> str:
        """Return the script with the mistake in it."""
        text = (PORTS / f"{self.base}.py").read_text()
        for old, new in self.edits:
            assert text.count(old) == 1, f"{self.base}.py: {text.count(old)} times {old!r}"
            text = text.replace(old, new)
        return text


def _without(*lines: str) -> tuple[tuple[str, str], ...]:
    """Return the edits that delete these lines."""
    return tuple((f"{line}\n", "") for line in lines)


_SAVE_OF_STEPS = '            ctx.checkpoint.save(state, {"steps_completed": step + 1})\n'
_REPORT_OF_STEPS = "        ctx.train.report_training_metrics(step + 1, metrics)\n"
_SKIPPING = "        for _ in range(done):\n            next(batches)\n"
_ORDER_OF_EPOCH = (
    "        if saved is not None:\n"
    '            core.set_random_state(saved["random_at_start"])  # the order of the epoch is drawn from here\n'
)
_RANDOM_OF_EPOCHS = '        if saved is not None:\n            core.set_random_state(saved["random"])\n'

WRONG = {
    "weights": Wrong("steps", "weights_not_loaded", _without('            model.load_state_dict(saved["model"])')),
    "optimizer": Wrong(
        "steps", "optimizer_not_loaded", _without('            optimizer.load_state_dict(saved["optimizer"])')
    ),
    "optimizer_not_saved": Wrong(
        "steps",
        "optimizer_not_loaded",
        _without(
            '            optimizer.load_state_dict(saved["optimizer"])',
            '                "optimizer": optimizer.state_dict(),',
        ),
    ),
    "scheduler": Wrong(
        "steps", "scheduler_not_loaded", _without('            scheduler.load_state_dict(saved["scheduler"])')
    ),
    "scaler": Wrong("steps", "scaler_not_loaded", _without('            scaler.load_state_dict(saved["scaler"])')),
    "random_state": Wrong(
        "steps", "random_state_not_loaded", _without('            core.set_random_state(saved["random"])')
    ),
    "random_state_not_saved": Wrong(
        "steps",
        "random_state_not_loaded",
        _without(
            '            core.set_random_state(saved["random"])', '                "random": core.random_state(),'
        ),
    ),
    "counter": Wrong("steps", "starts_over", (("range(ctx.steps_completed, LENGTH)", "range(LENGTH)"),)),
    "never_resumed": Wrong(
        "steps",
        "never_asked",
        (
            (
                "    with ctx.checkpoint.resume() as path:\n        if path is not None:\n",
                "    if False:\n        if 1:\n",
            ),
            ("range(ctx.steps_completed, LENGTH)", "range(LENGTH)"),
        ),
    ),
    "saved_before_the_counter": Wrong(
        "steps", "step_repeated", ((_SAVE_OF_STEPS, _SAVE_OF_STEPS.replace("step + 1", "step")),)
    ),
    "last_step_not_reported": Wrong(
        "steps", "hole", ((_REPORT_OF_STEPS, ""), ("            break\n", f"            break\n{_REPORT_OF_STEPS}"))
    ),
    "numpy_scalar": Wrong(
        "steps",
        "command_failed",
        (
            ("import torch\n\n", "import numpy as np\nimport torch\n\n"),
            ("            state = {\n", '            state = {\n                "loss": np.float64(loss.item()),\n'),
        ),
        said="will not read",
    ),
    "name_with_the_time": Wrong(
        "steps",
        "several_runs",
        (("import torch\n\n", "import time\n\nimport torch\n\n"), ('name="steps"', 'name=f"steps-{time.time_ns()}"')),
    ),
    "processes_left": Wrong(
        "steps",
        "processes_left",
        (
            ("import torch\n\n", "import subprocess\n\nimport torch\n\n"),
            ("LENGTH = 24\n", 'LENGTH = 24\nsubprocess.Popen(["sleep", "120"], start_new_session=True)\n'),
        ),
    ),
    "next_epoch": Wrong(
        "epochs",
        "step_jumped",
        (
            ('first_epoch, done = saved["epoch"], saved["done"]', 'first_epoch = saved["epoch"] + 1'),
            (_ORDER_OF_EPOCH, ""),
        ),
    ),
    "batches_not_skipped": Wrong(
        "epochs",
        "step_repeated",
        (('first_epoch, done = saved["epoch"], saved["done"]', 'first_epoch = saved["epoch"]'),),
    ),
    "batches_not_skipped_counter_right": Wrong(
        "epochs",
        "data_position",
        ((_SKIPPING, "        batches = (b for b, _ in zip(batches, range(len(loader) - done)))\n"),),
    ),
    "batches_skipped_twice": Wrong(
        "epochs",
        "data_position",
        (("            next(batches)\n", "            next(batches, None)\n            next(batches, None)\n"),),
    ),
    "order_of_another_epoch": Wrong(
        "epochs",
        "data_position",
        (
            (_ORDER_OF_EPOCH, ""),
            (_RANDOM_OF_EPOCHS, ""),
            (
                "        random_at_start = core.random_state()\n",
                f"{_RANDOM_OF_EPOCHS}        random_at_start = core.random_state()\n",
            ),
        ),
    ),
    "order_after_the_last_batch": Wrong(  # right but at the end of an epoch, where the next order is to be drawn
        "epochs",
        "data_position",
        (
            (
                '                    "epoch": epoch,\n                    "done": batch + 1,\n',
                '                    "epoch": step // len(loader),\n                    "done": step % len(loader),\n',
            ),
        ),
    ),
    "generator_of_the_sampler": Wrong(
        "epochs", "data_position", (("shuffle=True)", "shuffle=True, generator=torch.Generator().manual_seed(2))"),)
    ),
    "other_unit": Wrong("epochs", "other_unit", (('{"steps_completed": step}', '{"steps_completed": epoch + 1}'),)),
    "prefetched_batch": Wrong("prefetch", "data_position", _without('            upcoming = saved["upcoming"]')),
    "environment": Wrong("environment", "environment_state", _without('            bandit.restore(saved["bandit"])')),
    "environment_not_saved": Wrong(
        "environment",
        "environment_state",
        (*_without('            bandit.restore(saved["bandit"])'), ('"bandit": bandit.state(), ', "")),
    ),
    "stop_within_an_accumulation": Wrong(
        "accumulation", "gradients_lost", (("should_preempt() and updated", "should_preempt()"),)
    ),
    "ema": Wrong("ema", "ema_not_loaded", _without('            average.load_state_dict(saved["average"])')),
    "random_state_of_rank_0": Wrong(
        "ranks", "random_state_of_other_rank", (('saved["random"][rank]', 'saved["random"][0]'),)
    ),
    "reports_of_all_ranks": Wrong(
        "ranks",
        None,
        (
            ("        if rank == 0:\n            ctx.train", "        ctx.train"),
            ('"distance": abs(x)', '"guess": guess'),
        ),
        said="report different values",
    ),
}
"""By name."""


SAID = (
    "no checkpoint was restored before its first report|the first training report after the resume"
    "|a resume from it supersedes the rows|report different values for group|will not read"
)
"""Words of the API's own warnings."""
_TWO_RANKS = ("-m", "det_core.launch.torch_distributed", "--nproc-per-node", "2")
_FIT_TRIAL = ("-m", "det_core.exec.harness", "fit_trial:SumTrial", "--config", "search.yaml", "--hparam", "lr=0.1")
_SMALL_DIGITS = ("--epochs", "5", "--width", "8", "--batch-size", "64")
RIGHT: dict[str, tuple[str, ...]] = {
    **{path.stem: (str(path),) for path in sorted(PORTS.glob("*.py"))},
    "ranks": (*_TWO_RANKS, str(PORTS / "ranks.py")),
    "hf_accelerate_two_ranks": (*_TWO_RANKS, str(PORTS / "hf_accelerate.py")),
    "README.md fit": ("fit.py",),
    "README.md fit_trainer": ("fit_trainer.py",),
    "README.md fit_trial": _FIT_TRIAL,
    "docs/getting-started.md steps": ("steps.py",),
    "docs/core-api.md exact": ("exact.py",),
    "docs/core-api.md exact_two_ranks": (*_TWO_RANKS, "exact.py"),
    "docs/porting.md port": ("port.py",),
    "docs/porting.md port_two_ranks": (*_TWO_RANKS, "port.py"),
    "docs/porting.md with_accelerate": ("with_accelerate.py",),
    "quickstart": (f"{EXAMPLES}/quickstart/train.py", *_SMALL_DIGITS),
    "quickstart_two_ranks": (*_TWO_RANKS, f"{EXAMPLES}/quickstart/train.py", *_SMALL_DIGITS),
    "accelerated": (f"{EXAMPLES}/accelerated/train.py",),
    "finetune": (f"{EXAMPLES}/accelerated/finetune.py",),
    "pytorch_trial": (f"{EXAMPLES}/pytorch_trial/train.py",),
    "fsdp_checkpoint": (*_TWO_RANKS, f"{EXAMPLES}/fsdp_checkpoint/train.py", "--steps", "40", "--save-every", "9"),
    "fsdp2": (*_TWO_RANKS, f"{EXAMPLES}/quickstart_frameworks/train_fsdp2.py", *_SMALL_DIGITS),
}
"""The arguments of python, by name: the scripts of this folder, those of the pages, and the examples."""


@dataclass(frozen=True)
class Outcome:
    """Result of a check.

    Attributes:
        status: its exit status.
        causes: the findings' causes, the likeliest first.
        texts: what the findings say.
        printed: what all starts of the script have printed.
    """

    status: int
    causes: tuple[str, ...]
    texts: tuple[str, ...]
    printed: str

    @property
    def said(self) -> list[str]:
        """The lines in which the API warns."""
        return [line for line in self.printed.splitlines() if re.search(SAID, line)]

    def is_named(self, wrong: Wrong) -> bool:
        """Return whether the first finding names the mistake."""
        named = self.causes[:1] == (wrong.cause,)
        return named or (wrong.said is not None and any(re.search(wrong.said, line) for line in self.said))


def write(name: str, folder: Path) -> Path:
    """Write a wrong port into a folder and return its path."""
    path = folder / f"{name}.py"
    path.write_text(WRONG[name].script())
    return path


def check_wrong(name: str, folder: Path) -> Outcome:
    """Check a wrong port in a folder, which is the current one."""
    script = str(write(name, folder))
    return check((*_TWO_RANKS, script) if WRONG[name].ranks == 2 else (script,), folder)


def check_right(name: str, folder: Path) -> Outcome:
    """Check a right port in a folder, which is the current one."""
    page = name.split(" ")[0]
    if page.endswith(".md"):
        for block in pages.blocks(page):
            if block.name is not None:
                (folder / block.name).write_text(block.text)
    if name == "finetune":  # begins with the weights that the example before it has saved
        done = warm.run(RIGHT["accelerated"], cwd=folder)
        assert done.returncode == 0, done.stdout
    return check(RIGHT[name], folder)


def check(arguments: Sequence[str], folder: Path) -> Outcome:
    """Run ``det-core check-resume`` on a warm python with these arguments."""
    python = folder / "python"
    warm.add_command(python)
    keep = folder / "keep"
    done = commands.det_core("check-resume", "--json", "--keep", keep, "--", python, *arguments, check=None)
    report = json.loads(done.stdout)
    printed = "".join(path.read_text(errors="replace") for path in sorted(keep.glob("*/start-*/output.txt")))
    causes = tuple(finding["cause"] for finding in report["findings"])
    texts = tuple(finding["text"] for finding in report["findings"])
    return Outcome(done.returncode, causes, texts, printed)

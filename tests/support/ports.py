"""Scripts ported to det_core, right ones, and what people get wrong when they port: an edit of a right one each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from support import TESTS

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
        """How many processes it runs in."""
        return 2 if self.base == "ranks" else 1

    def script(self) -> str:
        """The script with the mistake in it."""
        text = (PORTS / f"{self.base}.py").read_text()
        for old, new in self.edits:
            assert text.count(old) == 1, f"{self.base}.py: {text.count(old)} times {old!r}"
            text = text.replace(old, new)
        return text


def _without(*lines: str) -> tuple[tuple[str, str], ...]:
    """The edits that delete these lines."""
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
        "ranks_differ",
        (
            ("        if rank == 0:\n            ctx.train", "        ctx.train"),
            ('"distance": abs(x)', '"guess": guess'),
        ),
    ),
}
"""By name."""


def write(name: str, folder: Path) -> Path:
    """Write a wrong port into a folder and return its path."""
    path = folder / f"{name}.py"
    path.write_text(WRONG[name].script())
    return path

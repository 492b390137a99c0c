"""Decisions a second of a search: our adaptive ASHA in the simulator, Ray Tune's ASHA scheduler, Optuna's pruner.

A decision is one answer to one piece of news: a trial has reported, has ended, or a new one is wanted. For Ray that
is a call of its scheduler (no trial object, no hyperparameters), for Optuna ``ask``, ``should_prune`` and ``tell`` with
a random sampler; ours draws hyperparameters as well. Trials report once a rung. What a peer's decision costs grows with
the number of trials, so each is run at sizes that end within minutes.

How our time grows is measured in pairs, one after the other in one process: so many searches of the smaller size that
they take about as long as one of the larger size, since a short run finds a quiet moment of a shared machine more
easily than a long one. The row tells the median of the pairs. Python's garbage collector is as a user has it: on.

Run it with ``python -m benchmarks.search_decisions``.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks._peers import ROOT, peers_python
from benchmarks._program import options, quick, status
from benchmarks._table import print_table

RATE = 50_000
"""The bound: decisions a second, at each of our sizes."""
SIZES: dict[str, tuple[int, ...]] = quick(
    {"det_core": (1_000, 10_000, 100_000), "ray": (1_000, 10_000), "optuna": (300, 1_000)}, {"det_core": (100, 1_000)}
)
ROUNDS = {"det_core": 3, "ray": 1, "optuna": 1}
PAIRS = quick(3, 1)
TIMEOUT = 900.0
REQUIREMENTS = ("ray[tune]", "optuna", "numpy")

HEAD = """
import gc, json, random, sys, time
trials, dice = int(sys.argv[1]), random.Random(7)
LENGTHS = [16, 64, 256, 1024, 4096]
"""
OURS = """
from det_core.search import simulate
quality = [dice.random() for _ in range(trials)]
space = {
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
    "dropout": {"type": "double", "minval": 0, "maxval": 0.5},
    "layers": {"type": "int", "minval": 1, "maxval": 8},
    "activation": {"type": "categorical", "vals": ["relu", "gelu"]},
}
def metric_of(hparams, length, number):
    return quality[number] + 1 / length
def searcher(trials):
    return {"name": "adaptive_asha", "max_length": 4096, "max_trials": trials, "max_concurrent_trials": 16}
"""
CODE = {
    "det_core": OURS
    + """
gc.collect()
start = time.process_time()
decisions = simulate(searcher(trials), space, 7, metric_of, slots=16).decisions
""",
    "growth": OURS
    + """
large, small, pairs = trials, int(sys.argv[2]), int(sys.argv[3])
def seconds(trials):
    gc.collect()
    start = time.process_time()
    simulate(searcher(trials), space, 7, metric_of, slots=16)
    return time.process_time() - start
seconds(small)
times = large // small
ratios = []
for _ in range(pairs):
    ratios.append(times * seconds(large) / sum(seconds(small) for _ in range(times)))
decisions, start = ratios, time.process_time()
""",
    "ray": """
from types import SimpleNamespace
from ray.tune.schedulers import ASHAScheduler
scheduler = ASHAScheduler(
    time_attr="training_iteration", metric="loss", mode="min", max_t=4096, grace_period=16, reduction_factor=4
)
decisions = 0
gc.collect()
start = time.process_time()
for number in range(trials):
    trial, quality = SimpleNamespace(trial_id=str(number)), dice.random()
    scheduler.on_trial_add(None, trial)
    decisions += 2
    for length in LENGTHS:
        result = {"training_iteration": length, "loss": quality + 1 / length}
        decisions += 1
        if scheduler.on_trial_result(None, trial, result) != scheduler.CONTINUE:
            break
    scheduler.on_trial_complete(None, trial, result)
""",
    "optuna": """
import optuna
optuna.logging.set_verbosity(optuna.logging.ERROR)
pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=16, reduction_factor=4)
study = optuna.create_study(pruner=pruner, sampler=optuna.samplers.RandomSampler(seed=7))
space = {
    "lr": optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True),
    "dropout": optuna.distributions.FloatDistribution(0, 0.5),
    "layers": optuna.distributions.IntDistribution(1, 8),
    "activation": optuna.distributions.CategoricalDistribution(["relu", "gelu"]),
}
decisions = 0
gc.collect()
start = time.process_time()
for _ in range(trials):
    trial, quality = study.ask(space), dice.random()
    decisions += 2
    for length in LENGTHS:
        trial.report(quality + 1 / length, length)
        decisions += 1
        if trial.should_prune():
            break
    study.tell(trial, quality)
""",
}
TAIL = "\nprint(json.dumps([decisions, time.process_time() - start]))\n"


def main() -> int:
    """Measure, print the table, and return the number of bounds that are not met."""
    options(__doc__).parse_args()
    rows: list[tuple[object, ...]] = []
    failed = 0
    for who, sizes in SIZES.items():
        for trials in sizes:
            decisions, seconds = min((measured(who, trials) for _ in range(ROUNDS[who])), key=lambda pair: pair[1])
            rate, met = decisions / seconds, None
            if who == "det_core":
                met = rate >= RATE
                failed += not met
            rows.append((who, trials, int(decisions), seconds, rate, met))
    small, large = sorted(SIZES["det_core"])[-2:]
    allowed = large * math.log(large) / (small * math.log(small))
    growth = grown(small, large)
    rows.append((f"det_core: time at {large:,} over time at {small:,}", None, None, None, growth, growth <= allowed))
    print_table(
        f"search decisions a second (bound: {RATE:,}, and time growing by n log n at most: {allowed:.3g} times)",
        ("", "trials", "decisions", "seconds", "a second", "met"),
        rows,
    )
    return failed + (growth > allowed)


def measured(who: str, trials: int) -> tuple[float, float]:
    """Decisions and seconds of one search, in a process of its own."""
    decisions, seconds = run(who, str(trials))
    return decisions, seconds


def grown(small: int, large: int) -> float:
    """How many times as long the larger search takes, as the median of some pairs."""
    ratios, _ = run("growth", str(large), str(small), str(PAIRS))
    return statistics.median(ratios)


def run(who: str, *arguments: str) -> Any:
    """What a program of ours prints, run in a process of its own."""
    python = Path(sys.executable) if who in ("det_core", "growth") else peers_python(*REQUIREMENTS)
    done = subprocess.run(
        [python, "-c", HEAD + CODE[who] + TAIL, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    if done.returncode:
        raise RuntimeError(f"{who} ended with status {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    raise SystemExit(status(main()))

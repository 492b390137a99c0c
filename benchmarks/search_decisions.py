"""Decisions a second of a search: our adaptive ASHA in the simulator, beside Ray Tune's ASHA scheduler.

A decision is one answer to one piece of news: a trial has reported, has ended, or a new one is wanted. For Ray that
is a call of its scheduler (no trial object, no hyperparameters); ours draws hyperparameters as well. Trials report once
a rung. What Ray's decision costs grows with the number of trials, so it is run at sizes that end within minutes.
Python's garbage collector is on, as users have it; what counts is processor time.
"""

from benchmarks._bench import PEERS, Args, Table, Tables, at_least, program, quick
from benchmarks._processes import answer, ours, peers
from benchmarks._turns import alternate

RATE = 50_000  # decisions a second, at each of our sizes
SIZES = quick((1_000, 10_000, 100_000), (100, 1_000))
HEAD = """
import gc, random
trials, rng = int(sys.argv[1]), random.Random(7)
LENGTHS = [16, 64, 256, 1024, 4096]
"""
DET_CORE = """
from det_core.search import simulate
quality = [rng.random() for _ in range(trials)]
space = {
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
    "dropout": {"type": "double", "minval": 0, "maxval": 0.5},
    "layers": {"type": "int", "minval": 1, "maxval": 8},
    "activation": {"type": "categorical", "vals": ["relu", "gelu"]},
}
searcher = {"name": "adaptive_asha", "max_length": 4096, "max_trials": trials, "max_concurrent_trials": 16}
def objective(hparams, length, number):
    return quality[number] + 1 / length
gc.collect()
start = time.process_time()
decisions = simulate(searcher, space, 7, objective, slots=16).decisions
"""
RAY = """
from types import SimpleNamespace
from ray.tune.schedulers import ASHAScheduler
options = {"metric": "loss", "mode": "min", "max_t": 4096, "grace_period": 16, "reduction_factor": 4}
scheduler = ASHAScheduler(time_attr="training_iteration", **options)
decisions = 0
gc.collect()
start = time.process_time()
for number in range(trials):
    trial, quality = SimpleNamespace(trial_id=str(number)), rng.random()
    scheduler.on_trial_add(None, trial)
    decisions += 2
    for length in LENGTHS:
        result = {"training_iteration": length, "loss": quality + 1 / length}
        decisions += 1
        if scheduler.on_trial_result(None, trial, result) != scheduler.CONTINUE:
            break
    scheduler.on_trial_complete(None, trial, result)
"""
TAIL = "\nseconds = time.process_time() - start\nanswer({'decisions': decisions, 'a second': decisions / seconds})\n"


def measure(args: Args) -> Tables:
    table = Table(f"search decisions, medians of {args.rounds} (ray: of one)", ["decisions", "a second"])
    for trials in SIZES:
        found = alternate(ours(args, HEAD + DET_CORE + TAIL, trials), args.rounds)
        table.fill(found, lambda _, rate: at_least(rate, RATE), f"{trials:,} trials: ")
    for trials in (1_000, 10_000) if PEERS else ():
        found = {"ray": [answer(HEAD + RAY + TAIL, trials, python=peers("ray[tune]", "numpy"))]}
        table.fill(found, at_least, f"{trials:,} trials: ")
    yield table


if __name__ == "__main__":
    program(measure, __doc__, rounds=10, against=True)

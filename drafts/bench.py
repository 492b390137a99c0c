import gc, random, sys, time
from det_core.search import simulate
import det_core; print(det_core.__file__)
space = {"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},"dropout": {"type": "double", "minval": 0, "maxval": 0.5},
    "layers": {"type": "int", "minval": 1, "maxval": 8},"activation": {"type": "categorical", "vals": ["relu", "gelu"]}}
for trials in map(int, sys.argv[1:]):
    best = 0
    for _ in range(3):
        dice = random.Random(7)
        quality=[dice.random() for _ in range(trials)]
        gc.collect(); s=time.process_time()
        d=simulate({"name": "adaptive_asha", "max_length": 4096, "max_trials": trials, "max_concurrent_trials": 16}, space, 7, lambda h,l,n: quality[n]+1/l, slots=16).decisions
        best=max(best,d/(time.process_time()-s))
    print(trials, d, f"{best:,.0f}/s")

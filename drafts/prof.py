import cProfile, pstats, random, gc
from det_core.search import simulate
space = {"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},"dropout": {"type": "double", "minval": 0, "maxval": 0.5},
    "layers": {"type": "int", "minval": 1, "maxval": 8},"activation": {"type": "categorical", "vals": ["relu", "gelu"]}}
T=5000
d=random.Random(7); q=[d.random() for _ in range(T)]
cProfile.run('simulate({"name": "adaptive_asha", "max_length": 4096, "max_trials": T, "max_concurrent_trials": 16}, space, 7, lambda h,l,n: q[n]+1/l, slots=16)','/tmp/r38s/p')
pstats.Stats('/tmp/r38s/p').sort_stats('tottime').print_stats(28)

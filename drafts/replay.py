import random, time, json
from det_core.search import *
T=10000; d=random.Random(7); q=[d.random() for _ in range(T)]
se={"name": "adaptive_asha", "max_length": 4096, "max_trials": T, "max_concurrent_trials": 16}; sp={"lr":{"type":"double","minval":0,"maxval":1}}
rec=simulate(se,sp,7,lambda h,l,n:q[n]+1/l,slots=16,record=True).record
rows=[json.dumps([e.to_dict(),[a.to_dict() for a in acts]]) for e,acts in rec]
for _ in range(3):
    t=time.perf_counter(); s=create_search(se,sp,7)
    for r in rows:
        e,acts=json.loads(r); s.apply(event_from_dict(e),[action_from_dict(a) for a in acts])
    print(len(rows), round(time.perf_counter()-t,2),"s from JSON")

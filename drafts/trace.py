import random, hashlib, sys, json
from det_core.search import *
space={"lr":{"type":"log","base":10,"minval":-4,"maxval":-1},"n":{"type":"int","minval":1,"maxval":3,"count":3},"c":{"type":"categorical","vals":[1,2]}}
grid={"a":{"type":"log","base":10,"minval":-4,"maxval":-1,"count":4},"b":{"n":{"type":"int","minval":-3,"maxval":3,"count":4},"c":5}}
rng=random.Random(1); bad=0
for it in range(1500):
    kind=rng.choice(["random","single","grid","async_halving","adaptive_asha","adaptive_asha","async_halving"])
    s={"name":kind,"metric":"loss","smaller_is_better":rng.random()<.5}
    hp=grid if kind=="grid" else space
    if kind in("random","single","grid"):
        if rng.random()<.8: s["max_length"]=rng.choice([5,{"epochs":3}])
        else: s["max_length"]=4
        if kind=="random": s["max_trials"]=rng.randint(1,30)
        if kind!="single": s["max_concurrent_trials"]=rng.choice([0,1,3,16])
    else:
        s.update(max_trials=rng.randint(1,60),divisor=rng.choice([2,3,4,2.5]),max_concurrent_trials=rng.choice([0,1,3,16]))
        if rng.random()<.3: s.update(time_metric="b",max_time=rng.choice([1,9,64,300]))
        else: s.update(max_length=rng.choice([1,2,9,64,1000]),stop_once=rng.random()<.4)
        if kind=="async_halving": s["num_rungs"]=rng.randint(1,5)
        else:
            s["mode"]=rng.choice(["standard","aggressive","conservative"])
            if rng.random()<.2: s["bracket_rungs"]=[2,3]
    fail,inv=rng.choice([0,0,.2,1.0]),rng.choice([0,0,.2])
    if fail==1.0: inv=0
    slots,order=rng.choice([None,1,3]),rng.choice(["time","random"])
    def metric(h,length,number):
        d=random.Random(f"{it} {number}"); luck,q=d.random(),d.random()
        if luck<fail: return "errored"
        if luck<fail+inv: return "invalid_hp"
        if luck<fail+inv+.05 and length>1: return "completed"
        return round(q,1)+1/(1+length)
    r=simulate(s,hp,it,metric,slots=slots,order=order,record=True)
    num={t.request_id:t.number for t in r.trials}
    out=[(type(e).__name__,num.get(getattr(e,'request_id',None)),getattr(e,'length',None),[(type(a).__name__,num.get(getattr(a,'request_id',None)),getattr(a,'length',None),getattr(a,'failure',None)) for a in acts]) for e,acts in r.record]
    rungs=[[(x["length"],x["outstanding"],[(num[e["request_id"]],e["metric"],e["state"]) for e in x["entries"]]) for x in b["rungs"]] for b in r.search.rungs()]
    g=[t.hparams for t in r.trials] if kind=="grid" else 0
    at=random.Random(it).randrange(len(r.record)+1)
    s2=create_search(s,hp,it)
    for e,ac in r.record[:at]: s2.apply(e,ac)
    for e,ac in r.record[at:]:
        if s2.handle(e)!=ac: bad+=1; print("RECOVERY",it,file=sys.stderr); break
    if s2.rungs()!=r.search.rungs(): bad+=1; print("RUNGS",it,file=sys.stderr)
    print(it,hashlib.md5(repr((out,rungs,g)).encode()).hexdigest())
print("bad",bad,file=sys.stderr)

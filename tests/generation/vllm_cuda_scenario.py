from __future__ import annotations

import cuda_on_cpu  # noqa: F401 (first)
import vllm_loop_scenario as s
import time
def life(models):
    t=time.time()
    this = s.Loop(models); print("built", time.time()-t, flush=True)
    facts={}
    import os
    if os.environ["RANK"]=="0":
        this.pull_next("tied_a").result(timeout=s.BOUND)
        def timed(n,f):
            t=time.time(); facts[n]=f(); print(n, time.time()-t, flush=True)
        orig=this.collector.errors.put
        import traceback
        def put(e):
            traceback.print_exception(e); orig(e)
        this.loop._on_fatal=put
        timed("served", lambda: this.serve(s.make_request("whole", new=40, seed=5)))
        timed("swaps", lambda: s.several_swaps(this))
        timed("cache", lambda: s.prefix_cache(this))
        timed("damaged", lambda: s.damaged_weights(this))
        timed("torture", lambda: s.torture(this, seed=0))
    this.close()
    facts["errors"]=this.collector.errors.qsize()
    return facts

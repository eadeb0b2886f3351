"""Run as a program: a cluster of processes on this machine, one of whose nodes dies with a finished result on it.

Prints, as one line of JSON, the sum that a worker on another node made of that result, and what was recorded.
"""

import json
import sys

from ray.cluster_utils import Cluster
from ray_fakes import Scribe, run_config

from actors.pool import RayPool
from actors.session import start_ray
from actors.waiter import RayWaiter
from pipeline.testing import ListRecorder
from pipeline.workers.spec import WorkerSpec

QUICK_TO_NOTICE = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 2,
}


def main() -> None:
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": QUICK_TO_NOTICE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    doomed = cluster.add_node(num_cpus=1, resources={"writers": 1})
    settings = {"count": 1, "resources": {"writers": 1.0}}
    runner = run_config(address=cluster.address, rollout=settings, item_deadline=120.0).runner
    session, recorder = start_ray(runner), ListRecorder()
    pools = [
        RayPool(role, WorkerSpec(Scribe, ()), getattr(runner, role), runner, recorder)
        for role in ("rollout", "teacher")
    ]
    waiter = RayWaiter(pools)

    def wait(handle):
        waiter.wait([handle], 120.0)
        return handle

    for pool in pools:
        wait(pool.starts[0]).result()
    big = wait(pools[0].submit("big", 1_000_000))
    cluster.remove_node(doomed, allow_graceful=False)
    cluster.add_node(num_cpus=1, resources={"writers": 1})
    total = wait(pools[1].submit("total", big)).result()
    for pool in pools:
        pool.close()
    session.close()
    cluster.shutdown()
    json.dump({"total": total, "events": recorder.events}, sys.stdout)


if __name__ == "__main__":
    main()

"""One process of a small job, with one fault where it is asked for; run by the tests of jobs, holds no test itself.

python job_worker.py FAULT VICTIM: what goes wrong, and in which process.
"""

import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxcoll import all_gather, distributed, take_shard
from jaxcoll.host_arrays import Fetcher, place
from jaxcoll.step import Step, compile_step
from jaxcoll.topology import Topology

STEPS, FAULTY_STEP = 8, 3


def programs(topology: Topology, rows: int) -> tuple[Step, Step]:
    """Two programs of [world * rows] int32, each with one all_gather; the second adds one."""
    group, shape = topology.group("world"), jax.ShapeDtypeStruct((topology.world * rows,), jnp.int32)

    def turned(x: jax.Array, more: int) -> jax.Array:
        return take_shard(jnp.flip(all_gather(x, group, 0)) + more, group, 0)

    specs = {"in_specs": (P(group),), "out_specs": P(group)}
    first = compile_step(lambda x: turned(x, 0), topology, (shape,), **specs, name="first")
    return first, compile_step(lambda x: turned(x, 1), topology, (shape,), **specs, name="second")


def fail(fault: str) -> None:
    """What happens to the victim in the middle of a step."""
    print("fault", time.time(), flush=True)
    if fault == "exits":
        sys.exit(0)
    if fault in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, fault))
    if fault == "raises":
        raise ZeroDivisionError("as the test asks")
    if fault == "sleeps":
        time.sleep(60)


def fork() -> None:
    """A child that ends as Python programs end, and is no process of the job; how well it ends is JAX's affair."""
    if (child := os.fork()) == 0:
        sys.exit()
    os.waitpid(child, 0)


def main(fault: str, victim: int) -> None:
    if fault == "joining" and os.environ["JAXCOLL_PROCESS_ID"] == str(victim):
        jax.distributed.initialize = lambda *_, **__: fail("SIGKILL")  # it has come, and does not join
    job = distributed.initialize()
    mine = job.process_id == victim
    if fault == "leaving" and mine:
        jax.distributed.shutdown = lambda: fail("SIGKILL")  # it has ended well, and does not leave with the others
    topology = Topology(attn_dp=jax.device_count())
    rows = 8 if fault == "rows" and mine else 4
    order = programs(topology, rows)
    if fault in ("order", "checked order") and mine:
        order = order[::-1]
    fetch, sharding = Fetcher(topology), topology.sharding(P(topology.group("world")))
    [values] = place([np.arange(topology.world * rows, dtype=np.int32)], [sharding])
    found = fetch(values)
    print("running", flush=True)
    for number in range(STEPS):
        if number == FAULTY_STEP and mine and fault == "exits":
            fail(fault)
        if number == FAULTY_STEP and mine and fault == "forks":
            fork()
        values = order[number % 2](values)  # on its way, not yet done
        if number == FAULTY_STEP and mine:
            fail(fault)
        found = fetch(values)
    turns = np.arange(topology.world * rows) + STEPS // 2
    assert np.array_equal(found, turns), found  # turned an even number of times
    print("equal", flush=True)
    if fault == "interrupted":  # the victim waits for the others, who take longer
        if not mine:
            time.sleep(4)
        else:
            timer = threading.Timer(1, os.kill, [os.getpid(), signal.SIGINT])
            timer.daemon = True
            timer.start()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

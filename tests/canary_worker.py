"""One process of a job that only checks its backend: integer sums in big pieces; run by the tests of jobs.

Every round each rank adds other numbers, so that a piece that comes late, twice or from elsewhere shows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxcoll import declare_partial, distributed, reduce_scatter
from jaxcoll.step import compile_step
from jaxcoll.topology import Topology

ROUNDS, CHUNK = 20, 4 * 2**20 // 4  # int32 numbers in 4 MiB


def addend(rank: Any, number: Any, numbers: Any) -> Any:
    """What a rank contributes in a round; sums of it wrap nowhere."""
    return (numbers % 1009) * (rank + 1) + number * (rank + 3)


def main() -> None:
    distributed.initialize()
    topology = Topology(attn_dp=jax.device_count())
    group, world = topology.group("world"), topology.world

    def contribute(number: jax.Array) -> jax.Array:
        mine = addend(jax.lax.axis_index(group), number, jnp.arange(world * CHUNK, dtype=jnp.int32))
        return reduce_scatter(declare_partial(mine, group), group, 0)

    step = compile_step(
        contribute, topology, (jax.ShapeDtypeStruct((), jnp.int32),), in_specs=(P(),), out_specs=P(group), name="canary"
    )
    numbers = np.arange(world * CHUNK, dtype=np.int64)
    for number in range(ROUNDS):
        whole = step(jax.device_put(np.int32(number), topology.sharding(P())))
        for shard in whole.addressable_shards:
            found = np.asarray(shard.data)
            right = sum(addend(rank, number, numbers[shard.index]) for rank in range(world))
            assert found.nbytes == 4 * 2**20
            assert np.array_equal(found, right), (number, shard.index)
    print("exact", ROUNDS, flush=True)


if __name__ == "__main__":
    main()

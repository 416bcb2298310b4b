"""Unequal exchanges: which states they refuse, what the audit knows of them, and their programs for H200s."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from stepping import everywhere, shape, step

from jaxcoll import primitives
from jaxcoll.audit import audit
from jaxcoll.collectives import all_reduce, declare_partial
from jaxcoll.hlo import collectives
from jaxcoll.ragged import (
    all_gather_v,
    all_to_all_v,
    exchange_counts,
    place_rows,
    reduce_scatter_v,
    transport_for,
)
from jaxcoll.states import StateError
from jaxcoll.targets import compile_only, gpu_devices
from jaxcoll.topology import Topology

ROOT = Path(__file__).parent.parent
TOPOLOGY = Topology(4, 2)
WORLD = ("attn_dp", "attn_tp")


def traced(function, group=WORLD, topology=TOPOLOGY, dtype="float32"):
    """Traces a step of [8, 2] rows per rank, cut over `group`, and of one count per replica, known to all."""
    specs = P(group), P()
    x, counts = (
        jax.ShapeDtypeStruct(dims, kind, sharding=topology.sharding(spec))
        for dims, kind, spec in (
            ((8 * topology.size(group), 2), dtype, specs[0]),
            ((topology.attn_dp,), "int32", specs[1]),
        )
    )
    mapped = jax.shard_map(function, mesh=topology.mesh, in_specs=specs, out_specs=P(WORLD))
    return jax.jit(mapped).trace(x, counts)


def varying(y):
    """Any result, typed as what may leave the step."""
    rest = tuple(a for a in WORLD if a not in jax.typeof(y).mat.varying)
    return lax.pcast(y, rest, to="varying") if rest else y


# Wrong states.


def partial(x):
    return declare_partial(x, WORLD)


REFUSED = {
    "all_gather_v of a partial": (
        lambda x, c: all_gather_v(declare_partial(x, "attn_dp"), c, "attn_dp", capacity=9),
        r"all_gather_v over \(attn_dp\) needs SHARD, but this .* is PARTIAL; reduce_scatter completes",
    ),
    "all_gather_v of a partial over other axes": (
        lambda x, c: all_gather_v(declare_partial(x, "attn_tp"), c, "attn_dp", capacity=9),
        r"all_gather_v over \(attn_dp\) moves rows, but this .* is PARTIAL over \(attn_tp\); complete it there first",
    ),
    "all_gather_v by a rank's own counts": (
        lambda x, c: all_gather_v(x, c + lax.axis_index("attn_dp"), "attn_dp", capacity=9),
        r"all_gather_v \(its counts\) over \(attn_dp\) needs REPLICA, but this int32\[4\].* is SHARD",
    ),
    "reduce_scatter_v of a shard": (
        lambda x, c: reduce_scatter_v(x, c, "attn_dp", rows=2),
        r"reduce_scatter_v over \(attn_dp\) needs PARTIAL, but this .* is SHARD; contract makes",
    ),
    "reduce_scatter_v twice": (
        lambda x, c: reduce_scatter_v(
            reduce_scatter_v(declare_partial(x, "attn_dp"), c, "attn_dp", rows=8), c, "attn_dp", rows=2
        ),
        r"reduce_scatter_v over \(attn_dp\) needs PARTIAL, but this .* is SHARD",
    ),
    "reduce_scatter_v of a complete sum": (
        lambda x, c: reduce_scatter_v(all_reduce(partial(x), WORLD), c, "attn_dp", rows=2),
        r"reduce_scatter_v over \(attn_dp\) needs PARTIAL, but this .* is REPLICA",
    ),
    "reduce_scatter_v over a part of a partial's axes": (
        lambda x, c: reduce_scatter_v(partial(x), c, "attn_dp", rows=2),
        r"reduce_scatter_v over \(attn_dp\) moves rows, but this .* is PARTIAL over \(attn_tp\)",
    ),
    "reduce_scatter_v by a rank's own starts": (
        lambda x, c: reduce_scatter_v(
            declare_partial(x, "attn_dp"), c, "attn_dp", rows=2, starts=c * lax.axis_index("attn_dp")
        ),
        r"reduce_scatter_v \(its counts\) over \(attn_dp\) needs REPLICA",
    ),
    "all_to_all_v of a partial": (
        lambda x, c: all_to_all_v(partial(x), c + lax.axis_index("attn_dp"), "attn_dp", capacity=9).rows,
        r"all_to_all_v over \(attn_dp\) needs SHARD, but this .* is PARTIAL",
    ),
    "all_to_all_v of a partial over other axes": (
        lambda x, c: (
            all_to_all_v(declare_partial(x, "attn_tp"), c + lax.axis_index("attn_dp"), "attn_dp", capacity=9).rows
        ),
        r"all_to_all_v over \(attn_dp\) moves rows, but this .* is PARTIAL over \(attn_tp\)",
    ),
    "all_to_all_v by the same counts on every rank": (
        lambda x, c: all_to_all_v(x, c, "attn_dp", capacity=9).rows,
        r"exchange_counts over \(attn_dp\) needs SHARD, but this int32\[4\].* is REPLICA; take_shard cuts",
    ),
    "place_rows of a partial": (
        lambda x, c: place_rows(partial(x), c[0], c[0], WORLD, total=9),
        r"place_rows over \(attn_dp, attn_tp\) needs SHARD, but this .* is PARTIAL",
    ),
}


@pytest.mark.parametrize("function, words", REFUSED.values(), ids=REFUSED.keys())
def test_wrong_states_are_refused(function, words):
    with pytest.raises(StateError, match=words):
        traced(lambda x, c: varying(function(x, c)))


def test_a_replica_is_no_shard():
    for verb in (
        lambda x, c: all_gather_v(x, c[:2], "attn_tp", capacity=9),
        lambda x, c: all_to_all_v(x, c[:2], "attn_tp", capacity=9).rows,
        lambda x, c: place_rows(x, c[0], c[0], "attn_tp", total=9),
    ):
        with pytest.raises(StateError, match=r"over \(attn_tp\) needs SHARD, but this .* is REPLICA; take_shard"):
            traced(verb, ("attn_dp",))
    with pytest.raises(StateError, match=r"reduce_scatter_v over \(attn_tp\) .* must not be summed again"):
        traced(lambda x, c: reduce_scatter_v(x, c[:2], "attn_tp", rows=9), ("attn_dp",))


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"all_gather_v needs one whole number per rank, \[4\], not int32\[2\]"):
        traced(lambda x, c: all_gather_v(x, c[:2], "attn_dp", capacity=9))
    with pytest.raises(ValueError, match=r"reduce_scatter_v needs one whole number per rank, \[4\], not float32\[4\]"):
        traced(lambda x, c: reduce_scatter_v(declare_partial(x, "attn_dp"), c * 1.0, "attn_dp", rows=9))
    with pytest.raises(ValueError, match=r"exchange_counts needs one whole number per rank, \[2\], not int32\[4\]"):
        traced(lambda x, c: exchange_counts(c + lax.axis_index("attn_tp"), "attn_tp"))
    with pytest.raises(ValueError, match="unknown transport 'nccl'; allowed are dense, ragged"):
        traced(lambda x, c: all_gather_v(x, c, "attn_dp", capacity=9, transport="nccl"))  # pyright: ignore[reportArgumentType]
    for verb, words in (
        (lambda x, c: all_gather_v(x, c, "attn_dp", capacity=2**31), "all_gather_v would number 2147483648 rows"),
        (lambda x, c: reduce_scatter_v(partial(x), c, WORLD, rows=2**28), "needs one whole number"),
        (lambda x, c: reduce_scatter_v(declare_partial(x, "attn_dp"), c, "attn_dp", rows=2**29), "2147483648 rows"),
        (lambda x, c: all_to_all_v(x, c, "attn_dp", capacity=9, pair_capacity=2**29).rows, "2147483648 rows"),
        (lambda x, c: place_rows(x, c[0], c[0], WORLD, total=2**31 - 8), "place_rows would number 2147483648 rows"),
    ):
        with pytest.raises(ValueError, match=words):
            traced(verb)


# place_rows.


def test_placed_rows_add_up_to_all_rows():
    """Rank r places r mod 3 rows; the rest of its rows is garbage, and so is what lies past the buffer."""
    counts = np.arange(8) % 3
    starts = np.cumsum(counts) - counts

    def placed(x):
        rank = lax.axis_index(WORLD)
        return all_reduce(place_rows(x, jnp.array(starts)[rank], jnp.array(counts)[rank], WORLD, total=7), WORLD)

    x = np.full((8, 3, 2), np.nan, np.float32)
    for rank, count in enumerate(counts):
        x[rank, :count] = 10 * rank + np.arange(2 * count).reshape(count, 2)
    run = step(TOPOLOGY, placed, [shape(24, 2)], [everywhere(TOPOLOGY)], P())
    expected = np.concatenate([x[rank, :count] for rank, count in enumerate(counts)])
    assert len(expected) == 7  # the last start lies within the buffer, less than a whole block from its end
    np.testing.assert_array_equal(np.asarray(run(x.reshape(24, 2))), expected)


# The retypes and the audit.


def test_only_ragged_and_the_audit_know_the_retypes():
    for name, files in {
        "partial_to_shard": {"ragged.py", "primitives.py"},
        "shard_to_replica": {"ragged.py", "primitives.py"},
        "retyped_as_shard": {"ragged.py", "dispatch.py"},  # addends over moe_tp travel home before they are added
        "_retyped_as_replica": {"ragged.py"},
    }.items():
        sources = [p for package in ("jaxcoll", "models", "pallas_kernels") for p in (ROOT / package).rglob("*.py")]
        assert {p.name for p in sources if name in p.read_text().lower()} == files


def test_the_audit_refuses_what_only_looks_like_a_retype(monkeypatch):
    def scattered(x, c):
        return varying(reduce_scatter_v(declare_partial(x, "attn_dp"), c, "attn_dp", rows=2))

    def gathered(x, c):
        return varying(all_gather_v(x, c, "attn_dp", capacity=9, transport="ragged"))

    audit(traced(scattered))
    audit(traced(gathered))
    auditing = sys.modules["jaxcoll.audit"]  # the package's attribute of that name is the function
    monkeypatch.setattr(auditing, "CASTS", auditing.CASTS - {"partial_to_shard"})
    monkeypatch.setattr(primitives, "COLLECTIVES", primitives.COLLECTIVES - {"shard_to_replica"})
    with pytest.raises(StateError, match="partial_to_shard at .* touches a value that is PARTIAL"):
        audit(traced(scattered))
    with pytest.raises(StateError, match=r"shard_to_replica at .* differs over \(attn_dp\) but is typed as a replica"):
        audit(traced(gathered))


def test_the_audit_refuses_a_ragged_exchange_into_a_replica():
    """JAX gives the result of a ragged exchange the type of its output buffer."""

    def untyped(x, c):
        return lax.ragged_all_to_all(x, jnp.zeros((9, 2)), c, c, c, c, axis_name="attn_dp")

    mapped = jax.shard_map(untyped, mesh=TOPOLOGY.mesh, in_specs=(P("attn_dp"), P()), out_specs=P())
    args = jax.ShapeDtypeStruct((32, 2), "float32"), jax.ShapeDtypeStruct((4,), "int32")
    program = jax.jit(mapped).trace(*args)
    with pytest.raises(StateError, match=r"ragged_all_to_all at .* differs over \(attn_dp\) but is typed as a replica"):
        audit(program)


# Programs for GPUs that are not there.


def h200(function, topology):
    program = traced(function, topology=topology, dtype="bfloat16")
    audit(program)
    return compile_only(program.lower())


@pytest.mark.parametrize("attn_dp, attn_tp, group", [(8, 1, "attn_dp"), (4, 2, "attn_dp"), (4, 2, "attn_tp")])
def test_ragged_programs_send_no_padded_rows(attn_dp, attn_tp, group):
    """Each verb is one ragged exchange (and, for all_to_all_v, the counts); XLA adds no collective of its own."""
    topology = Topology(attn_dp, attn_tp, devices=gpu_devices("h200", 1, 8))
    n = topology.size((group,))
    programs = {
        "all_gather_v": lambda x, c: all_gather_v(x, c[:n], group, capacity=16, transport="ragged"),
        "reduce_scatter_v": lambda x, c: reduce_scatter_v(
            declare_partial(x, group), c[:n], group, rows=4, transport="ragged"
        ),
        "all_to_all_v": lambda x, c: (
            all_to_all_v(x, c[:n] + lax.axis_index(group), group, capacity=16, transport="ragged").rows
        ),
    }
    row = 2 * 2  # two bfloat16
    for name, verb in programs.items():
        found = collectives(h200(lambda x, c, verb=verb: varying(verb(x, c)), topology), topology)
        ragged = [c for c in found if c.kind == "ragged_all_to_all"]
        received = {"reduce_scatter_v": 4 * n}.get(name, 16)
        assert [(c.group, c.operand_bytes, c.result_bytes) for c in ragged] == [(group, 8 * row, received * row)]
        others = [(c.kind, c.group, c.operand_bytes) for c in found if c not in ragged]
        assert others == ([("all_gather", group, 4 * n)] if name == "all_to_all_v" else [])


def test_the_transport_follows_the_devices():
    assert transport_for(Topology(4, 2)) == "dense"
    assert transport_for(Topology(4, 2, devices=gpu_devices("h200", 1, 8))) == "ragged"
    assert transport_for(Topology(devices=gpu_devices("h200", 1, 1))) == "dense"

"""Experts: both forms equal the dense loop, every partial is summed once, and work follows the routed rows."""

import functools
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from reference import Reference, silu
from tiny_models import Tensors, compile_module, parameters_of, published, random_tensors

from jaxcoll.collectives import all_reduce, declare_partial
from jaxcoll.dispatch import ReceivedPerExpert
from jaxcoll.topology import Topology
from models.deepseek_v4 import experts
from models.deepseek_v4.config import Config
from models.deepseek_v4.expert_blocks import block_rows, blocks_at_even_load
from models.deepseek_v4.experts import Experts, gated
from models.deepseek_v4.moe import MoE
from models.deepseek_v4.router import Routing

# 12 experts of width 24, 3 per token; layer 0 routes by hash, layer 1 by score.
CONFIG = published(compress_ratios=[0, 0])
TENSORS = random_tensors(CONFIG)
EXPERTS, K, ROWS, D = 12, 3, 10, 24
FORMS = pytest.mark.parametrize("form", ["dense", "grouped", "row by row"])
CLOSE: dict[str, Any] = dict(rtol=1e-5, atol=2e-5)
EVERYWHERE = P()

# attn_dp, attn_tp, moe_ep: moe_tp of 1, 2, 3, 4 and the world; attn_dp cut, attn_tp cut, and neither.
MESHES = [(1, 1, 1), (2, 2, 2), (2, 3, 2), (2, 3, 6), (4, 2, 4), (4, 2, 2), (2, 4, 4), (3, 2, 1), (1, 4, 4), (4, 1, 2)]


@pytest.fixture(autouse=True)
def _form(request, monkeypatch):
    """The threshold between the forms, moved where a test names a form; blocks of 3 rows, or of one."""
    if "form" in request.fixturenames:
        form = request.getfixturevalue("form")
        monkeypatch.setattr(experts, "DENSE_WORK", np.inf if form == "dense" else -1)
        monkeypatch.setattr(experts, "block_rows", lambda _: 1 if form == "row by row" else 3)


@functools.cache
def routed_step(form: str, sizes: tuple[int, int, int]) -> Any:
    """The routed experts of layer 1 with given routing, summed over the world: (x, ids, weights, active) -> [G, D]."""
    topology = Topology(*sizes)
    world = topology.group("world")
    module = Experts(Config.from_dict(CONFIG), topology, jnp.float32)

    def fn(module: Any, x: Any, ids: Any, weights: Any, active: Any) -> Any:
        return all_reduce(declare_partial(module(x, Routing(ids, weights), active), world), world)

    args = (np.zeros((ROWS, D), np.float32), *routing_like(0), np.zeros(ROWS, bool))
    parameters = parameters_of(module, TENSORS, "layers.1.ffn.experts", topology)
    return compile_module(module, fn, parameters, topology, args, (EVERYWHERE,) * 4, EVERYWHERE)


def routing_like(expert: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full((ROWS, K), expert, np.int32), np.full((ROWS, K), 0.5, np.float32)


def exact_routed(x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    model = Reference(CONFIG, TENSORS)
    out = np.zeros(x.shape)
    for t in range(len(x)):
        for expert, weight in zip(ids[t], weights[t], strict=True):
            out[t] += weight * model.expert(x[t].astype(np.float64), f"layers.1.ffn.experts.{expert}")
    return out


def crafted() -> dict[str, np.ndarray]:
    """Expert ids [ROWS, K] worth a test."""
    draw = np.random.default_rng(3)
    distinct = np.stack([draw.permutation(EXPERTS)[:K] for _ in range(ROWS)])
    twice = distinct.copy()
    twice[::2, 2] = twice[::2, 0]
    return {
        "distinct": distinct,
        "some named twice": twice,
        "any": draw.integers(0, EXPERTS, (ROWS, K)),
        "all to the first": np.zeros((ROWS, K), int),
        "all to a middle one": np.full((ROWS, K), 5),
        "all to the last": np.full((ROWS, K), EXPERTS - 1),
        "none in the first half": draw.integers(EXPERTS // 2, EXPERTS, (ROWS, K)),
    }


@FORMS
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3, 2), (4, 2, 2)])
@pytest.mark.parametrize("kind", crafted())
def test_routed_rows_equal_the_loop(form, sizes, kind):
    draw = np.random.default_rng(0)
    ids, x = crafted()[kind].astype(np.int32), draw.standard_normal((ROWS, D)).astype(np.float32)
    weights = draw.uniform(0.1, 1, (ROWS, K)).astype(np.float32)
    weights[0] = 0  # scores that underflowed
    found = np.asarray(routed_step(form, sizes)(x, ids, weights, np.ones(ROWS, bool)))
    np.testing.assert_allclose(found, exact_routed(x, ids, weights), **CLOSE)


@FORMS
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3, 2)])
@pytest.mark.parametrize("junk_id", [-1, 0, EXPERTS - 1, 10**6])
@pytest.mark.parametrize("junk", [np.nan, 1e30, -np.inf])
def test_padding_rows_reach_nobody(form, sizes, junk, junk_id):
    draw = np.random.default_rng(1)
    ids, x = crafted()["some named twice"].astype(np.int32), draw.standard_normal((ROWS, D)).astype(np.float32)
    weights = draw.uniform(0.1, 1, (ROWS, K)).astype(np.float32)
    active = np.arange(ROWS) % 3 != 1
    step = routed_step(form, sizes)
    wanted = np.asarray(step(np.where(active[:, None], x, 0), ids, weights, active))
    dirty_x, dirty_ids, dirty_weights = (
        np.where(active[:, None], a, value) for a, value in ((x, junk), (ids, junk_id), (weights, junk))
    )
    dirty = dirty_x.astype(np.float32), dirty_ids.astype(np.int32), dirty_weights.astype(np.float32)
    found = np.asarray(step(*dirty, active))
    np.testing.assert_array_equal(found[active], wanted[active])
    np.testing.assert_array_equal(found[~active], 0)  # no expert took them
    np.testing.assert_allclose(wanted[active], exact_routed(x, ids, weights)[active], **CLOSE)


@functools.cache
def moe_step(form: str, sizes: tuple[int, int, int], layer: int, width: int = 24) -> Any:
    """A whole MoE sub-layer before the residual: (x, tokens) -> [G, D]."""
    topology, config = Topology(*sizes), {**CONFIG, "moe_intermediate_size": width}
    world = topology.group("world")
    shared = "replicated_local" if width % topology.world else "sharded"
    module = MoE(Config.from_dict(config), layer, topology, jnp.float32, shared)

    def fn(module: Any, x: Any, tokens: Any) -> Any:
        y, routing = module(x, tokens)
        shared = module.shared_apart(x, x, cast(Any, None))  # these forms need no bridge
        y = all_reduce(y, world)
        return (y if shared is None else y + shared), routing

    args = np.zeros((ROWS, D), np.float32), np.zeros(ROWS, np.int32)
    parameters = parameters_of(module, separated(config), f"layers.{layer}.ffn", topology)
    return compile_module(module, fn, parameters, topology, args, (EVERYWHERE,) * 2, EVERYWHERE)


@functools.cache
def separated_tensors(width: int) -> Tensors:
    """Shared experts write channels 0..11 only, routed ones 12..23: what is counted twice cannot hide."""
    tensors = random_tensors({**CONFIG, "moe_intermediate_size": width})
    for name, value in tensors.items():
        if name.endswith("w2.weight"):
            value[slice(D // 2, D) if "shared" in name else slice(0, D // 2)] = 0
    return tensors


def separated(config: dict) -> Tensors:
    return separated_tensors(config["moe_intermediate_size"])


def check_moe(step: Any, layer: int, width: int = 24) -> None:
    config = {**CONFIG, "moe_intermediate_size": width}
    draw = np.random.default_rng(2)
    x, tokens = draw.standard_normal((ROWS, D)).astype(np.float32), draw.integers(0, 61, ROWS).astype(np.int32)
    active = np.arange(ROWS) % 4 != 2
    dirty_x, dirty_tokens = np.where(active[:, None], x, np.nan), np.where(active, tokens, -1)
    found, routing = step(dirty_x.astype(np.float32), dirty_tokens.astype(np.int32))
    model = Reference(config, separated(config))
    for t in np.flatnonzero(active):
        wide = x[t].astype(np.float64)
        assert np.asarray(routing.ids)[t].tolist() == model.route(wide, tokens[t], layer)[0]
        np.testing.assert_allclose(np.asarray(found)[t], model.moe(wide, tokens[t], layer), **CLOSE)


@pytest.mark.parametrize("layer", [0, 1], ids=["hash", "score"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_addend_is_summed_once_on_every_mesh(sizes, layer):
    check_moe(moe_step("as it comes", sizes, layer), layer)


@pytest.mark.parametrize("form", ["grouped"])
@pytest.mark.parametrize("sizes", [(2, 3, 2), (4, 2, 2)], ids=str)
def test_every_addend_of_the_grouped_form_is_summed_once(form, sizes):
    check_moe(moe_step(form, sizes, 1), 1)


@pytest.mark.parametrize(
    ("sizes", "width"), [((2, 2, 2), 50), ((2, 3, 2), 33), ((4, 2, 4), 20), ((2, 2, 4), 27)], ids=str
)
def test_a_shared_expert_that_the_world_does_not_divide_is_added_once(sizes, width):
    check_moe(moe_step("as it comes", sizes, 1, width), 1, width)


@pytest.mark.parametrize(
    ("gate", "up", "wanted"),
    [
        (12, -12, -99.9955),  # both limits: silu(10) * -10
        (12, 12, 99.9955),
        (12, 3, 29.9986),
        (2, -12, -17.6159),
        (-12, 12, -12 / (1 + np.exp(12)) * 10),  # the gate is not clipped from below
        (-12, -1, 12 / (1 + np.exp(12))),
        (-200, 1, 0),
        (3, -4, 3 / (1 + np.exp(-3)) * -4),
    ],
)
def test_the_limit_is_not_symmetric(gate, up, wanted):
    assert float(gated(jnp.float32(gate), jnp.float32(up), 10.0)) == pytest.approx(wanted, rel=1e-5, abs=1e-30)


@FORMS
@pytest.mark.parametrize(("gate", "up"), [(12.0, -12.0), (-12.0, 12.0), (3.0, 30.0)])
def test_the_limit_holds_on_both_paths(form, gate, up):
    """x = e0, so w1's and w3's column 0 are the gates and ups of all experts, the shared one included."""
    tensors = dict(TENSORS)
    for name in tensors:
        if name.startswith("layers.1.ffn.") and name.endswith(("w1.weight", "w3.weight")):
            tensors[name] = np.zeros((24, D), np.float32)
            tensors[name][:, 0] = gate if "w1" in name else up
    topology = Topology(1, 1)
    module = MoE(Config.from_dict(CONFIG), 1, topology, jnp.float32, "sharded")

    def fn(module: Any, x: Any, tokens: Any) -> Any:
        return all_reduce(module(x, tokens)[0], topology.group("world"))

    x, parameters = np.eye(2, D, dtype=np.float32), parameters_of(module, tensors, "layers.1.ffn", topology)
    args = x, np.zeros(2, np.int32)
    found = np.asarray(compile_module(module, fn, parameters, topology, args, (EVERYWHERE,) * 2, EVERYWHERE)(*args))
    ids, weights = Reference(CONFIG, tensors).route(x[0], 0, 1)
    hidden = silu(min(gate, 10.0)) * np.clip(up, -10, 10)
    names = [(f"layers.1.ffn.experts.{e}", w) for e, w in zip(ids, weights, strict=True)]
    names.append(("layers.1.ffn.shared_experts", 1.0))
    wanted = sum(w * hidden * tensors[f"{name}.w2.weight"].astype(np.float64).sum(axis=1) for name, w in names)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=1e-6 * abs(hidden))


FLASH = dict(hidden_size=4096, n_routed_experts=256, moe_intermediate_size=2048, num_experts_per_tok=6)
PRO = dict(hidden_size=7168, n_routed_experts=384, moe_intermediate_size=3072, num_experts_per_tok=6)


def equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def matmul_work(config: dict, topology: Topology, rows: int) -> tuple[int, int]:
    """Multiply-adds of one rank's routed experts, traced with abstract weights: of one block, and outside the loop."""
    module = Experts(Config.from_dict(config), topology, jnp.bfloat16)
    world, k = topology.group("world"), config["num_experts_per_tok"]
    graph, state = nnx.split(module)

    def fn(weights: Any, x: Any, ids: Any, gates: Any, active: Any) -> Any:
        y = nnx.merge(graph, weights)(x, Routing(ids, gates), active)
        return all_reduce(declare_partial(y, world), world)

    row = [((config["hidden_size"],), "bfloat16"), ((k,), "int32"), ((k,), "float32"), ((), "bool")]
    args = [jax.ShapeDtypeStruct((rows, *shape), dtype) for shape, dtype in row]
    specs = jax.tree.map(lambda v: v.get_metadata()["spec"], state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    mapped = jax.shard_map(fn, mesh=topology.mesh, in_specs=(specs, *(EVERYWHERE,) * 4), out_specs=EVERYWHERE)
    traced = jax.make_jaxpr(cast(Any, mapped))(state, *args)
    loops = [eqn for eqn in equations(traced.jaxpr) if eqn.primitive.name == "while"]
    inside = sum(products(eqn) for loop in loops for eqn in equations(loop.params["body_jaxpr"].jaxpr))
    return inside, sum(map(products, equations(traced.jaxpr))) - inside


def products(eqn: Any) -> int:
    """Multiply-adds of a matmul, or of the sum over products [out, in] that stands for one with a single row."""
    name, sizes = eqn.primitive.name, [getattr(v.aval, "shape", ()) for v in eqn.invars]
    if name == "dot_general":
        contracted = eqn.params["dimension_numbers"][0][0]
        return int(np.prod(eqn.outvars[0].aval.shape) * np.prod([sizes[0][d] for d in contracted]))
    assert "dot" not in name and "conv" not in name.removeprefix("convert")
    return int(np.prod(sizes[0])) if name == "reduce_sum" and len(sizes[0]) == 2 else 0


@pytest.mark.parametrize("rows", [8 * 1, 8 * 8, 8 * 64])
@pytest.mark.parametrize(("attn", "ep"), [((8, 1), 8), ((4, 2), 8), ((4, 2), 4), ((1, 8), 2)], ids=str)
@pytest.mark.parametrize("model", [FLASH, PRO], ids=["flash", "pro"])
def test_work_at_the_published_shapes_follows_the_routed_rows(model, attn, ep, rows):
    """Any load is computed in blocks that the experts really have; an even one costs at most 1.5 times its rows."""
    block, outside = matmul_work(published(**model), Topology(attn[0], attn[1], ep), rows)
    local, width = model["n_routed_experts"] // ep, model["moe_intermediate_size"] // (8 // ep)
    size = block_rows(rows * 6 / model["n_routed_experts"])
    assert (block, outside) == (3 * size * model["hidden_size"] * width, 0)
    assert rows * 6 / ep <= size * blocks_at_even_load(rows * 6 / ep, local, size) <= 1.5 * rows * 6 / ep


def test_a_rank_with_few_experts_multiplies_routed_rows_too():
    """32 experts over 8 ranks: every row may choose all 4 local ones, but at even load 1.5 rows of 8 choose each."""
    block, outside = matmul_work(published(**{**FLASH, "n_routed_experts": 32}), Topology(8, 1), 8)
    assert (block, outside) == (3 * 1 * 4096 * 2048, 0)


def test_at_tiny_shapes_each_weight_is_read_once():
    assert matmul_work(CONFIG, Topology(2, 3, 2), 8) == (0, 3 * 8 * 6 * 24 * 8)


def test_blocks_hold_every_row_and_little_more():
    sizes = [block_rows(rows) for rows in (0.25, 1, 2.99, 3, 4, 5, 8, 16, 32, 2048)]
    assert sizes == [1, 1, 1, 4, 6, 7, 8, 24, 48, 512]
    for rows, local, size, wanted in (
        (6, 24, 1, 6),
        (6, 24, 8, 6),
        (384, 24, 24, 24),
        (385, 24, 16, 25),
        (0.5, 4, 1, 1),
    ):
        assert blocks_at_even_load(rows, local, size) == wanted


@pytest.mark.parametrize("form", ["grouped", "row by row"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)])
def test_rows_of_each_expert_go_through_it_and_no_other(form, sizes):
    """Low latency: counts 0..C with blocks of 3 over C = 7, so that last blocks are moved back over finished rows."""
    topology, capacity = Topology(*sizes), 7
    moe_tp, by_expert = topology.group("moe_tp"), P(topology.group("moe_ep") or None)
    module = Experts(Config.from_dict(CONFIG), topology, jnp.float32)

    def fn(module: Any, x: Any, counts: Any) -> Any:
        y = module.on(ReceivedPerExpert(x, counts[:, None], counts))
        return all_reduce(declare_partial(y, moe_tp), moe_tp) if moe_tp else y

    counts = np.array([0, 7, 1, 3, 4, 2, 5, 6, 7, 0, 3, 1], np.int32)
    x = np.random.default_rng(5).standard_normal((EXPERTS, capacity, D)).astype(np.float32)
    real = np.arange(capacity) < counts[:, None]
    x = np.where(real[..., None], x, np.nan).astype(np.float32)
    parameters = parameters_of(module, TENSORS, "layers.1.ffn.experts", topology)
    step = compile_module(module, fn, parameters, topology, (x, counts), (by_expert,) * 2, by_expert)
    found, model = np.asarray(step(x, counts)), Reference(CONFIG, TENSORS)
    for e in range(EXPERTS):
        wanted = [model.expert(row.astype(np.float64), f"layers.1.ffn.experts.{e}") for row in x[e, : counts[e]]]
        np.testing.assert_allclose(found[e, : counts[e]], np.reshape(wanted, (counts[e], D)), **CLOSE)

"""Token rows per attention replica: how many, aligned to what, padded how, and where they lie among all rows.

Integers only; nothing is sent. The functions on arrays take NumPy (host) and JAX (traced) counts alike, so that both
agree. Sources: communication semantics, section 3; SGLang's `DpPaddingMode` and `prepare_mlp_sync_batch`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll.routing import check_numbered
from jaxcoll.whole import whole_number

Mode = Literal["max_len", "sum_len"]
GatherMode = Literal["gather_v", "sum_len", "max_len"]
A2A = Literal[
    "none", "deepep", "deepep_v2", "mooncake", "nixl", "mori", "pplx", "ascend_fuseep", "flashinfer", "megamoe"
]
Graph = Literal["none", "decode", "prefill"]


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """What else the padding rule reads of a step; every rank must hold the same.

    Attributes:
        extend_in_batch: some replica extends (prefills) in this step.
        a2a: SGLang's all-to-all backend; "none" exchanges rows by gather and combine.
        deepep_v2_force_max_len: SGLANG_DEEPEP_V2_FORCE_MAX_LEN.
        hybrid_ssm: the model mixes attention with state-space layers.
        elastic: experts live on a world that may grow or shrink between steps.
        graph: which captured graph the step replays; "prefill" when a coordinated prefill step fits a captured bucket.
        decode_graph_mode: how decode graphs are captured; "sum_len" only under SGLANG_USE_ROCM700A.
    """

    extend_in_batch: bool = False
    a2a: A2A = "none"
    deepep_v2_force_max_len: bool = False
    hybrid_ssm: bool = False
    elastic: bool = False
    graph: Graph = "none"
    decode_graph_mode: Mode = "max_len"

    def __post_init__(self):
        _one_of("a2a", self.a2a, get_args(A2A))
        _one_of("graph", self.graph, get_args(Graph))
        _one_of("decode_graph_mode", self.decode_graph_mode, get_args(Mode))
        for name in ("extend_in_batch", "deepep_v2_force_max_len", "hybrid_ssm", "elastic"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The static shapes that one compiled program serves; counts are its data.

    Attributes:
        mode: padding mode.
        rows: M, rows that every replica holds, real or not.
        total: G, rows of the buffer that holds all replicas' rows.
    """

    mode: Mode
    rows: int
    total: int


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """Where every replica's rows lie in one step; the same on every rank.

    Attributes:
        counts: [attn_dp] real rows per replica.
        aligned: [attn_dp] counts rounded up to a multiple of attn_tp.
        mode: "max_len" gives every replica a slot of `rows` rows, "sum_len" one of its aligned count.
        reason: why this mode, in one sentence.
        rows: M, rows that every replica holds, real or not.
        total: G, rows of the buffer that holds all replicas' rows; at least the end of the last slot.
        starts: [attn_dp] the first row of every replica's slot in that buffer.
    """

    counts: tuple[int, ...]
    aligned: tuple[int, ...]
    mode: Mode
    reason: str
    rows: int
    total: int
    starts: tuple[int, ...]

    @property
    def bucket(self) -> Bucket:
        """The compiled program that runs this step."""
        return Bucket(self.mode, self.rows, self.total)

    @property
    def everyone_is_idle(self) -> bool:
        """No replica holds a row, so no rank runs; otherwise the idle ones take part in every collective."""
        return self.total == 0


def aligned_counts[C: (np.ndarray, jax.Array)](counts: C, attn_tp: int) -> C:
    """Rounds counts up to multiples of attn_tp, so that every rank of a replica can hold an equal chunk."""
    return counts + (-counts) % attn_tp


def slots[C: (np.ndarray, jax.Array)](counts: C, mode: GatherMode, *, attn_tp: int, rows: int) -> tuple[C, C]:
    """Sizes and first rows of the replicas' slots in the buffer of all rows.

    Args:
        counts: [attn_dp] real rows per replica.
        mode: "max_len": equal slots of `rows`; "sum_len" and "gather_v": the aligned counts.
        attn_tp: ranks of one replica.
        rows: M, rows that every replica holds.

    Returns:
        sizes, starts: [attn_dp] each; starts are the exclusive prefix sums of the sizes.
    """
    _one_of("mode", mode, get_args(GatherMode))
    xp = _array_module(counts)
    sizes = xp.full_like(counts, rows) if mode == "max_len" else aligned_counts(counts, attn_tp)
    return sizes, xp.cumsum(sizes, dtype=sizes.dtype) - sizes


def real_rows[C: (np.ndarray, jax.Array)](counts: C, mode: GatherMode, *, attn_tp: int, rows: int, total: int) -> C:
    """[total] bool: which rows of the buffer are real; the rest pads a slot or follows the last one.

    Args:
        counts, mode, attn_tp, rows: as for `slots`.
        total: G, rows of the buffer.
    """
    xp = _array_module(counts)
    _, starts = slots(counts, mode, attn_tp=attn_tp, rows=rows)
    row = xp.arange(total)[:, None]
    return xp.any((row >= starts) & (row < starts + counts), axis=1)


def bucket_rows(count: int, attn_tp: int) -> int:
    """The smallest attn_tp * 2^k that holds `count` rows; 0 for none."""
    chunks = -(-count // attn_tp)
    return attn_tp * (1 << (chunks - 1).bit_length()) if chunks else 0


def padding_mode(aligned: Sequence[int], facts: StepFacts | None = None) -> tuple[Mode, str]:
    """The padding mode by SGLang's rules, with the reason; the first rule that matches decides.

    Args:
        aligned: aligned counts of all replicas.
        facts: what else the rules read; None is a plain decode step.

    Source: communication semantics, section 3 (releases 0.5.20 and 0.5.21; a later release's rule for steps that fit
    its own all-reduce kernel has no meaning here).
    """
    facts = facts or StepFacts()
    return _by_overrides(aligned, facts) or _by_backend(facts) or _by_extend(aligned, facts) or _by_size(aligned)


def plan_rows(
    counts: Sequence[int],
    attn_tp: int = 1,
    *,
    mode: Mode | None = None,
    facts: StepFacts | None = None,
    bucketed: bool = False,
) -> RowPlan:
    """Plans one step's rows from every replica's count.

    Args:
        counts: real rows per replica.
        attn_tp: ranks of one replica.
        mode: overrides the padding rule.
        facts: what else the padding rule reads.
        bucketed: rounds M and G up to buckets, so that few programs serve all counts; off, they are exact.

    Raises:
        ValueError: no replica, a negative or fractional count, an unknown mode, or attn_tp below 1.
        PlanError: more rows than 32 bits number.
    """
    real = whole_counts(counts)
    attn_tp = whole_number("attn_tp", attn_tp)
    check_numbered("a replica", max(real))
    aligned = aligned_counts(np.array(real), attn_tp)
    if mode is not None:
        _one_of("mode", mode, get_args(Mode))
    chosen, reason = (mode, f"{mode} was asked for") if mode else padding_mode(aligned.tolist(), facts)
    if not any(real):
        reason = "every replica is idle, so nobody runs"
    rows = int(aligned.max())
    rows = bucket_rows(rows, attn_tp) if bucketed else rows
    total = len(real) * rows
    if chosen == "sum_len":
        held = int(aligned.sum())
        total = min(total, bucket_rows(held, attn_tp)) if bucketed else held
    check_numbered("a step", total)
    _, starts = slots(np.array(real), chosen, attn_tp=attn_tp, rows=rows)
    return RowPlan(real, tuple(aligned.tolist()), chosen, reason, rows, total, tuple(starts.tolist()))


def _by_overrides(aligned: Sequence[int], facts: StepFacts) -> tuple[Mode, str] | None:
    if facts.graph == "decode":
        return facts.decode_graph_mode, f"decode graphs are captured with {facts.decode_graph_mode}"
    if facts.graph == "prefill":
        return "max_len", "the coordinated prefill step fits a captured bucket, which has equal slots"
    if facts.elastic and len(set(aligned)) > 1:
        return "sum_len", "an elastic world with unequal counts gathers true counts"
    return None


def _by_backend(facts: StepFacts) -> tuple[Mode, str] | None:
    if facts.a2a == "pplx":
        return "max_len", "pplx's kernel is symmetric: a rank without rows would leave its peers waiting"
    if facts.a2a == "deepep_v2" and facts.deepep_v2_force_max_len:
        return "max_len", "deepep_v2 is told to use equal slots"
    return None


def _by_extend(aligned: Sequence[int], facts: StepFacts) -> tuple[Mode, str] | None:
    if not facts.extend_in_batch or len(aligned) == 1:
        return None
    if facts.hybrid_ssm and 0 in aligned:
        return "max_len", "a replica extends, but the hybrid state-space model has an idle replica that needs rows"
    return "sum_len", "a replica extends, so counts differ too much for equal slots"


def _by_size(aligned: Sequence[int]) -> tuple[Mode, str]:
    twice, equal = 2 * sum(aligned), len(aligned) * max(aligned)
    if twice >= equal:
        return "max_len", f"equal slots at most double the rows: 2*{sum(aligned)} >= {equal}"
    return "sum_len", f"equal slots would more than double the rows: 2*{sum(aligned)} < {equal}"


def _array_module(counts: np.ndarray | jax.Array) -> Any:
    return jnp if isinstance(counts, jax.Array) else np


def whole_counts(counts: Sequence[int], name: str = "counts") -> tuple[int, ...]:
    """Counts as Python's own integers.

    Raises:
        ValueError: they are no whole numbers, negative, or none at all.
    """
    try:
        whole = tuple(operator.index(c) for c in counts)
    except TypeError:
        whole = ()
    if not whole or min(whole) < 0:
        given = list(counts) if isinstance(counts, Iterable) else counts
        raise ValueError(f"{name} must be whole numbers of at least 0, one per replica, not {given}")
    return whole


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"unknown {name} {value!r}; allowed are {', '.join(allowed)}")

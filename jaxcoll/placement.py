"""Where experts live, as data: physical slots on the ranks, each holding one logical expert, some experts twice.

A placement is made on the host, before anything is compiled. Routing is in logical ids; `to_physical` picks, per row,
which copy serves it, so that every (row, expert) is computed exactly once. Source: SGLang's expert location metadata.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoll.routing import named_experts

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Placement:
    """A map from physical to logical experts.

    Attributes:
        physical_to_logical: P logical ids; rank r of `ranks` holds the slots [r*P/ranks, (r+1)*P/ranks).
        num_logical: E; every one of them is held at least once.
        ranks: ranks of moe_ep.

    Raises:
        ValueError: P is no multiple of `ranks`, an id is no whole number in 0..E-1, an expert is held nowhere, E is 0.
    """

    physical_to_logical: tuple[int, ...]
    num_logical: int
    ranks: int

    def __post_init__(self):
        try:
            ids = tuple(map(operator.index, self.physical_to_logical))  # also of a list or an array
        except TypeError:
            raise ValueError(f"a placement names experts by whole numbers, not {self.physical_to_logical}") from None
        object.__setattr__(self, "physical_to_logical", ids)
        if self.num_logical < 1:
            raise ValueError(f"a placement is of at least one expert, not {self.num_logical}")
        held = np.asarray(ids, np.int64)
        if self.ranks < 1 or len(held) % self.ranks:
            raise ValueError(f"{len(held)} physical experts cannot be cut into {self.ranks} equal parts")
        strange = held[(held < 0) | (held >= self.num_logical)]
        if strange.size:
            raise ValueError(f"the placement names expert {strange[0]}; experts are 0..{self.num_logical - 1}")
        missing = np.setdiff1d(np.arange(self.num_logical), held)
        if missing.size:
            raise ValueError(f"the placement holds no copy of expert {missing[0]}")

    @property
    def num_physical(self) -> int:
        """P: what `dispatch` takes as its number of experts."""
        return len(self.physical_to_logical)

    @property
    def slots_per_rank(self) -> int:
        return self.num_physical // self.ranks

    @property
    def is_identity(self) -> bool:
        """Every expert is held once, in order: physical ids are logical ids."""
        return self.physical_to_logical == tuple(range(self.num_logical))

    def copies(self) -> np.ndarray:
        """[E] int64, how often each expert is held."""
        return np.bincount(self.physical_to_logical, minlength=self.num_logical)

    def replicas(self) -> np.ndarray:
        """[E, most copies] int32, the physical experts of each logical one in order; -1 after the last."""
        copies = self.copies()
        table = np.full((self.num_logical, int(copies.max())), -1, np.int32)
        for logical in range(self.num_logical):
            table[logical, : copies[logical]] = np.flatnonzero(np.equal(self.physical_to_logical, logical))
        return table


def place_experts(
    num_experts: int, ranks: int, *, redundant: int = 0, pad: bool = False, load: Sequence[float] | None = None
) -> Placement:
    """Places experts in order, with redundant copies of the most loaded ones.

    Rank r holds a contiguous block of the experts, the first ranks one more where they do not divide, and then its
    share of the copies. Each copy goes to the expert that has the highest load per copy, on a rank that does not hold
    it yet where there is one with room.

    Args:
        num_experts: E.
        ranks: ranks of moe_ep.
        redundant: copies beyond the first of every expert.
        pad: adds as few copies as make the sum a multiple of `ranks`; off, another sum is refused.
        load: [E] how much work each expert gets; default equal.

    Raises:
        ValueError: E + redundant is no multiple of `ranks`, a size is below 1, or the load is not E numbers from 0 on.
    """
    if num_experts < 1 or ranks < 1 or redundant < 0:
        given = f"{num_experts}, {ranks} and {redundant}"
        raise ValueError(f"experts and ranks must be at least 1 and redundant copies at least 0, not {given}")
    missing = -(num_experts + redundant) % ranks
    if missing and not pad:
        raise ValueError(
            f"{num_experts} experts and {redundant} redundant copies cannot be cut into {ranks} equal parts; "
            f"{missing} more copies would make {num_experts + redundant + missing}"
        )
    loads = _checked_load(load, num_experts)
    total = num_experts + redundant + missing
    room = total // ranks
    blocks: list[list[int]] = [b.tolist() for b in np.array_split(np.arange(num_experts), ranks)]
    copies = np.ones(num_experts, np.int64)
    for _ in range(total - num_experts):
        expert, rank = _next_copy(loads / copies, blocks, room)
        blocks[rank].append(expert)
        copies[expert] += 1
    return Placement(tuple(expert for block in blocks for expert in block), num_experts, ranks)


def to_physical(topk_ids: Array, placement: Placement, first_row: Array | int = 0) -> Array:
    """Which physical expert serves each choice.

    A row's number picks the copy, so copies share the rows evenly, an expert named twice by a row is served once, and
    every rank that holds the row picks alike.

    Args:
        topk_ids: [T, K] integers: logical ids; outside 0..E-1 is nobody.
        placement: where the experts live.
        first_row: number of row 0 among those of all ranks, so that ranks with few rows do not all pick first copies.

    Returns:
        [T, K] int32 physical ids, -1 for nobody.

    Raises:
        ValueError: the ids are no [T, K] integers.
    """
    ids = named_experts(topk_ids, placement.num_logical)
    if placement.is_identity:
        return ids
    logical = jnp.maximum(ids, 0)
    replicas, copies = jnp.asarray(placement.replicas()), jnp.asarray(placement.copies(), jnp.int32)
    row = first_row + jnp.arange(topk_ids.shape[0], dtype=jnp.int32)[:, None]
    return jnp.where(ids >= 0, replicas[logical, row % copies[logical]], -1)


def _checked_load(load: Sequence[float] | None, num_experts: int) -> np.ndarray:
    loads = np.ones(num_experts) if load is None else np.asarray(load, np.float64)
    if loads.shape != (num_experts,) or not (loads >= 0).all():
        raise ValueError(f"load must be {num_experts} numbers of at least 0, one per expert")
    return loads


def _next_copy(load_per_copy: np.ndarray, blocks: list[list[int]], room: int) -> tuple[int, int]:
    """The most loaded expert that some rank with room does not hold, and the emptiest such rank.

    Where every rank with room holds every expert, the most loaded expert and the emptiest rank.
    """
    ranks = sorted((r for r in range(len(blocks)) if len(blocks[r]) < room), key=lambda r: len(blocks[r]))
    for expert in np.argsort(-load_per_copy, kind="stable"):
        for rank in ranks:
            if expert not in blocks[rank]:
                return int(expert), rank
    return int(np.argmax(load_per_copy)), ranks[0]

"""Combining expert rows as a Pallas Mosaic-GPU kernel: each named row is loaded once and summed in registers.

A persistent grid of blocks, one warpgroup each, goes over the tokens with one SMEM buffer for each k:

    TMA          load row 0 of token i+1 | load row 1 of token i+1 | ...
    warpgroup    add row 0 of token i    | add row 1 of token i    | ... round, store token i

A row that is not named (-1) is neither loaded nor waited for. Rows are those of one device; XLA's collectives carry
them between devices.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.choice import TILE
from pallas_kernels.launch import SMEM_PER_BLOCK, THREADS, grid_size, start, tiled


def combine_rows(
    rows: jax.Array, index: jax.Array, weights: jax.Array | None, *, cores: int, interpret: bool = False
) -> jax.Array:
    """`moe_combine.combine_rows` on a GPU, for at least one row, one token and one k.

    Bytes moved, the least possible where `column_pieces` is 1 (bfloat16 at the published shapes): each named row
    once (D channels), the result once (T*D channels), the tables once (T*K*4 bytes, and as many for weights). A
    token cut into c pieces reads its K entries c times, which the L2 holds.
    """
    (tokens, fanout), width = index.shape, rows.shape[1]
    pieces = column_pieces(width, fanout, rows.dtype.itemsize)
    piece = (width // TILE // pieces, TILE)
    work = _Work(tokens, fanout, len(rows), pieces, piece, _layout(piece, rows.dtype.itemsize))

    def body(rows_gmem, index_gmem, *refs):
        weights_gmem = refs[0] if weights is not None else None
        out_gmem, rows_smem, out_smem, loaded = refs[-4:]
        _Refs(rows_gmem, index_gmem, weights_gmem, out_gmem, rows_smem, out_smem, loaded).go_over(work)

    tables = [index.reshape(-1)] + ([weights.reshape(-1)] if weights is not None else [])
    (out,) = start(
        body,
        "moe_combine_rows" if weights is not None else "moe_combine_rows_unweighted",
        [tiled(rows), *tables],
        [((tokens, width // TILE, TILE), rows.dtype)],
        blocks=grid_size(tokens * pieces, cores),
        scratch=[
            plgpu.SMEM((fanout, *piece), rows.dtype),
            plgpu.SMEM(piece, rows.dtype),
            plgpu.Barrier(num_barriers=fanout),
        ],
        interpret=interpret,
    )
    return out.reshape(tokens, width)


def column_pieces(width: int, fanout: int, itemsize: int) -> int:
    """Into how many equal pieces rows are cut, so that `fanout` of them and a result fit a block's share of SMEM."""
    tiles = width // TILE
    return next(
        pieces
        for pieces in range(1, tiles + 1)
        if tiles % pieces == 0 and (fanout + 1) * width // pieces * itemsize <= SMEM_PER_BLOCK
    )


@dataclasses.dataclass(frozen=True)
class _Work:
    """Unit u is piece u % pieces of token u // pieces; a block takes every `blocks`-th unit from its own number on.

    Attributes:
        tokens, fanout, rows: T, K and R.
        pieces, piece: pieces of a row, and the shape of one in tiles.
        layout: how the 128 threads share a piece.
    """

    tokens: int
    fanout: int
    rows: int
    pieces: int
    piece: tuple[int, int]
    layout: Any

    def steps(self) -> jax.Array:
        block, blocks = lax.axis_index("block"), lax.axis_size("block")
        return lax.div(self.tokens * self.pieces - block + blocks - 1, blocks)

    def place(self, step: jax.Array) -> tuple[jax.Array, Any]:
        """The step's token and columns."""
        unit = lax.axis_index("block") + step * lax.axis_size("block")
        return lax.div(unit, self.pieces), pl.ds(lax.rem(unit, self.pieces) * self.piece[0], self.piece[0])


# A token's row numbers, whether each is named, and its weights (none in the unweighted variant).
_Entries = tuple[list[jax.Array], list[jax.Array], list[jax.Array]]


@dataclasses.dataclass(frozen=True)
class _Refs:
    """The kernel's memory: device arrays, SMEM buffers [K, piece] and [piece], and a barrier for each k."""

    rows_gmem: Any
    index_gmem: Any
    weights_gmem: Any
    out_gmem: Any
    rows_smem: Any
    out_smem: Any
    loaded: Any

    def go_over(self, work: _Work) -> None:
        """This block's units. Its stores have ended when it returns: SMEM must outlive them."""
        first = self.entries(work, jnp.int32(0))
        for k in range(work.fanout):
            self.load(work, jnp.int32(0), k, first)
        lax.fori_loop(0, work.steps(), lambda step, now: self.one_step(work, step, now), first)
        plgpu.wait_smem_to_gmem(0)

    def one_step(self, work: _Work, step: jax.Array, now: _Entries) -> _Entries:
        """Sums and stores the step's unit, whose loads are under way, and starts the next one's loads."""
        soon = self.entries(work, step + 1)  # read early, so that the latency hides behind the sums
        _, named, weights = now
        total = plgpu.layout_cast(jnp.zeros(work.piece, jnp.float32), work.layout)
        for k in range(work.fanout):
            weight = weights[k] if weights else None
            total = lax.cond(named[k], lambda t, k=k, w=weight: self.add(work, t, k, w), lambda t: t, total)
            self.load(work, step + 1, k, soon)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last result has been read out of SMEM
        self.out_smem[...] = total.astype(self.out_smem.dtype)
        plgpu.commit_smem()
        token, columns = work.place(step)
        plgpu.copy_smem_to_gmem(self.out_smem, self.out_gmem.at[token, columns])
        return soon

    def entries(self, work: _Work, step: jax.Array) -> _Entries:
        """The entries of the step's token; after the last step none is named."""
        steps = work.steps()
        token, _ = work.place(jnp.minimum(step, steps - 1))
        at = [token * work.fanout + k for k in range(work.fanout)]
        rows = [self.index_gmem[i] for i in at]
        named = [(row >= 0) & (row < work.rows) & (step < steps) for row in rows]
        return rows, named, [self.weights_gmem[i] for i in at] if self.weights_gmem is not None else []

    def load(self, work: _Work, step: jax.Array, k: int, entries: _Entries) -> None:
        rows, named, _ = entries
        source = self.rows_gmem.at[rows[k], work.place(step)[1]]
        pl.when(named[k])(lambda: plgpu.copy_gmem_to_smem(source, self.rows_smem.at[k], self.loaded.at[k]))

    def add(self, work: _Work, total: jax.Array, k: int, weight: jax.Array | None) -> jax.Array:
        plgpu.barrier_wait(self.loaded.at[k])  # buffer k holds the unit's k-th row, the last one loaded there
        row = plgpu.load(self.rows_smem.at[k], layout=work.layout).astype(jnp.float32)
        plgpu.commit_smem()  # every thread has it in registers: the buffer may be loaded again
        return total + (row if weight is None else row * weight)


def _layout(piece: tuple[int, int], itemsize: int) -> Any:
    """Threads take turns at vectors of up to 16 bytes, the most that one SMEM instruction moves."""
    vector = math.gcd(math.prod(piece) // THREADS, 16 // itemsize)
    return plgpu.Layout.WG_STRIDED(piece, vec_size=vector)

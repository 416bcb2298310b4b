"""Dispatch packing as Pallas Mosaic-GPU kernels: each row is read once and stored to every slot that names it.

A persistent grid of blocks, one warpgroup each, goes over the rows with a ring of SMEM buffers:

    TMA          load row i+3 | load row i+4 | ...
    warpgroup    wait row i, (quantise it,) store it to its slots, store zeros to the empty slots it looks after

Only tables are prepared outside: `filled`, one int32 a slot. Without fp8 no thread touches a channel. Rows and
slots are those of one device; XLA's collectives carry them between devices.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.choice import TILE
from pallas_kernels.launch import THREADS, grid_size, start, tiled
from pallas_kernels.moe_dispatch.quantize import GROUP, ScaleKind, group_scales, quantize

FP8 = jnp.float8_e4m3fn
BYTES_IN_FLIGHT = 64 * 1024  # of rows being loaded by a block: with two blocks a core, above what latency needs
MAX_BUFFERS = 8
EMPTY_SLOTS_PER_UNIT = 8  # slots that a block looks at together for ones that nobody names
# The interpreter counts copies where a GPU counts groups of them, so that a step that stores nothing is not counted:
# there a step waits for all stores. A test sets it to one step's copies, for tables where all steps store alike.
INTERPRETED_COPIES_IN_FLIGHT = 0
SCALES_ALIGNMENT = 4  # float32 scales of a row: bulk stores take multiples of 16 bytes

# (step, buffer, [(slot, whether it is one)]) and (slot, whether it is empty)
_Pack = Callable[[jax.Array, jax.Array, list[tuple[jax.Array, jax.Array]]], None]
_Clear = Callable[[jax.Array, jax.Array], None]


def dispatch_rows(x: jax.Array, slots: jax.Array, num_slots: int, *, cores: int, interpret: bool = False) -> jax.Array:
    """`moe_dispatch.dispatch_rows` on a GPU, for at least one row, one slot and a fanout of one.

    Bytes moved, the least possible: x once (T*D channels), the result once (num_slots*D channels), the table of
    slots once (T*P*4 bytes), and `filled` once (num_slots*4 bytes).
    """
    row = (x.shape[1] // TILE, TILE)
    row_bytes = x.shape[1] * x.dtype.itemsize
    buffers = max(2, min(MAX_BUFFERS, BYTES_IN_FLIGHT // row_bytes))
    units = _Units(len(x), slots.shape[1], num_slots, buffers, INTERPRETED_COPIES_IN_FLIGHT if interpret else 1)

    def body(x, slots, filled, out_gmem, rows_smem, zeros_smem, loaded):
        def pack(_, buffer, named):
            for slot, is_named in named:
                _store_if(is_named, rows_smem.at[buffer], out_gmem.at[slot])

        def clear(slot, is_empty):
            _store_if(is_empty, zeros_smem, out_gmem.at[slot])

        zeros_smem[...] = jnp.zeros(zeros_smem.shape, zeros_smem.dtype)
        _Ring(x, slots, filled, rows_smem, loaded).go_over(units, pack, clear)

    (out,) = start(
        body,
        "moe_dispatch_rows",
        [tiled(x), slots.reshape(-1), filled_slots(slots, num_slots)],
        [((num_slots, *row), x.dtype)],
        blocks=grid_size(units.count, cores),
        scratch=[plgpu.SMEM((buffers, *row), x.dtype), plgpu.SMEM(row, x.dtype), plgpu.Barrier(num_barriers=buffers)],
        interpret=interpret,
    )
    return out.reshape(num_slots, -1)


def dispatch_rows_fp8(
    x: jax.Array, slots: jax.Array, num_slots: int, scale_kind: ScaleKind, *, cores: int, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """`moe_dispatch.dispatch_rows_fp8` on a GPU, for at least one row, one slot and a fanout of one.

    Each row is quantised once, whatever its fanout. Bytes moved, the least possible: x once (T*D channels), both
    results once (num_slots*D and num_slots*D/128*4 bytes), the table of slots once (T*P*4 bytes), and `filled`
    once (num_slots*4 bytes).
    Where 512 does not divide D, the scales are stored with padding, which XLA cuts off in a pass of its own.
    """
    groups = x.shape[1] // GROUP
    row, scales = (groups, GROUP), -(-groups // SCALES_ALIGNMENT) * SCALES_ALIGNMENT
    buffers = max(2, min(MAX_BUFFERS, BYTES_IN_FLIGHT // (x.shape[1] * x.dtype.itemsize)))
    units = _Units(len(x), slots.shape[1], num_slots, buffers, INTERPRETED_COPIES_IN_FLIGHT if interpret else 1)

    q, s = start(
        _fp8_body(units, scales, scale_kind),
        f"moe_dispatch_rows_fp8_{scale_kind}",
        [x.reshape(len(x), *row), slots.reshape(-1), filled_slots(slots, num_slots)],
        [((num_slots, *row), FP8), ((num_slots, scales), jnp.float32)],
        blocks=grid_size(units.count, cores),
        scratch=[
            plgpu.SMEM((buffers, *row), x.dtype),
            plgpu.SMEM((2, *row), FP8),
            plgpu.SMEM((2, scales), jnp.float32),
            plgpu.SMEM(row, FP8),
            plgpu.SMEM((-(-scales // THREADS) * THREADS,), jnp.float32),  # filled by all threads together
            plgpu.Barrier(num_barriers=buffers),
        ],
        interpret=interpret,
    )
    return q.reshape(num_slots, -1), s[:, :groups]


def filled_slots(slots: jax.Array, num_slots: int) -> jax.Array:
    """[num_slots] 1 where some row names the slot, else 0: two small passes over tables, before the kernel."""
    empty = jnp.zeros((num_slots,), jnp.int32)
    return empty.at[slots.reshape(-1)].set(1, mode="drop", wrap_negative_indices=False)


@dataclasses.dataclass(frozen=True)
class _Units:
    """The work, cut into units: unit u packs row u, if there is one, and clears a few slots if they are empty.

    Attributes:
        rows, fanout, slots: T, P and the number of slots.
        buffers: rows that fit the ring of SMEM buffers.
        in_flight: groups of stores that may still read SMEM when a step ends: its own.
    """

    rows: int
    fanout: int
    slots: int
    buffers: int
    in_flight: int

    @property
    def count(self) -> int:
        return max(self.rows, -(-self.slots // EMPTY_SLOTS_PER_UNIT))

    @property
    def slots_each(self) -> int:
        return -(-self.slots // self.count)

    def named(self, unit: jax.Array, slots_gmem: Any) -> list[tuple[jax.Array, jax.Array]]:
        """The unit's row's entries in the table, and whether each names a slot."""
        entries = [slots_gmem[unit * self.fanout + p] for p in range(self.fanout)]
        return [(slot, (slot >= 0) & (slot < self.slots)) for slot in entries]

    def looked_after(self, unit: jax.Array, filled_gmem: Any) -> list[tuple[jax.Array, jax.Array]]:
        """The slots that the unit looks after, and whether each is empty."""
        slots = [unit * self.slots_each + i for i in range(self.slots_each)]
        filled = [filled_gmem[jnp.minimum(slot, self.slots - 1)] for slot in slots]
        return [(slot, (slot < self.slots) & (full == 0)) for slot, full in zip(slots, filled, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Ring:
    """The kernel's inputs in device memory, and the SMEM buffers that rows go through, with a barrier for each."""

    x_gmem: Any
    slots_gmem: Any
    filled_gmem: Any
    rows_smem: Any
    loaded: Any

    def go_over(self, units: _Units, pack: _Pack, clear: _Clear) -> None:
        """This block's units: every `blocks`-th one from its own number on. All stores have ended when it returns.

        `pack` starts the stores of the row in a buffer to the slots that its table names; `clear` those of zeros.
        """
        block, blocks = lax.axis_index("block"), lax.axis_size("block")
        row_steps = lax.div(units.rows - block + blocks - 1, blocks)
        steps = lax.div(units.count - block + blocks - 1, blocks)

        def row_step(step, _):
            unit, buffer = block + step * blocks, lax.rem(step, units.buffers)
            # Tables are read before the wait, so that their latency hides behind the row's.
            named, looked_after = units.named(unit, self.slots_gmem), units.looked_after(unit, self.filled_gmem)
            plgpu.barrier_wait(self.loaded.at[buffer])  # row `step` is in its buffer, and is the last one loaded there
            pack(step, buffer, named)
            for slot, is_empty in looked_after:
                clear(slot, is_empty)
            plgpu.commit_smem_to_gmem_group()
            # Every step before this one has been read out of SMEM: the buffer of step - 1 may be loaded again.
            plgpu.wait_smem_to_gmem(units.in_flight, wait_read_only=True)
            ahead = step + units.buffers - 1
            pl.when(ahead < row_steps)(lambda: self.load(units, ahead))

        def empty_step(step, _):
            for slot, is_empty in units.looked_after(block + step * blocks, self.filled_gmem):
                clear(slot, is_empty)
            plgpu.commit_smem_to_gmem_group()

        lax.fori_loop(0, jnp.minimum(units.buffers - 1, row_steps), lambda step, _: self.load(units, step), None)
        plgpu.commit_smem()  # the zeros written before this are seen by TMA
        lax.fori_loop(0, row_steps, row_step, None)
        lax.fori_loop(row_steps, steps, empty_step, None)
        plgpu.wait_smem_to_gmem(0)  # SMEM must outlive the stores

    def load(self, units: _Units, step: jax.Array) -> None:
        row, buffer = lax.axis_index("block") + step * lax.axis_size("block"), lax.rem(step, units.buffers)
        plgpu.copy_gmem_to_smem(self.x_gmem.at[row], self.rows_smem.at[buffer], self.loaded.at[buffer])


def _fp8_body(units: _Units, scales: int, scale_kind: ScaleKind) -> Callable[..., None]:
    """The kernel that quantises, with two rows of results in SMEM: one may be stored while the next is made."""

    def body(x, slots, filled, q_gmem, s_gmem, rows_smem, q_smem, s_smem, zero_q, zero_s, loaded):
        def pack(step, buffer, named):
            half = lax.rem(step, 2)
            _quantize_row(rows_smem.at[buffer], q_smem.at[half], s_smem.at[half], scale_kind)
            for slot, is_named in named:
                _store_if(is_named, q_smem.at[half], q_gmem.at[slot])
                _store_if(is_named, s_smem.at[half], s_gmem.at[slot])

        def clear(slot, is_empty):
            _store_if(is_empty, zero_q, q_gmem.at[slot])
            _store_if(is_empty, zero_s.at[pl.ds(0, scales)], s_gmem.at[slot])

        zero_q[...] = jnp.zeros(zero_q.shape, zero_q.dtype)
        zero_s[...] = jnp.zeros(zero_s.shape, zero_s.dtype)
        _Ring(x, slots, filled, rows_smem, loaded).go_over(units, pack, clear)

    return body


def _store_if(condition: jax.Array, row_smem: Any, row_gmem: Any) -> None:
    """Stores one row into its place, as part of the step's group of stores."""
    pl.when(condition)(lambda: plgpu.copy_smem_to_gmem(row_smem, row_gmem, commit_group=False))


def _quantize_row(row_smem: Any, q_smem: Any, scales_smem: Any, scale_kind: ScaleKind) -> None:
    """[G, 128] channels -> e4m3 and [G, ...] scales, seen by TMA at return. The last may be longer than G."""
    groups = row_smem.shape[0]
    layout = _groups_layout(groups)
    channels = plgpu.load(row_smem, layout=layout).astype(jnp.float32)
    scales, inverse = group_scales(jnp.max(jnp.abs(channels), axis=1), scale_kind)
    scales_smem[pl.ds(0, groups)] = scales
    inverse = plgpu.layout_cast(lax.broadcast_in_dim(inverse, channels.shape, (0,)), layout)
    q_smem[...] = quantize(channels, inverse)
    plgpu.commit_smem()


def _groups_layout(groups: int) -> Any:
    """A warp holds a group, four channels a lane; two warps hold copies of it where the groups are no multiple of 4.

    So a group's largest magnitude is found inside a warp, without SMEM.
    """
    together, warps = (4, (-3,)) if groups % 4 == 0 else (2, (plgpu.Replicated(2), -3))
    tiling = plgpu.Tiling(((together, GROUP), (4,)))
    return plgpu.Layout.TILED(tiling, warp_dims=warps, lane_dims=(-2,), vector_dim=-1)

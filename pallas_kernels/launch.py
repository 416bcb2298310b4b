"""What both kernels need around their bodies: views of rows as TMA tiles, grid size, types, interpretation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.choice import TILE

# A Hopper or Blackwell core has 228 KiB of shared memory, 1 KiB of it taken by each block, and 1 KiB is left here
# for barriers and alignment. Two blocks a core: one computes while the other waits.
BLOCKS_PER_CORE = 2
THREADS = 128  # of a block: one warpgroup
SMEM_PER_BLOCK = (228 // BLOCKS_PER_CORE - 2) * 1024


def tiled(rows: jax.Array) -> jax.Array:
    """[N, D] as [N, D / TILE, TILE], which a TMA box can take a row of; a free reshape."""
    return rows.reshape(len(rows), rows.shape[1] // TILE, TILE)


def grid_size(units: int, cores: int) -> int:
    """Blocks of a persistent grid over that many units of work."""
    return min(units, BLOCKS_PER_CORE * cores)


def start(
    body: Callable[..., None],
    name: str,
    operands: list[jax.Array],
    results: list[tuple[tuple[int, ...], Any]],
    *,
    blocks: int,
    scratch: list[Any],
    interpret: bool,
) -> list[jax.Array]:
    """Runs a kernel; `interpret` runs it on the CPU and raises on races.

    Args:
        operands: all varying over the same mesh axes, and the results vary over those too.
        results: shapes and types.
        blocks, scratch: of the grid, and each block's SMEM and barriers.
    """
    # A type like the operands': plgpu.kernel would forget the mesh axes that a jax.ShapeDtypeStruct varies over.
    like = jax.typeof(operands[0])
    kernel = plgpu.kernel(
        body,
        out_type=[like.update(shape=shape, dtype=jnp.dtype(dtype)) for shape, dtype in results],
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        kernel_name=name,
        # Lane semantics: the kernels say the layouts that matter themselves.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else False,
    )
    return list(kernel(*operands))

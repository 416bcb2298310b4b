"""What to measure of combine: the published shapes, with weights (low latency) and without (normal)."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pallas_kernels.case import Case
from pallas_kernels.choice import Device, Kernels
from pallas_kernels.moe_combine.api import combine_rows
from pallas_kernels.moe_combine.shapes import CombineShape
from pallas_kernels.published import Model


def cases(model: Model, tokens: int) -> list[Case]:
    """Combine with weights and without."""
    return [_case(model, tokens, weighted) for weighted in (True, False)]


def _case(model: Model, tokens: int, weighted: bool) -> Case:
    shape = CombineShape.published(model, tokens)

    def function(kernels: Kernels, device: Device) -> Callable[..., Any]:
        def combine(rows: jax.Array, index: jax.Array, weights: jax.Array | None = None) -> jax.Array:
            return combine_rows(rows, index, weights, kernels=kernels, device=device)

        return combine

    def tables() -> tuple[np.ndarray, ...]:
        random = np.random.default_rng(tokens)
        index = random.permutation(shape.rows).reshape(tokens, shape.fanout).astype(np.int32)
        return (index, random.random(index.shape, np.float32)) if weighted else (index,)

    return Case(
        operation="moe_combine" if weighted else "moe_combine unweighted",
        model=model,
        tokens=tokens,
        types=shape.types(weighted=weighted),
        tables=tables,
        function=function,
        floor_bytes=shape.floor_bytes(weighted=weighted),
        # Both add in float32 in one order and round once; a compiler may fuse a multiply and an add.
        largest_error=2.0**-8,
    )

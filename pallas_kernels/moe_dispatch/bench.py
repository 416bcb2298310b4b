"""What to measure of dispatch packing: the published shapes, rows as they are and quantised on the way."""

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import numpy as np

from pallas_kernels.case import Case
from pallas_kernels.choice import Device, Kernels
from pallas_kernels.moe_dispatch.api import dispatch_rows, dispatch_rows_fp8
from pallas_kernels.moe_dispatch.quantize import ScaleKind
from pallas_kernels.moe_dispatch.shapes import DispatchShape
from pallas_kernels.published import Model


def cases(model: Model, tokens: int) -> list[Case]:
    """Dispatch without quantisation, and with either kind of scale."""
    return [_case(model, tokens, None), *(_case(model, tokens, kind) for kind in get_args(ScaleKind))]


def _case(model: Model, tokens: int, scale_kind: ScaleKind | None) -> Case:
    shape = DispatchShape.published(model, tokens)

    def function(kernels: Kernels, device: Device) -> Callable[..., Any]:
        named = {"kernels": kernels, "device": device}
        if scale_kind is None:
            return partial(dispatch_rows, num_slots=shape.num_slots, **named)  # pyright: ignore[reportArgumentType]
        return partial(dispatch_rows_fp8, num_slots=shape.num_slots, scale_kind=scale_kind, **named)  # pyright: ignore[reportArgumentType]

    def tables() -> tuple[np.ndarray, ...]:
        slots = np.random.default_rng(tokens).permutation(shape.num_slots)
        return (slots.reshape(tokens, shape.fanout).astype(np.int32),)

    return Case(
        operation="moe_dispatch" if scale_kind is None else f"moe_dispatch fp8 {scale_kind}",
        model=model,
        tokens=tokens,
        types=shape.types,
        tables=tables,
        function=function,
        floor_bytes=shape.floor_bytes(fp8=scale_kind is not None),
        largest_error=0.0,
    )

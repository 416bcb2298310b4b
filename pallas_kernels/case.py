"""One thing to measure or to compile: an operation at a shape, with arguments and the fewest bytes it can move."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pallas_kernels.choice import Device, Kernels
from pallas_kernels.published import Model


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation at a published shape.

    Attributes:
        operation: such as "moe_dispatch".
        model, tokens: of the shape.
        types: of the arguments.
        tables: integer and weight arguments as NumPy arrays; the first argument, the rows, is random.
        function: the operation by one implementation, for one device.
        floor_bytes: the fewest bytes that it can move.
        largest_error: relative difference allowed between the implementations; 0 is bit-equal.
    """

    operation: str
    model: Model
    tokens: int
    types: tuple[jax.ShapeDtypeStruct, ...]
    tables: Callable[[], tuple[np.ndarray, ...]]
    function: Callable[[Kernels, Device], Callable[..., Any]]
    floor_bytes: int
    largest_error: float

    @property
    def name(self) -> str:
        return f"{self.operation} {self.model} T={self.tokens}"

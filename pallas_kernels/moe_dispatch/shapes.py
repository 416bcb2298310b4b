"""Shapes of dispatch packing at the published models, and the fewest bytes it can move."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.moe_dispatch.quantize import GROUP
from pallas_kernels.published import EXPERTS_PER_TOKEN, WIDTH, Model


@dataclasses.dataclass(frozen=True)
class DispatchShape:
    """T rows of D bfloat16 channels, each sent to P slots; every slot is named."""

    tokens: int
    width: int
    fanout: int

    @classmethod
    def published(cls, model: Model, tokens: int) -> "DispatchShape":
        return cls(tokens, WIDTH[model], EXPERTS_PER_TOKEN)

    @property
    def num_slots(self) -> int:
        return self.tokens * self.fanout

    @property
    def types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of the arguments x and slots."""
        return (
            jax.ShapeDtypeStruct((self.tokens, self.width), jnp.bfloat16),
            jax.ShapeDtypeStruct((self.tokens, self.fanout), jnp.int32),
        )

    def floor_bytes(self, *, fp8: bool) -> int:
        """Each row read once, each result written once, the table of slots and `filled` read once."""
        tables = 4 * self.tokens * self.fanout + 4 * self.num_slots
        read = 2 * self.tokens * self.width
        written = self.num_slots * (self.width + 4 * self.width // GROUP if fp8 else 2 * self.width)
        return read + written + tables

"""Shapes of combine at the published models, and the fewest bytes it can move."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.published import EXPERTS_PER_TOKEN, WIDTH, Model


@dataclasses.dataclass(frozen=True)
class CombineShape:
    """T tokens that each name K of T*K rows of D bfloat16 channels, every row once."""

    tokens: int
    width: int
    fanout: int

    @classmethod
    def published(cls, model: Model, tokens: int) -> "CombineShape":
        return cls(tokens, WIDTH[model], EXPERTS_PER_TOKEN)

    @property
    def rows(self) -> int:
        return self.tokens * self.fanout

    def types(self, *, weighted: bool) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of the arguments rows, index and, if weighted, weights."""
        table = (self.tokens, self.fanout)
        types = [jax.ShapeDtypeStruct((self.rows, self.width), jnp.bfloat16), jax.ShapeDtypeStruct(table, jnp.int32)]
        return (*types, jax.ShapeDtypeStruct(table, jnp.float32)) if weighted else tuple(types)

    def floor_bytes(self, *, weighted: bool) -> int:
        """Each named row read once, each result written once, the tables read once."""
        tables = (2 if weighted else 1) * 4 * self.tokens * self.fanout
        return 2 * self.rows * self.width + 2 * self.tokens * self.width + tables

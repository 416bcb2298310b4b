"""Decoders of equal shapes share their compiled programs, for tests that change only numbers; no tests in here."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax

from jaxcoll.step import Step
from models.deepseek_v4 import decoder


@contextlib.contextmanager
def shared_programs() -> Iterator[None]:
    """Within it, a program is compiled once for everything that decides its text; `compiles` still counts as before."""
    compiled: dict[tuple, Step] = {}
    compile_decode = decoder.compile_decode

    def shared(model: Any, plan: Any, parameters: Any, caches: Any, results: Sequence[str]) -> Step:
        config = dataclasses.replace(model.config, eos_token_id=None)  # what ends a request is no part of a step
        shapes = tuple((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(caches))
        key = config, model.topology, plan.program, shapes, results
        if key not in compiled:
            compiled[key] = compile_decode(model, plan, parameters, caches, results)
        return compiled[key]

    with mock.patch.object(decoder, "compile_decode", shared):
        yield

"""Decoders of equal shapes share their compiled programs, for tests that change only numbers; no tests in here."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

from models.deepseek_v4.decoder import Decoder


@contextlib.contextmanager
def shared_programs() -> Iterator[None]:
    """Within it, a program is compiled once for everything that decides its text; `compiles` still counts as before."""
    compiled: dict[tuple, Any] = {}
    compile_program = Decoder._compile

    def shared(self: Decoder, plan: Any) -> Any:
        config = dataclasses.replace(self.config, eos_token_id=None)  # what ends a request is no part of a step
        key = config, self.topology, self.settings, self.slots, self.max_seq_len, self.results, plan.program
        if key not in compiled:
            compiled[key] = compile_program(self, plan)
        return compiled[key]

    with mock.patch.object(Decoder, "_compile", shared):
        yield

"""What the processes of a job compare of their files' contents: a hash, of a sample where there is much of it."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from models.deepseek_v4.checkpoint import READABLE_DTYPES, Checkpoint, unused_tensors
from models.deepseek_v4.config import Config

WHOLE = 1 << 22  # elements; more are sampled, so that no process reads much of what it does not hold
BLOCKS, BLOCK = 1024, 1024  # elements


def hash_of(arrays: Iterable[np.ndarray]) -> str:
    """Of the arrays' bytes, in order."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def weights_hash(folder: Path, config: Config) -> str:
    """Of the names, shapes and dtypes of the tensors that are used, and of up to WHOLE elements all of their values.

    Of more, BLOCKS runs of at most BLOCK elements, evenly spaced over all of them. In which files the tensors lie does
    not count.

    Raises:
        CheckpointError: files are missing or broken.
    """
    ignore = unused_tensors(config)
    with Checkpoint(folder) as checkpoint:
        used = {name: kind for name, kind in sorted(checkpoint.tensors.items()) if not ignore(name)}
        readable = [name for name, (_, dtype) in used.items() if dtype in READABLE_DTYPES]  # others are refused
        ends = list(itertools.accumulate(math.prod(used[name][0]) for name in readable))
        if not ends or ends[-1] <= WHOLE:
            sample = hash_of(checkpoint.read(name, ()) for name in readable)
        else:
            sample = hash_of(_blocks(checkpoint, readable, ends))
    return hashlib.sha256(f"{used} {sample}".encode()).hexdigest()[:16]


def _blocks(checkpoint: Checkpoint, names: list[str], ends: list[int]) -> Iterable[np.ndarray]:
    for number in range(BLOCKS):
        at = number * ends[-1] // BLOCKS
        which = bisect.bisect_right(ends, at)
        shape, _ = checkpoint.tensors[names[which]]
        *rows, first = np.unravel_index(at - (ends[which - 1] if which else 0), shape) or (None,)
        if first is None:
            yield checkpoint.read(names[which], ())
        else:
            row = tuple(slice(int(i), int(i) + 1) for i in rows)
            yield checkpoint.read(names[which], (*row, slice(int(first), int(first) + BLOCK)))

"""The one judgement of what counts as a size or a number of things."""

from __future__ import annotations

import operator
from typing import Any


def whole_number(name: str, value: Any, least: int = 1, error: type[ValueError] = ValueError) -> int:
    """`value` as Python's own integer; NumPy's are whole numbers too, True and 2.0 are none.

    Raises:
        ValueError: of the kind `error`, with the name, where it is no whole number or below `least`.
    """
    try:
        whole = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = least - 1
    if whole < least:
        raise error(f"{name} must be a whole number of at least {least}, not {value!r}")
    return whole

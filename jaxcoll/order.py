"""Which programs a process has dispatched, in which order, as one number that is cheap to keep and to compare."""

from __future__ import annotations

import collections
import zlib

_KEPT = 1 << 16  # a peer that is further behind than this is not compared


class Order:
    """The sequence of this process's dispatches so far.

    Attributes:
        position: how many there were.
        mark: a checksum of all of them in order.
    """

    def __init__(self):
        self.position, self.mark = 0, 0
        self._marks: collections.deque[int] = collections.deque([0], maxlen=_KEPT)

    def note(self, fingerprint: str) -> None:
        """One more dispatch, of the program with this fingerprint."""
        self.mark = zlib.crc32(fingerprint.encode(), self.mark)
        self._marks.append(self.mark)
        self.position += 1

    def fits(self, position: int, mark: int) -> bool:
        """Whether another process's sequence up to its `position` is this one's; True where nothing can be said."""
        back = self.position - position
        return not 0 <= back < len(self._marks) or self._marks[-1 - back] == mark

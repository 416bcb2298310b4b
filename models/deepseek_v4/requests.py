"""Where requests live: which replica and cache slot each one gets, and how long its cache must be."""

from __future__ import annotations

from collections.abc import Sequence

from models.deepseek_v4.config import Config
from models.deepseek_v4.decoder import default_max_seq_len
from models.errors import UserError

Home = tuple[int, int]  # replica, slot
MOST_REQUESTS = 2**20  # of one batch; each has a row, a home and a cache slot


def spread(requests: int, replicas: int, counts: Sequence[int] | None = None) -> list[Home]:
    """Homes of the requests in order: the first replica's requests first.

    Args:
        requests: how many.
        replicas: attn_dp.
        counts: requests per replica; None gives the first `requests mod replicas` replicas one more.

    Raises:
        UserError: more requests than a batch holds, or counts that do not add up to them or are not one per replica.
    """
    if requests > MOST_REQUESTS:
        raise UserError(f"{requests} requests were asked for; one batch holds at most {MOST_REQUESTS}")
    if counts is None:
        counts = [requests // replicas + (r < requests % replicas) for r in range(replicas)]
    given = ",".join(map(str, counts))
    if len(counts) != replicas:
        raise UserError(f"--requests-per-replica {given} must hold one count for each of {replicas} replicas")
    if sum(counts) != requests:
        raise UserError(f"--requests-per-replica {given} makes {sum(counts)} requests, but there are {requests}")
    return [(replica, slot) for replica, count in enumerate(counts) for slot in range(count)]


def slots_for(homes: Sequence[Home]) -> int:
    """Slots that every replica needs to hold these requests, at least 1."""
    return max((slot + 1 for _, slot in homes), default=1)


def cache_length(config: Config, asked: int | None, needed: int, what: str) -> int:
    """The cache length to use.

    Args:
        config: the model.
        asked: --max-seq-len, or None.
        needed: positions that the longest request takes.
        what: names that request in an error.

    Raises:
        UserError: more was asked for than the model has positions, or the longest request does not fit.
    """
    if asked is not None and asked > config.max_position_embeddings:
        raise UserError(
            f"--max-seq-len {asked} is past the model's last position: it must be from 1 to "
            f"max_position_embeddings={config.max_position_embeddings}"
        )
    length = asked or default_max_seq_len(config)
    if needed > length:
        raise UserError(f"{what} needs {needed} positions, past the cache of {length}; see --max-seq-len")
    return length

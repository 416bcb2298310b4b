"""Decode steps by every backend in turns: `python -m models.deepseek_v4.bench_backends [CHECKPOINT] --attn-dp 8`.

Each round runs one step of every backend with the same rows, so that a noisy machine slows all alike; read the ratios.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from models.errors import UserError
from models.startup import prepare_devices

BACKENDS: dict[str, dict[str, Any]] = {
    "gather": {},
    "all_to_all, normal": {"moe_backend": "all_to_all", "dispatch": "normal"},
    "all_to_all, low_latency": {"moe_backend": "all_to_all", "dispatch": "low_latency"},
    "fused": {"moe_backend": "fused"},
}
POSITION = 3  # every step decodes the same position, so that all steps cost the same


def measure(folder: Path, attn_dp: int, attn_tp: int, batch: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Median ms of a completed step of each backend, and the median over rounds of its ratio to gather's.

    Args:
        folder: a checkpoint.
        batch: requests, spread over the replicas.
    """
    from jaxcoll.settings import Settings
    from jaxcoll.topology import Topology
    from models.deepseek_v4.decoder import Decoder, Row

    topology = Topology(attn_dp, attn_tp)
    slots, length = -(-batch // attn_dp), 2 * POSITION
    decoders = {
        name: Decoder.load(folder, topology, slots=slots, max_seq_len=length, settings=Settings(**choices))[0]
        for name, choices in BACKENDS.items()
    }
    rows = [Row(i % decoders["gather"].config.vocab_size, POSITION, i % attn_dp, i // attn_dp) for i in range(batch)]
    times: dict[str, list[float]] = {name: [] for name in decoders}
    for name, decoder in itertools.chain(*(decoders.items() for _ in range(rounds + 1))):
        start = time.perf_counter()
        decoder.next_tokens(rows)  # waits for the step: the ids are on the host afterwards
        times[name].append((time.perf_counter() - start) * 1e3)
    base = times["gather"][1:]  # the first step compiles
    ratios = {n: [m / b for m, b in zip(mine[1:], base, strict=True)] for n, mine in times.items()}
    return {name: (statistics.median(mine[1:]), statistics.median(ratios[name])) for name, mine in times.items()}


def main(argv: list[str] | None = None) -> int:
    """The command line; prints a table. Exit code 2 for what cannot be measured."""
    parser = argparse.ArgumentParser(prog="python -m models.deepseek_v4.bench_backends", description=__doc__)
    parser.add_argument("checkpoint", nargs="?", type=Path, help="a folder; the packaged tiny model if none is given")
    for name, default in (("attn-dp", 8), ("attn-tp", 1), ("batch", 8), ("rounds", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(argv)
    try:
        prepare_devices(given.attn_dp * given.attn_tp)
        from models.deepseek_v4.demo import packaged_model  # imports jax, which reads its settings only then

        with packaged_model() as packaged:
            sizes = given.attn_dp, given.attn_tp, given.batch, given.rounds
            found = measure(given.checkpoint or packaged, *sizes)
    except (UserError, ValueError) as error:
        print(f"bench_backends: {error}", file=sys.stderr)
        return 2
    print("| backend | ms | ratio |\n|---|---:|---:|")
    for name, (ms, ratio) in found.items():
        print(f"| {name} | {ms:.2f} | {ratio:.2f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

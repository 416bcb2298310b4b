"""`jaxcoll bench`: the median time of completed decode steps, after a warm-up."""

from __future__ import annotations

import json
import statistics
import time

from jaxcoll.topology import Topology
from models.deepseek_v4 import report
from models.deepseek_v4.config import Config
from models.deepseek_v4.decoder import Decoder, Row
from models.deepseek_v4.requests import cache_length, slots_for, spread
from models.options import BenchOptions
from models.progress import Working

WARM_UP = 4


def run(options: BenchOptions) -> int:
    """Runs the command. Raises UserError where the steps do not fit the cache."""
    config = Config.from_folder(options.checkpoint_dir)
    total = WARM_UP + options.steps
    length = cache_length(config, options.max_seq_len, total, f"a run of {WARM_UP} + {options.steps} steps")
    topology = Topology(*options.topology.sizes)
    homes = spread(options.batch, topology.attn_dp)
    with Working() as working:
        working.stage("loading weights")
        decoder, _ = Decoder.load(
            options.checkpoint_dir,
            topology,
            slots=slots_for(homes),
            max_seq_len=length,
            settings=options.paths.settings(),
            config=config,
            progress=working.advance,
        )
        working.stage("compiling the step")
        tokens, times = [i % config.vocab_size for i in range(options.batch)], []
        for position in range(total):
            start = time.perf_counter()
            rows = [Row(token, position, *home) for token, home in zip(tokens, homes, strict=True)]
            tokens = decoder.next_tokens(rows)  # waits for the step: the ids are on the host afterwards
            times.append(time.perf_counter() - start)
            working.decoded(position + 1, total)
    seconds = statistics.median(times[WARM_UP:])
    result = {
        "ms_per_step": round(seconds * 1e3, 4),
        "tokens_per_s": round(options.batch / seconds, 1),
        "batch": options.batch,
        "steps": options.steps,
        "compiles": decoder.compiles,
        "topology": report.topology_json(topology),
    }
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"{result['ms_per_step']} ms per step (median of {options.steps}), {result['tokens_per_s']} tokens/s, "
            f"batch {options.batch} on {topology.world} devices"
        )
    return 0

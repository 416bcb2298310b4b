"""`jaxcoll bench`: the median time of completed decode steps, after a warm-up."""

from __future__ import annotations

import json
import statistics
import time

from models.deepseek_v4 import report
from models.deepseek_v4.config import Config
from models.deepseek_v4.decoder import Row
from models.deepseek_v4.session import open_session
from models.options import BenchOptions
from models.progress import Working

WARM_UP = 4


def run(options: BenchOptions) -> int:
    """Runs the command. Raises UserError where the steps do not fit the cache."""
    config = Config.from_folder(options.checkpoint_dir)
    total = WARM_UP + options.steps
    with Working() as working:
        session = open_session(
            options.checkpoint_dir,
            config,
            options,
            working,
            requests=options.batch,
            positions=total,
            what=f"a run of {WARM_UP} + {options.steps} steps",
            settings=options.paths.settings(),
        )
        decoder, homes = session.decoder, session.homes
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
        "topology": report.topology_json(decoder.topology),
    }
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"{result['ms_per_step']} ms per step (median of {options.steps}), {result['tokens_per_s']} tokens/s, "
            f"batch {options.batch} on {report.counted(decoder.topology.world, 'device')}"
        )
    return 0

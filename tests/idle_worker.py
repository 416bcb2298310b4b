"""One process of a job whose replicas are idle at random; run by the tests of jobs, holds no test itself.

python idle_worker.py FOLDER STEPS: decodes a model with a seed per replica, and process 0 prints what came of it.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

from jaxcoll import agreement, coordination, distributed
from jaxcoll.topology import Topology
from models.deepseek_v4.config import Config
from models.deepseek_v4.decoder import Decoder, Row

SLOTS, WARM_UP = 2, 4


def main(folder: Path, steps: int) -> None:
    job = distributed.initialize()
    topology = Topology(attn_dp=4, attn_tp=1)
    config = Config.from_folder(folder)
    decoder, loaded = Decoder.load(folder, topology, slots=SLOTS, max_seq_len=64, config=config)
    decoder.room = (SLOTS,) * topology.attn_dp
    chance = [np.random.default_rng(replica) for replica in range(topology.attn_dp)]
    positions = np.zeros((topology.attn_dp, SLOTS), int)
    heard: dict[int, list[int]] = {replica: [] for replica in decoder.exchange.own}
    warm, idle = (0, 0), 0
    for number in range(steps):
        rows = []
        for replica in decoder.exchange.own:
            count = chance[replica].integers(0, SLOTS + 1) if chance[replica].random() < 0.5 else 0
            for slot in range(count):
                token = int(chance[replica].integers(config.vocab_size))
                rows.append(Row(token, int(positions[replica, slot]) % 64, replica, slot))
                positions[replica, slot] += 1
        tokens = decoder.own_next_tokens(rows)
        idle += tokens is None
        for row, token in zip(rows, tokens or (), strict=True):
            heard[row.replica].append(token)
        if number == WARM_UP:
            warm = decoder.compiles, agreement.agreements()
    end = decoder.compiles, agreement.agreements()
    report(job, {"heard": heard, "idle": idle, "warm": warm, "end": end, "read": loaded.read_bytes})


def report(job: distributed.Job, mine: dict) -> None:
    """Process 0 prints what all of them found."""
    found = {"0": json.dumps(mine)}
    if job.processes > 1:
        coordination.put(f"test/found/{job.process_id}", json.dumps(mine))
        while len(found := coordination.everything_under("test/found")) < job.processes:
            time.sleep(0.01)
    if job.leads:
        print(json.dumps({rank: json.loads(text) for rank, text in found.items()}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""A model of one layer that every mesh of up to 8 devices divides, with its trace by the NumPy loop; no tests in here.

Its program compiles in a fraction of the golden fixtures' time, so that all factorisations can run.
"""

from pathlib import Path

import numpy as np
from reference import Reference
from safetensors.numpy import save_file
from tiny_models import published, random_tensors, write_model

REQUESTS, LENGTH, NEW = 4, 8, 3

CONFIG = published(
    compress_ratios=[0], num_hash_layers=0, num_attention_heads=24, o_groups=24, n_routed_experts=24,
    num_experts_per_tok=3, moe_intermediate_size=48,
)  # fmt: skip


def write_one_layer(folder: Path) -> Path:
    """A fixture as `verify` reads it: sliding window of 5, routing by score; longer than its window."""
    tensors = random_tensors(CONFIG)
    exact = Reference(CONFIG, tensors)
    ids = np.random.default_rng(1).integers(0, CONFIG["vocab_size"], (REQUESTS, LENGTH))
    runs, greedy = [exact.run(row) for row in ids], np.zeros((REQUESTS, 0), np.int64)
    for _ in range(NEW):
        whole = np.concatenate([ids, greedy], axis=1)
        following = [np.argmax(exact.run(row)["logits"][-1]) for row in whole]
        greedy = np.concatenate([greedy, np.array(following)[:, None]], axis=1)
    trace = {name: np.stack([run[name] for run in runs]) for name in runs[0]}
    trace = {name: v.astype(np.int32 if "ids" in name else np.float32) for name, v in trace.items()}
    trace |= {"input_ids": ids.astype(np.int32), "greedy_ids": greedy.astype(np.int32)}
    write_model(folder, CONFIG, tensors)
    save_file({name: np.ascontiguousarray(value) for name, value in trace.items()}, folder / "trace.safetensors")
    return folder

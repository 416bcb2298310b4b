"""DeepSeek-V4 read straight off the model's description: NumPy, float64, one request, one position after the other.

The oracle of the tests: loops instead of caches, whole sequences instead of steps, and no code of `models`.
"""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]
CSA = 4


def rms(x: np.ndarray, eps: float, weight: np.ndarray | float = 1.0) -> np.ndarray:
    """[..., n] -> [..., n]."""
    return weight * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def softplus(x: Any) -> Any:
    return np.logaddexp(0, x)


def sigmoid(x: Any) -> Any:
    return np.exp(-softplus(-x))


def silu(x: Any) -> Any:
    return x * sigmoid(x)


def highest(scores: np.ndarray, count: int) -> list[int]:
    """Indices of the highest scores, the lowest index first where scores are equal."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def rope_frequencies(c: SimpleNamespace, compressed: bool) -> list[float]:
    """Angle per position of each channel pair."""
    r = c.qk_rope_head_dim
    if not compressed:
        return [c.rope_theta ** (-2 * i / r) for i in range(r // 2)]
    base, yarn = c.compress_rope_theta, SimpleNamespace(**c.rope_scaling)

    def dim(turns: float) -> float:
        return r * math.log(yarn.original_max_position_embeddings / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = max(math.floor(dim(yarn.beta_fast)), 0), min(math.ceil(dim(yarn.beta_slow)), r - 1)
    high = high + 0.001 if low == high else high
    found = []
    for i in range(r // 2):
        plain, ramp = base ** (-2 * i / r), min(max((i - low) / (high - low), 0), 1)
        found.append(plain / yarn.factor * ramp + plain * (1 - ramp))
    return found


def rotated(x: np.ndarray, position: int, frequencies: list[float]) -> np.ndarray:
    """Turns the trailing channel pairs (2i, 2i+1) of [..., d] by position * frequency_i."""
    out = np.array(x, np.float64)
    start = x.shape[-1] - 2 * len(frequencies)
    for i, frequency in enumerate(frequencies):
        turn = complex(math.cos(position * frequency), math.sin(position * frequency))
        pair = (x[..., start + 2 * i] + 1j * x[..., start + 2 * i + 1]) * turn
        out[..., start + 2 * i], out[..., start + 2 * i + 1] = pair.real, pair.imag
    return out


def sinkhorn(logits: np.ndarray, iterations: int, eps: float) -> np.ndarray:
    """comb [N, N] of logits [N, N]: first index source stream, second index target stream."""
    n = len(logits)
    comb = np.zeros((n, n))
    for j in range(n):
        row = np.exp(logits[j] - max(logits[j]))
        comb[j] = row / sum(row) + eps
    for iteration in range(iterations):
        if iteration > 0:
            for j in range(n):
                comb[j] /= sum(comb[j, k] for k in range(n)) + eps
        for k in range(n):
            comb[:, k] /= sum(comb[j, k] for j in range(n)) + eps
    return comb


class Reference:
    """One model: the parsed config.json and the published tensors, whatever their dtype."""

    def __init__(self, config: dict, tensors: Tensors):
        self.c = SimpleNamespace(**config)
        self.tensors = {
            name: value if value.dtype.kind == "i" else value.astype(np.float64) for name, value in tensors.items()
        }

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def mixes(self, streams: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """pre [N], post [N] and comb [N, N] for streams [N, D]; `name` as in layers.0.hc_attn."""
        c, n = self.c, self.c.hc_mult
        mix = self[f"{name}_fn"] @ rms(streams.reshape(-1), c.rms_norm_eps)
        scale, base = self[f"{name}_scale"], self[f"{name}_base"]
        pre = sigmoid(mix[:n] * scale[0] + base[:n]) + c.hc_eps
        post = 2 * sigmoid(mix[n : 2 * n] * scale[1] + base[n : 2 * n])
        logits = (mix[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n)
        return pre, post, sinkhorn(logits, c.hc_sinkhorn_iters, c.hc_eps)

    @staticmethod
    def written(streams: np.ndarray, y: np.ndarray, post: np.ndarray, comb: np.ndarray) -> np.ndarray:
        """The streams [N, D] after a sub-layer whose output is y [D]."""
        n = len(streams)
        return np.stack([post[k] * y + sum(comb[j, k] * streams[j] for j in range(n)) for k in range(n)])

    def entries(self, x: np.ndarray, name: str, ratio: int, width: int) -> np.ndarray:
        """All entries that x [S, D] closes, [S // ratio, width]."""
        c, halves = self.c, 2 if ratio == CSA else 1
        value = (x @ self[f"{name}.wkv.weight"].T).reshape(len(x), halves, width)
        ape = self[f"{name}.ape"].reshape(ratio, halves, width)
        score = (x @ self[f"{name}.wgate.weight"].T).reshape(len(x), halves, width)
        found = []
        for i in range(len(x) // ratio):
            window = [(t, halves - 1) for t in range(i * ratio, (i + 1) * ratio)]
            if ratio == CSA and i > 0:
                window += [(t, 0) for t in range((i - 1) * ratio, i * ratio)]
            scores = np.stack([score[t, half] + ape[t % ratio, half] for t, half in window])
            weights = np.exp(scores - scores.max(axis=0))
            weights /= weights.sum(axis=0)
            pooled = sum(w * value[t, half] for w, (t, half) in zip(weights, window, strict=True))
            entry = rms(np.asarray(pooled), c.rms_norm_eps, self[f"{name}.norm.weight"])
            found.append(rotated(entry, i * ratio, rope_frequencies(c, True)))
        return np.array(found).reshape(-1, width)

    def index_scores(self, x: np.ndarray, qr: np.ndarray, position: int, keys: np.ndarray, name: str) -> list[float]:
        """The indexer's score of each of the keys [n, dI] for one token: x [D], qr [q_lora]."""
        c = self.c
        q = (self[f"{name}.wq_b.weight"] @ qr).reshape(c.index_n_heads, c.index_head_dim)
        q = rotated(q, position, rope_frequencies(c, True))
        heads = self[f"{name}.weights_proj.weight"] @ x * c.index_n_heads**-0.5
        scores = []
        for key in keys:
            dots = [max(float(q[h] @ key), 0.0) for h in range(c.index_n_heads)]
            scores.append(sum(heads[h] * dots[h] for h in range(c.index_n_heads)) * c.index_head_dim**-0.5)
        return scores

    def attention(self, x: np.ndarray, layer: int) -> np.ndarray:
        """The attention sub-layer on its inputs [S, D]: outputs [S, D]."""
        c, name, ratio = self.c, f"layers.{layer}.attn", self.c.compress_ratios[layer]
        heads, d, eps = c.num_attention_heads, c.head_dim, c.rms_norm_eps
        frequencies = rope_frequencies(c, ratio > 0)
        kv = rms(x @ self[f"{name}.wkv.weight"].T, eps, self[f"{name}.kv_norm.weight"])
        kv = np.stack([rotated(kv[t], t, frequencies) for t in range(len(x))])
        entries = self.entries(x, f"{name}.compressor", ratio, d) if ratio else np.zeros((0, d))
        indexer = f"{name}.indexer"
        index_keys = self.entries(x, f"{indexer}.compressor", ratio, c.index_head_dim) if ratio == CSA else entries
        out = []
        for t in range(len(x)):
            qr = rms(self[f"{name}.wq_a.weight"] @ x[t], eps, self[f"{name}.q_norm.weight"])
            q = rms((self[f"{name}.wq_b.weight"] @ qr).reshape(heads, d), eps)
            q = rotated(q, t, frequencies)
            chosen = list(range((t + 1) // ratio)) if ratio else []
            if ratio == CSA:
                scores = self.index_scores(x[t], qr, t, index_keys[: len(chosen)], indexer)
                chosen = highest(np.array(scores), c.index_topk)
            keys = np.concatenate([kv[max(0, t - c.sliding_window + 1) : t + 1], entries[chosen]])
            o = np.zeros((heads, d))
            for h in range(heads):
                logits = np.append(keys @ q[h] * d**-0.5, self[f"{name}.attn_sink"][h])
                p = np.exp(logits - logits.max())
                o[h] = (p / p.sum())[:-1] @ keys
            o = rotated(o, -t, frequencies).reshape(c.o_groups, -1)
            wo_a = self[f"{name}.wo_a.weight"].reshape(c.o_groups, c.o_lora_rank, -1)
            z = np.concatenate([wo_a[g] @ o[g] for g in range(c.o_groups)])
            out.append(self[f"{name}.wo_b.weight"] @ z)
        return np.stack(out)

    def route(self, x: np.ndarray, token: int, layer: int) -> tuple[list[int], np.ndarray]:
        """The chosen experts of one row x [D] and their weights [K]."""
        c, name = self.c, f"layers.{layer}.ffn.gate"
        scores = np.sqrt(softplus(self[f"{name}.weight"] @ x))
        if layer < c.num_hash_layers:
            ids = [int(e) for e in self[f"{name}.tid2eid"][token]]
        else:
            ids = highest(scores + self[f"{name}.bias"], c.num_experts_per_tok)
        return ids, scores[ids] / (sum(scores[ids]) + 1e-20) * c.routed_scaling_factor

    def expert(self, x: np.ndarray, name: str) -> np.ndarray:
        """One expert on rows [..., D]."""
        limit = self.c.swiglu_limit
        gate, up = (x @ self[f"{name}.{w}.weight"].T for w in ("w1", "w3"))
        return (silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit)) @ self[f"{name}.w2.weight"].T

    def moe(self, x: np.ndarray, token: int, layer: int) -> np.ndarray:
        """The expert sub-layer on one row x [D]."""
        ids, weights = self.route(x, token, layer)
        name = f"layers.{layer}.ffn"
        routed = sum(w * self.expert(x, f"{name}.experts.{e}") for e, w in zip(ids, weights, strict=True))
        return routed + self.expert(x, f"{name}.shared_experts")

    def head(self, streams: np.ndarray) -> np.ndarray:
        """Logits [V] of streams [N, D]."""
        c = self.c
        mix = self["hc_head_fn"] @ rms(streams.reshape(-1), c.rms_norm_eps)
        pre = sigmoid(mix * self["hc_head_scale"] + self["hc_head_base"]) + c.hc_eps
        return self["head.weight"] @ rms(pre @ streams, c.rms_norm_eps, self["norm.weight"])

    def run(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """All positions of one request: logits [S, V], streams.i [S, N, D], attn_out.i, moe_out.i, topk_ids.i."""
        c, out = self.c, {}
        streams = np.repeat(self["embed.weight"][ids][:, None, :], c.hc_mult, axis=1)
        for i in range(c.num_hidden_layers):
            out[f"streams.{i}"] = streams
            mixes = [self.mixes(s, f"layers.{i}.hc_attn") for s in streams]
            x = np.stack([pre @ s for s, (pre, _, _) in zip(streams, mixes, strict=True)])
            y = self.attention(rms(x, c.rms_norm_eps, self[f"layers.{i}.attn_norm.weight"]), i)
            out[f"attn_out.{i}"] = y
            streams = np.stack([self.written(s, o, *m[1:]) for s, o, m in zip(streams, y, mixes, strict=True)])
            mixes = [self.mixes(s, f"layers.{i}.hc_ffn") for s in streams]
            x = np.stack([pre @ s for s, (pre, _, _) in zip(streams, mixes, strict=True)])
            x = rms(x, c.rms_norm_eps, self[f"layers.{i}.ffn_norm.weight"])
            y = np.stack([self.moe(row, token, i) for row, token in zip(x, ids, strict=True)])
            out[f"topk_ids.{i}"] = np.array([self.route(row, t, i)[0] for row, t in zip(x, ids, strict=True)])
            out[f"moe_out.{i}"] = y
            streams = np.stack([self.written(s, o, *m[1:]) for s, o, m in zip(streams, y, mixes, strict=True)])
        out[f"streams.{c.num_hidden_layers}"] = streams
        out["logits"] = np.stack([self.head(s) for s in streams])
        return out

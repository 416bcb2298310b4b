"""What the stages of a DeepSeek-V4 layer mean for one token: request rank -> expert rank -> request rank."""

from __future__ import annotations

from jaxcoll.follow import Meaning, TokenPath, follow
from jaxcoll.plan import LayerPlan
from jaxcoll.step import Step
from models.deepseek_v4.model import DeepSeekV4
from models.deepseek_v4.program import layer_transfers

_HOME, _EVERYONE, _EXPERTS = "request ranks", "every rank", "expert ranks"
_INSIDE_MOE = ("route", "dispatch", "experts", "combine", "shared", "fused")  # stages within the scope "moe"

_MEANINGS: dict[str, Meaning] = {
    "hc_attn.read": Meaning("row for attention, from N streams", _HOME),
    "attn": Meaning("attention output of own heads", _HOME),
    "attn.all_reduce": Meaning("attention output", _HOME, ("attention",)),
    "hc_attn.write": Meaning("N streams with attention in them", _HOME),
    "hc_ffn.read": Meaning("row for the experts, from N streams", _HOME),
    "moe.gather": Meaning("rows of all replicas", _EVERYONE, ("gather",)),
    "moe": Meaning("own experts' addend of every row", _EXPERTS),
    "moe.combine": Meaning("experts' output of own rows", _HOME, ("combine",)),
    "moe.split": Meaning("own chunk of the replica's rows", _HOME),
    "moe/route": Meaning("chosen experts' weights", _HOME),
    "moe/dispatch": Meaning("rows that chose own experts", _EXPERTS, ("counts", "dispatch")),
    "moe/experts": Meaning("own experts' results of these rows", _EXPERTS),
    "moe/fused": Meaning("experts' output of own chunk, by one call", _HOME, ("counts", "dispatch", "combine")),
    "moe/combine": Meaning("experts' output of own chunk", _HOME, ("combine",)),
    "moe.join": Meaning("experts' output of the replica's rows", _HOME, ("join",)),
    "hc_ffn.write": Meaning("N streams with experts in them", _HOME),
}


def token_path(model: DeepSeekV4, plan: LayerPlan, step: Step, layer: int = 0) -> TokenPath:
    """One token through one layer of a traced step: table, Mermaid, and rich HTML in Jupyter.

    Args:
        model, plan: of the step.
        step: the program; it is not run.
        layer: which one.
    """
    topology = step.topology
    transfers = layer_transfers(model.config, topology, plan, experts=model.placement.num_physical)
    meanings, stage_of = dict(_MEANINGS), _two_parts
    if plan.backend != "gather":
        del meanings["moe"]  # what lies between its stages
        stage_of = _stage_of
    width = model.config.hidden_size
    return follow(step.traced, topology, f"layer.{layer}/", meanings, transfers, width=width, stage_of=stage_of)


def _two_parts(path: str) -> str:
    return "/".join(path.split("/")[:2])


def _stage_of(path: str) -> str:
    """Two parts of the scope path, within an exchange three."""
    parts = path.split("/")
    inner = parts[1:2] == ["moe"] and len(parts) > 2 and parts[2] in _INSIDE_MOE
    return "/".join(parts[: 3 if inner else 2])

"""What a user may ask of a plan, per call or by environment variable; it decides nothing.

A call's argument wins over a variable, a variable over the default. Variables are read when settings are made, never
at import.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

from jaxcoll.whole import whole_number
from jaxcoll.wire import WireChoice

GatherChoice = Literal["auto", "gather_v", "sum_len", "max_len"]
HeadChoice = Literal["attn_tp", "world"]
BackendChoice = Literal["auto", "gather", "all_to_all", "fused"]
OverlapChoice = Literal["auto", "none", "shared_expert", "two_batch"]
LevelsChoice = Literal["auto", "flat", "hosts"]
DispatchChoice = Literal["auto", "normal", "low_latency"]
KernelsChoice = Literal["auto", "xla", "pallas"]
CombineChoice = Literal["auto", "all_reduce", "reduce_scatter_v", "reduce_scatter"]

# Field -> environment variable. Source: communication semantics, section 12.
VARIABLES = {
    "use_gatherv": "JAXCOLL_DP_USE_GATHERV",
    "use_reduce_scatter": "JAXCOLL_DP_USE_REDUCE_SCATTER",
    "shared_expert_tp1": "JAXCOLL_SHARED_EXPERT_TP1",
    "shared_expert_local": "JAXCOLL_SHARED_EXPERT_LOCAL",
    "mask_dp_pad": "JAXCOLL_MASK_DP_PAD",
    "pallas_interpret": "JAXCOLL_PALLAS_INTERPRET",
}
KERNELS_VARIABLE = "JAXCOLL_KERNELS"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class SettingsError(ValueError):
    """A choice, switch or environment variable with a value that does not exist; the message names the allowed ones."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Choices of a layer's paths.

    Attributes:
        gather: how rows reach the experts; "auto" follows the rules.
        combine: how they come back; "auto" follows the rules.
        head: the vocabulary is cut over attn_tp (SGLang's enable_dp_lm_head) or over the world.
        moe_backend: "gather" brings all rows to every rank, "all_to_all" each row to its experts' ranks, "fused" too,
            in waves of experts; "auto" is gather, as in SGLang, and all_to_all where another choice needs it.
        dispatch: form of the all-to-all; "auto" is low_latency when every replica decodes.
        wire: how rows look on an all-to-all's way; "auto" is the activations' type.
        overlap: what is computed while an all-to-all's rows travel; "auto" is the shared expert, and for fused other
            experts.
        levels: "hosts" sends one copy per destination host, and on inside the host; "flat" straight to the ranks;
            "auto" is hosts where there are several.
        redundant_experts: copies of experts beyond the first of each.
        kernels: what packs an all-to-all's rows and adds up what comes home; "auto" is Pallas on Hopper and Blackwell
            GPUs for shapes that it supports, XLA elsewhere.
        pallas_interpret: named "pallas" kernels are interpreted: on one device of any kind, slowly, checked for races.
        use_gatherv: rules may take gather_v, and with it reduce_scatter_v (SGLANG_DP_USE_GATHERV).
        use_reduce_scatter: rules may take the equal reduce_scatter (SGLANG_DP_USE_REDUCE_SCATTER); None is on for
            ROCm and off otherwise.
        shared_expert_tp1: keep the shared expert whole on every rank (SGLANG_SHARED_EXPERT_TP1).
        shared_expert_local: compute a whole shared expert on own rows, before the gather
            (SGLANG_DP_SHARED_EXPERT_LOCAL).
        mask_dp_pad: padding rows are no expert's (SGLANG_OPT_MASK_DP_PAD_MOE, there off by default). On here: a
            masked row costs nothing, and its garbage is never computed with.
    """

    gather: GatherChoice = "auto"
    combine: CombineChoice = "auto"
    head: HeadChoice = "attn_tp"
    moe_backend: BackendChoice = "auto"
    dispatch: DispatchChoice = "auto"
    wire: WireChoice = "auto"
    overlap: OverlapChoice = "auto"
    levels: LevelsChoice = "auto"
    redundant_experts: int = 0
    kernels: KernelsChoice = "auto"
    pallas_interpret: bool = False
    use_gatherv: bool = False
    use_reduce_scatter: bool | None = None
    shared_expert_tp1: bool = False
    shared_expert_local: bool = False
    mask_dp_pad: bool = True

    def __post_init__(self):
        choices = {"gather": GatherChoice, "combine": CombineChoice, "head": HeadChoice}
        choices |= {"moe_backend": BackendChoice, "dispatch": DispatchChoice, "wire": WireChoice}
        choices |= {"overlap": OverlapChoice, "levels": LevelsChoice, "kernels": KernelsChoice}
        for name, choice in choices.items():
            value = getattr(self, name)
            if value not in get_args(choice):
                raise SettingsError(f"{name} must be one of {', '.join(get_args(choice))}, not {value!r}")
        for name in VARIABLES:  # the switches; the word "false" would be taken for on
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "use_reduce_scatter" and value is None):
                raise SettingsError(f"{name} must be True or False, not {value!r}")
        whole_number("redundant_experts", self.redundant_experts, least=0, error=SettingsError)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **given: Any) -> Settings:
        """Settings from the environment, with `given` (fields of Settings that are not None) winning over it.

        Raises:
            SettingsError: a variable's value is neither true nor false or no kernels, or a given choice does not exist.
        """
        environment = os.environ if environment is None else environment
        found: dict[str, Any] = {
            field: flag(environment, name) for field, name in VARIABLES.items() if name in environment
        }
        if KERNELS_VARIABLE in environment:
            found["kernels"] = _kernels(environment)
        return cls(**found | {field: value for field, value in given.items() if value is not None})

    @property
    def exchange_choice(self) -> str | None:
        """The first named choice that only an all-to-all has, such as "wire fp8"."""
        if self.kernels == "pallas":
            return "kernels pallas"
        named = ((name, getattr(self, name)) for name in ("dispatch", "wire", "overlap", "levels"))
        return next((f"{name} {value}" for name, value in named if value != "auto"), None)

    @property
    def backend(self) -> Literal["gather", "all_to_all", "fused"]:
        """What brings rows to the experts."""
        if self.moe_backend != "auto":
            return self.moe_backend
        return "all_to_all" if self.exchange_choice else "gather"

    @property
    def why_backend(self) -> str:
        """Why `backend`, in one sentence."""
        if self.moe_backend != "auto":
            return "it was asked for by name"
        return f"{self.exchange_choice} needs it" if self.exchange_choice else "SGLang's default exchanges no rows"

    def reduce_scatter_allowed(self) -> bool:
        """`use_reduce_scatter`, with its default found out now: on for ROCm. Starts the devices where it is None."""
        if self.use_reduce_scatter is not None:
            return self.use_reduce_scatter
        import jax

        return "rocm" in getattr(jax.devices()[0].client, "platform_version", "").lower()


def flag(environment: Mapping[str, str], name: str) -> bool:
    """Whether a variable that is set says on.

    Raises:
        SettingsError: it says neither on nor off.
    """
    value = environment[name].strip().lower()
    if value not in _TRUE + _FALSE:
        allowed = ", ".join(_TRUE + _FALSE)
        raise SettingsError(f"{name}={environment[name]!r} is neither on nor off; it must be one of {allowed}")
    return value in _TRUE


def _kernels(environment: Mapping[str, str]) -> str:
    value = environment[KERNELS_VARIABLE].strip().lower()
    if value not in get_args(KernelsChoice):
        allowed = ", ".join(get_args(KernelsChoice))
        raise SettingsError(f"{KERNELS_VARIABLE}={environment[KERNELS_VARIABLE]!r} must be one of {allowed}")
    return value

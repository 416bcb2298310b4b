"""What `jaxcoll compile` and `jaxcoll plan` can be asked, without jax: jobs on GPUs that need not be here."""

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction, arg

from models.errors import UserError
from models.options import SIZES, OptionalSize, Options, PathOptions, Size, TopologySizes

MOST_GPUS = 2**17  # of one job; 65,536 were tried, and a number far beyond would compute for hours
Target = Literal["h100", "h200", "b200"]


@dataclasses.dataclass(frozen=True)
class JobTopologyOptions:
    """How the job's GPUs are split: attn_dp * attn_tp = moe_ep * moe_tp = hosts * GPUs per host."""

    attn_dp: Annotated[OptionalSize, arg(help_behavior_hint="(default: GPUs / attn_tp)")] = None
    """Attention data parallel: replicas that hold different requests."""
    attn_tp: Annotated[OptionalSize, arg(help_behavior_hint="(default: GPUs / attn_dp, or 1)")] = None
    """Attention tensor parallel: ranks that share one replica's heads."""
    moe_ep: Annotated[OptionalSize, arg(help_behavior_hint="(default: the greatest that experts and GPUs allow)")] = (
        None
    )
    """Expert parallel: owners of disjoint experts."""

    def sizes(self, world: int, experts: int) -> TopologySizes:
        """The sizes for `world` GPUs and a model of `experts` experts, defaults filled in.

        Raises:
            UserError: attn_dp * attn_tp is not the world.
        """
        attn_tp = self.attn_tp or (world // self.attn_dp if self.attn_dp else 1)
        attn_dp = self.attn_dp or world // attn_tp
        if attn_dp * attn_tp != world:
            raise UserError(f"--attn-dp {attn_dp} times --attn-tp {attn_tp} does not make the job's {world} GPUs")
        return TopologySizes(attn_dp, attn_tp, self.moe_ep or math.gcd(experts, world))


@dataclasses.dataclass(frozen=True)
class CompileOptions(Options):
    """Compile one decode layer of each attention kind for GPUs that need not be here, and show what it communicates,
    holds and multiplies. No weights are read and nothing is allocated."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """flash, pro, tiny, a config.json or a folder with one"""
    target: Target = "h200"
    """GPUs to compile for."""
    hosts: Size = 1
    """Machines, joined by the network."""
    gpus_per_host: Size = 8
    """GPUs of one machine, joined by NVLink."""
    topology: OmitArgPrefixes[JobTopologyOptions] = dataclasses.field(default_factory=JobTopologyOptions, kw_only=True)
    paths: OmitArgPrefixes[PathOptions] = dataclasses.field(default_factory=PathOptions, kw_only=True)
    tokens_per_gpu: Size = 8
    """Rows that each GPU decodes; the ranks of one replica together have attn_tp times as many."""
    context: Size = 8192
    """Positions that the caches hold for each request."""
    dtype: Literal["bf16", "f32"] = "bf16"
    """Type of weights, activations and caches."""
    xla_option: UseAppendAction[tuple[str, ...]] = ()
    """Compiler option NAME=VALUE; repeat the option for more."""
    json: bool = False
    """Print the result as JSON."""

    @property
    def compiles_for_gpus(self) -> bool:
        return True

    @property
    def world(self) -> int:
        """GPUs of the job."""
        return self.hosts * self.gpus_per_host

    @property
    def compiler_options(self) -> dict[str, bool | int | str] | None:
        """The --xla-option values as XLA takes them; None for none."""
        return dict(map(_compiler_option, self.xla_option)) or None

    def check(self) -> None:
        _ = self.compiler_options
        _check_gpus("--hosts times --gpus-per-host", self.world)


@dataclasses.dataclass(frozen=True)
class PlanOptions(Options):
    """Rank topologies and paths of jobs on GPUs that need not be here by the step time that HBM, tensor cores and links
    allow, and say what bounds each. Nothing is compiled, run or measured."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """flash, pro, tiny, a config.json or a folder with one"""
    target: Target = "h200"
    """GPUs of the job."""
    gpus: Annotated[tuple[int, ...], SIZES] = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    """Sizes of the job."""
    gpus_per_host: Size = 8
    """GPUs of one machine, joined by NVLink."""
    tokens_per_gpu: Annotated[tuple[int, ...], SIZES] = (1, 8, 64)
    """Rows that each GPU decodes."""
    context: Size = 8192
    """Positions that each request has behind it."""
    network: Literal["connectx7", "connectx8"] = "connectx7"
    """Network card of each GPU."""
    imbalance: float = 1.0
    """How many times the mean the busiest GPU's experts get; 1 is an even load."""
    top: Size = 3
    """Candidates to show of each job."""
    plot: Path | None = None
    """Draw the best candidates into this file (needs the extra `plot`)."""
    json: bool = False
    """Print the result as JSON."""

    def check(self) -> None:
        _check_gpus("--gpus", max(self.gpus))
        if not 1 <= self.imbalance < math.inf:
            raise UserError(f"--imbalance must be a number from 1 on, not {self.imbalance}")


def _check_gpus(name: str, gpus: int) -> None:
    if gpus > MOST_GPUS:
        raise UserError(f"{name} must be at most {MOST_GPUS} GPUs, not {gpus}")


def _compiler_option(text: str) -> tuple[str, bool | int | str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise UserError(f"--xla-option must be NAME=VALUE, not {text!r}")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    return name, int(value) if value.isdecimal() else value

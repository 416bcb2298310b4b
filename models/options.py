"""What the `jaxcoll` subcommands can be asked: one frozen dataclass each, without jax.

Only the options themselves are judged here; what needs a checkpoint or a mesh is judged by whoever has it.
"""

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction, arg
from tyro.constructors import PrimitiveConstructorSpec

from models.errors import UserError

if TYPE_CHECKING:
    from jaxcoll.settings import Settings

LARGEST = 2**31 - 1
BARE_ATTN_DP, BARE_ATTN_TP = 4, 2


def _whole(text: str, least: int) -> int:
    """Reads a plain decimal number; `int` alone would take 1_000, +4 and other scripts' digits as well."""
    if not re.fullmatch(r"[0-9]{1,10}", text.strip()) or not least <= int(text) <= LARGEST:
        raise ValueError(f"must be a whole number from {least} to {LARGEST}, not {text!r}")
    return int(text)


def _size(words: list[str]) -> int:
    return _whole(words[0], least=1)


def _number_list(words: list[str], least: int = 0) -> tuple[int, ...]:
    try:
        return tuple(_whole(part, least) for part in words[0].split(","))
    except ValueError:
        raise ValueError(
            f"must be whole numbers from {least} to {LARGEST} separated by commas, such as 5,17,9, not {words[0]!r}"
        ) from None


def _size_list(words: list[str]) -> tuple[int, ...]:
    return _number_list(words, least=1)


def _folder(words: list[str]) -> Path:
    if not words[0]:
        raise ValueError("must be a folder, not an empty name")
    return Path(words[0])


def _file(words: list[str]) -> Path:
    if not words[0]:
        raise ValueError("must be a file, not an empty name")
    return Path(words[0])


def _is_number_list(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(number, int) for number in value)


_SIZE = PrimitiveConstructorSpec(1, "N", _size, lambda v: isinstance(v, int), lambda v: [str(v)])
_OPTIONAL_SIZE = PrimitiveConstructorSpec(1, "N", _size, lambda v: v is None or isinstance(v, int), lambda v: [str(v)])
NUMBERS = PrimitiveConstructorSpec(1, "N,N,...", _number_list, _is_number_list, lambda v: [",".join(map(str, v))])
SIZES = PrimitiveConstructorSpec(1, "N,N,...", _size_list, _is_number_list, NUMBERS.str_from_instance)
_OPTIONAL_NUMBERS = PrimitiveConstructorSpec(
    1, "N,N,...", _number_list, lambda v: v is None or _is_number_list(v), lambda v: [str(v)]
)
_FOLDER = PrimitiveConstructorSpec(1, "FOLDER", _folder, lambda v: isinstance(v, Path), lambda v: [str(v)])
_OPTIONAL_FOLDER = PrimitiveConstructorSpec(
    1, "FOLDER", _folder, lambda v: v is None or isinstance(v, Path), lambda v: [str(v)]
)
_OPTIONAL_FILE = PrimitiveConstructorSpec(
    1, "FILE", _file, lambda v: v is None or isinstance(v, Path), lambda v: [str(v)]
)

Size = Annotated[int, _SIZE]
OptionalSize = Annotated[int | None, _OPTIONAL_SIZE]
Folder = Annotated[Path, _FOLDER]
OptionalFolder = Annotated[Path | None, _OPTIONAL_FOLDER]
OptionalFile = Annotated[Path | None, _OPTIONAL_FILE]


class TopologySizes(NamedTuple):
    """Sizes with every default filled in; `Topology(*sizes)` is the mesh they ask for."""

    attn_dp: int
    attn_tp: int
    moe_ep: int

    @property
    def world(self) -> int:
        return self.attn_dp * self.attn_tp


@dataclasses.dataclass(frozen=True)
class TopologyOptions:
    """How the devices are split: attn_dp * attn_tp = moe_ep * moe_tp = devices. With none of --attn-dp,
    --attn-tp and --devices: 8 devices as 4 x 2."""

    attn_dp: Annotated[OptionalSize, arg(help_behavior_hint="(default: devices / attn_tp, or 1)")] = None
    """Attention data parallel: replicas that hold different requests."""
    attn_tp: Annotated[OptionalSize, arg(help_behavior_hint="(default: devices / attn_dp, or 1)")] = None
    """Attention tensor parallel: ranks that share one replica's heads."""
    moe_ep: Annotated[OptionalSize, arg(help_behavior_hint="(default: devices)")] = None
    """Expert parallel: owners of disjoint experts."""
    devices: Annotated[OptionalSize, arg(help_behavior_hint="(default: attn_dp * attn_tp)")] = None
    """Devices in all."""

    @property
    def sizes(self) -> TopologySizes:
        """The sizes asked for, defaults filled in.

        Raises:
            UserError: the sizes do not multiply to the device count.
        """
        attn_dp, attn_tp = self._attention_sizes()
        world = attn_dp * attn_tp
        if self.devices is not None and world != self.devices:
            raise UserError(
                f"--attn-dp {attn_dp} times --attn-tp {attn_tp} makes {world} devices, not --devices {self.devices}"
            )
        return TopologySizes(attn_dp, attn_tp, self.moe_ep or world)

    def _attention_sizes(self) -> tuple[int, int]:
        if self.attn_dp is None and self.attn_tp is None and self.devices is None:
            return BARE_ATTN_DP, BARE_ATTN_TP
        if self.devices is None:
            return self.attn_dp or 1, self.attn_tp or 1
        if self.attn_dp is None:
            attn_tp = self.attn_tp or 1
            return self._share("--attn-tp", attn_tp), attn_tp
        return self.attn_dp, self.attn_tp or self._share("--attn-dp", self.attn_dp)

    def _share(self, option: str, size: int) -> int:
        """Devices for each of `size` ranks."""
        assert self.devices is not None
        if self.devices % size:
            raise UserError(f"--devices {self.devices} is not a multiple of {option} {size}")
        return self.devices // size


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asks of every subcommand's options."""

    @property
    def local_devices(self) -> int:
        """Devices that this process must show."""
        return 1

    @property
    def cpu_only(self) -> bool:
        """Whether no GPU of this machine is used."""
        return True

    @property
    def compiles_for_gpus(self) -> bool:
        """Whether programs are compiled for GPUs that are not here."""
        return False

    def check(self) -> None:
        """Raises UserError for options that contradict each other."""


@dataclasses.dataclass(frozen=True)
class MeshOptions(Options):
    """What every subcommand takes that runs on devices."""

    topology: OmitArgPrefixes[TopologyOptions] = dataclasses.field(default_factory=TopologyOptions, kw_only=True)

    @property
    def local_devices(self) -> int:
        return self.topology.sizes.world

    @property
    def cpu_only(self) -> bool:
        return False

    def check(self) -> None:
        """Raises UserError for options that contradict each other."""
        _ = self.topology.sizes


@dataclasses.dataclass(frozen=True)
class RunOptions(MeshOptions):
    """What every subcommand takes that runs the model."""

    max_seq_len: Annotated[OptionalSize, arg(help_behavior_hint="(default: the model's positions, at most 4096)")] = (
        dataclasses.field(default=None, kw_only=True)
    )
    """Cache length: positions that each request can take."""


def check_counts(counts: tuple[int, ...] | None, replicas: int) -> None:
    """Raises UserError unless --requests-per-replica, where given, has one count per replica."""
    if counts is not None and len(counts) != replicas:
        given = ",".join(map(str, counts))
        raise UserError(f"--requests-per-replica {given} must hold one count for each of {replicas} attn_dp replicas")


@dataclasses.dataclass(frozen=True)
class PathOptions:
    """How token rows reach the experts and come back. `auto` follows the rules and says why; a named way runs, or is
    refused because it is impossible."""

    gather: Literal["auto", "gather_v", "sum_len", "max_len"] | None = None
    """Rows to the experts."""
    combine: Literal["auto", "all_reduce", "reduce_scatter_v", "reduce_scatter"] | None = None
    """Experts' partial sums to own rows."""
    head: Literal["attn_tp", "world"] | None = None
    """Group over which the vocabulary is cut."""
    moe_backend: Literal["auto", "gather", "all_to_all", "fused"] | None = None
    """All rows to every rank, or each row to its experts' ranks, fused: in waves of experts."""
    dispatch: Literal["auto", "normal", "low_latency"] | None = None
    """Form of the all-to-all."""
    wire: Literal["auto", "f32", "bf16", "fp8"] | None = None
    """How rows look on the all-to-all's way."""
    overlap: Literal["auto", "none", "shared_expert", "two_batch"] | None = None
    """What is computed while the all-to-all's rows travel; two_batch: the other half of the rows."""
    levels: Literal["auto", "flat", "hosts"] | None = None
    """One copy of a row per destination host, and on inside it, or straight to the ranks."""
    redundant_experts: Annotated[OptionalSize, arg(help_behavior_hint="(default: 0)")] = None
    """Copies of experts beyond the first of each, so that moe_ep divides their number."""
    kernels: Literal["auto", "xla", "pallas"] | None = None
    """What packs an all-to-all's rows and adds up what comes home."""

    def settings(self) -> "Settings":
        """The settings of these options over those of the environment; imports jaxcoll, and jax with it.

        Raises:
            SettingsError: an environment variable has a value that does not exist.
        """
        from jaxcoll.settings import Settings

        return Settings.from_environment(**dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class DemoOptions(RunOptions):
    """Decode the packaged tiny model on CPU devices, and show what moves between them."""

    @property
    def cpu_only(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class VerifyOptions(RunOptions):
    """Decode a golden fixture and compare with its trace: exit 0 if equal, 1 if not."""

    fixture: Annotated[Positional[Folder], arg(metavar="FIXTURE")]
    """folder with config.json, model.safetensors and trace.safetensors"""
    paths: OmitArgPrefixes[PathOptions] = dataclasses.field(default_factory=PathOptions, kw_only=True)
    requests_per_replica: Annotated[
        Annotated[tuple[int, ...] | None, _OPTIONAL_NUMBERS], arg(help_behavior_hint="(default: even)")
    ] = None
    """Requests that each attn_dp replica holds, such as 2,0,1,1."""
    json: bool = False
    """Print the result as JSON."""

    def check(self) -> None:
        super().check()
        check_counts(self.requests_per_replica, self.topology.sizes.attn_dp)


@dataclasses.dataclass(frozen=True)
class GenerateOptions(RunOptions):
    """Continue prompts greedily, all in one batch; lengths may differ."""

    checkpoint_dir: Annotated[Positional[Folder], arg(metavar="CHECKPOINT_DIR")]
    """folder with config.json and the safetensors"""
    paths: OmitArgPrefixes[PathOptions] = dataclasses.field(default_factory=PathOptions, kw_only=True)
    prompt_ids: UseAppendAction[tuple[Annotated[tuple[int, ...], NUMBERS], ...]] = ()
    """Token ids of one prompt, such as 5,17,9; repeat the option for more prompts."""
    max_new_tokens: Size = 8
    """Tokens to generate for each prompt."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence id."""
    json: bool = False
    """Print the result as JSON."""

    def check(self) -> None:
        super().check()
        if not self.prompt_ids:
            raise UserError("generate needs at least one prompt, such as --prompt-ids 5,17,9")


@dataclasses.dataclass(frozen=True)
class BenchOptions(RunOptions):
    """Time decode steps after a warm-up."""

    checkpoint_dir: Annotated[Positional[Folder], arg(metavar="CHECKPOINT_DIR")]
    """folder with config.json and the safetensors"""
    paths: OmitArgPrefixes[PathOptions] = dataclasses.field(default_factory=PathOptions, kw_only=True)
    batch: Size = 8
    """Requests decoded together."""
    steps: Size = 24
    """Decode steps to time."""
    profile: OptionalFolder = None
    """Write a JAX profiler trace of four more steps there, for each process."""
    json: bool = False
    """Print the result as JSON."""


@dataclasses.dataclass(frozen=True)
class LaunchOptions(Options):
    """Start a command in several processes on this machine, as a cluster would: jaxcoll launch ... -- COMMAND."""

    processes: Size = 2
    """Processes to start."""
    devices_per_process: Size = 1
    """Devices of each process; --devices in the command stays the sum."""
    grace_seconds: Size = 15
    """After the first failure, seconds that the others get to say what they miss."""
    command: Annotated[Positional[tuple[str, ...]], arg(metavar="-- COMMAND...")] = ()
    """program and arguments, after a --"""

    def check(self) -> None:
        """Raises UserError where there is nothing to start."""
        if not self.command:
            raise UserError("launch needs a command after --, such as -- jaxcoll verify FIXTURE --devices 8")


@dataclasses.dataclass(frozen=True)
class ExplainOptions(RunOptions):
    """Show which paths a step takes and why, the bytes that predicts, and what the compiled program communicates."""

    checkpoint: Annotated[Positional[OptionalFolder], arg(metavar="[CHECKPOINT]")] = None
    """folder with config.json; no weights are read; the packaged tiny model if none is given"""
    paths: OmitArgPrefixes[PathOptions] = dataclasses.field(default_factory=PathOptions, kw_only=True)
    requests_per_replica: Annotated[
        Annotated[tuple[int, ...] | None, _OPTIONAL_NUMBERS], arg(help_behavior_hint="(default: one each)")
    ] = None
    """Requests that each attn_dp replica holds, such as 2,0,1,1."""
    target: Literal["cpu", "h100", "h200", "b200"] = "cpu"
    """Compile for this: the CPU devices here, or GPUs that need not be here."""
    trace: bool = False
    """Follow one token through a layer instead: tensor, shape, states, collective, bytes and owner."""
    format: Literal["table", "json", "mermaid"] = "table"
    """How to print it."""

    @property
    def compiles_for_gpus(self) -> bool:
        return self.target != "cpu"

    def check(self) -> None:
        super().check()
        check_counts(self.requests_per_replica, self.topology.sizes.attn_dp)


@dataclasses.dataclass(frozen=True)
class BenchCollectivesOptions(MeshOptions):
    """Time every verb over every group, and fit alpha and bandwidth."""

    sizes: Annotated[tuple[int, ...], NUMBERS] = (4096, 16384, 65536, 262144, 1048576, 4194304)
    """Bytes of the full buffer on one device, at least two sizes."""
    rounds: Size = 20
    """Timed runs of each program, after three others."""
    plot: OptionalFile = None
    """Draw points and fitted lines into this .png, .svg or .pdf file."""
    json: bool = False
    """Print the result as JSON."""

    def check(self) -> None:
        super().check()
        if len(set(self.sizes)) < 2 or min(self.sizes) < 4:
            given = ",".join(map(str, self.sizes))
            raise UserError(f"--sizes must be at least two different numbers of bytes from 4 up, not {given}")

"""Following one token through a layer: what holds it, where, in which state, and what each hand-over sends.

It joins a traced program's stages with the plan's predicted transfers; it compiles and runs nothing.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, get_args

from jaxcoll.cost import Transfer
from jaxcoll.explain import stages
from jaxcoll.html import COLOURS, table_html
from jaxcoll.topology import GroupName, Topology

Owner = Literal["request ranks", "every rank", "expert ranks"]
GROUPS: tuple[GroupName, ...] = ("attn_dp", "attn_tp", "moe_ep", "moe_tp")
HEADER = "stage", "tensor", "shape per rank", *GROUPS, "collective", "bytes sent per device", "owner"


@dataclasses.dataclass(frozen=True)
class Meaning:
    """What a stage of a layer means for the token: see `Stop`."""

    tensor: str
    owner: Owner
    purposes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Stop:
    """Where the token is after one stage.

    Attributes:
        stage: the scope within the layer.
        tensor: what the result is, in words.
        shape, dtype: of one rank's result.
        states: over each group: REPLICA, SHARD, PARTIAL or mixed.
        collective: verbs that ran, with their groups, or "".
        wire_bytes: what a device sends for it on average, by counts where only real rows travel.
        owner: who holds the token now: the ranks of the replica that its request lives on, every rank, or the ranks
            that own its experts.
    """

    stage: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    states: dict[str, str]
    collective: str
    wire_bytes: float
    owner: Owner

    def cells(self) -> tuple[str, ...]:
        """The texts of `HEADER`."""
        shape = f"{self.dtype} {' x '.join(map(str, self.shape))}"
        sent = f"{self.wire_bytes:,.0f}" if self.wire_bytes else "-"
        return self.stage, self.tensor, shape, *self.states.values(), self.collective or "-", sent, self.owner


class TokenPath(list[Stop]):
    """The stops of a token in order; Jupyter shows them as a table coloured by owner."""

    def _repr_html_(self) -> str:
        owners = get_args(Owner)
        colours = [COLOURS[owners.index(stop.owner)] for stop in self]
        return table_html("One token through a layer", HEADER, [stop.cells() for stop in self], colours)

    def records(self) -> list[dict[str, Any]]:
        """For JSON."""
        return [dataclasses.asdict(stop) for stop in self]

    def mermaid(self) -> str:
        """A flowchart with a box around the stops of each owner; every arrow says state, shape and bytes."""
        lines = ["flowchart TB", '    start(["token in"])']
        before, label, owner = "start", "", ""
        for number, stop in enumerate(self):
            if stop.owner != owner:
                lines += ["    end"] if owner else []
                lines.append(f'    subgraph g{number}["{stop.owner}"]')
                owner = stop.owner
            sent = f"<br/>{stop.collective}<br/>{stop.wire_bytes:,.0f} B sent" if stop.collective else ""
            box = ('{{"', '"}}') if stop.collective else ('["', '"]')
            lines.append(f"        s{number}{box[0]}{stop.stage}{sent}{box[1]}")
        lines.append("    end")
        for number, stop in enumerate(self):
            lines.append(f'    {before} -- "{label}" --> s{number}' if label else f"    {before} --> s{number}")
            letters = ", ".join(stop.states[g][0] for g in GROUPS)
            before, label = f"s{number}", f"{stop.tensor}<br/>({letters}) {' x '.join(map(str, stop.shape))}"
        lines.append(f'    {before} -- "{label}" --> stop(["token out"])')
        return "\n".join(lines)


def follow(
    traced: Any,
    topology: Topology,
    prefix: str,
    meanings: Mapping[str, Meaning],
    transfers: Sequence[Transfer],
    *,
    width: int,
    stage_of: Callable[[str], str],
) -> TokenPath:
    """The path of any one token through the layer whose scopes start with `prefix`.

    Args:
        traced: a `Step.traced`.
        meanings: of the stages by their scope within the layer; a stage without one is left out.
        transfers: what one layer communicates, by purpose.
        width: channels of a row.
        stage_of: see `explain.stages`.
    """
    path = TokenPath()
    for stage in stages(traced, topology, prefix, groups=GROUPS, stage_of=stage_of, width=width):
        name = stage.scope.removeprefix(prefix)
        if meaning := meanings.get(name):
            collective, sent = _counted(stage.collective), _sent(transfers, meaning.purposes)
            what = name, meaning.tensor, stage.shape, stage.dtype, stage.states
            path.append(Stop(*what, collective, sent, meaning.owner))
    return path


def _sent(transfers: Sequence[Transfer], purposes: Collection[str]) -> float:
    """Bytes of a hand-over. Of padded blocks in two sizes the small ones, in which rows travel unless many meet."""
    found = [t for t in transfers if t.purpose.removesuffix(" (small blocks)") in purposes]
    return sum(t.wire_bytes_from_counts for t in found)


def _counted(collectives: str) -> str:
    """ "a; a; b" as "2 x a; b": what a stage does several times is named once."""
    times = collections.Counter(filter(None, collectives.split("; ")))
    return "; ".join(name if n == 1 else f"{n} x {name}" for name, n in times.items())

"""The audit of a traced step: the known ways in which types alone let a wrong reduction pass.

One walk over the jaxpr follows, for every value, the axes over which it really differs between ranks, next to
the axes that its type names. It is no proof of a program; the README says what is trusted and what is checked.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend import core

from jaxcoll.primitives import (
    CASTS,
    EXTREMES,
    LINEAR,
    MAKES_EQUAL,
    NONE,
    PERMUTES,
    SUMS,
    Axes,
    axes_named_twice,
    collective_axes,
    name_of,
    nested_collectives,
    opened,
    subjaxprs,
)
from jaxcoll.states import StateError

_NOT_THE_USER = tuple(
    str(Path(file).parent) + "/"
    for file in (jax.__file__, getattr(importlib.util.find_spec("flax"), "origin", None))
    if file
) + (str(Path(__file__).with_name("collectives.py")), "<frozen ")


def audit(traced: Any) -> None:
    """Refuses a traced step that reduces wrongly or could hang, before it is compiled.

    Checked, in every nested body: (i) a partial sum touched by anything but + - reshape transpose slice
    broadcast sum, concatenation of partials, or a collective over other axes; (ii) a partial mixed with a
    complete value; (iii) a value that differs between ranks while its type says that it does not; (iv) a cond or
    while that encloses a collective, or decides about a partial sum, over ranks that may disagree on its predicate;
    (v) a sum over ranks that all hold the same value (a replica counted once per rank); (vi) a `shard_map` with
    `check_vma=False`, or a collective over `axis_index_groups`, where nothing can be known.

    Args:
        traced: a jaxpr, closed or not, or the result of `jax.jit(f).trace(...)`.

    Raises:
        StateError: with the source line of the first fault.
    """
    # Jax's high-level primitives have types of their own in the one form and their bodies in the other.
    forms = [opened(getattr(form, "jaxpr", form)) for form in (traced, getattr(traced, "lojax", traced))]
    for jaxpr in forms[: 1 if forms[0] is forms[1] else 2]:
        _Walk(may_hide=hasattr(traced, "lojax")).body(jaxpr, [NONE] * len(jaxpr.invars), in_mesh=False)


def _varying(var: Any) -> Axes:
    kind = getattr(var.aval, "mat", None)
    return kind.varying if kind else NONE


def _partial(var: Any) -> Axes:
    kind = getattr(var.aval, "mat", None)
    return kind.unreduced if kind else NONE


def source_line(eqn: Any) -> str | None:
    """`file.py:12 (function)` of the innermost frame outside jax and the verbs, or None without one."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if not frame.file_name.startswith(_NOT_THE_USER):
            return f"{Path(frame.file_name).name}:{frame.line_num} ({frame.function_name})"
    return None


def _names(axes: Axes) -> str:
    return "(" + ", ".join(sorted(axes)) + ")"


@dataclasses.dataclass(eq=False)
class _Held:
    """What a reference may hold: the axes over which something that was written there differs between ranks."""

    axes: Axes


class _Walk:
    """Follows `real`: for each value, the axes over which ranks may hold different numbers."""

    def __init__(self, *, may_hide: bool):
        self.may_hide = may_hide  # bodies of high-level primitives, because they are walked in another form
        self.around: list[Any] = []  # the enclosing equations: a cached inner body has no line of its own
        self.manual = NONE  # the axes of the enclosing shard_maps
        self.sizes: dict[str, int] = {}  # of the mesh

    def where(self, eqn: Any) -> str:
        lines = (source_line(e) for e in (eqn, *reversed(self.around)))
        name = type(eqn.params["_prim"]).__name__ if name_of(eqn) == "call_hi_primitive" else name_of(eqn)
        return f"{name} at {next(filter(None, lines), 'an unknown line')}"

    def body(self, jaxpr: Any, real_in: Sequence[Axes], *, in_mesh: bool = True) -> list[Axes]:
        real: dict[Any, Axes] = {v: _varying(v) | _partial(v) for v in jaxpr.constvars}
        real.update(zip(jaxpr.invars, real_in, strict=True))

        def read(atom: Any) -> Axes:
            return NONE if isinstance(atom, core.Literal) else real[atom]

        wanted = set(_variables(jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns)))
        for eqn in jaxpr.eqns:
            real_out = self.equation(eqn, [read(v) for v in eqn.invars])
            for var, axes in zip(eqn.outvars, real_out, strict=True):
                if in_mesh and var in wanted and not _is_ref(var) and name_of(eqn) != "shard_map":
                    self.vanished(eqn, var, axes)
                real[var] = axes
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, real_in: list[Axes]) -> list[Axes]:
        self.around.append(eqn)
        out = self.inside(eqn, real_in)
        self.around.pop()
        return out

    def inside(self, eqn: Any, real_in: list[Axes]) -> list[Axes]:
        name = name_of(eqn)
        if name == "shard_map":
            return self.shard_map(eqn, real_in)
        if name == "cond":
            return self.cond(eqn, real_in)
        if name == "while":
            return self.while_loop(eqn, real_in)
        if name == "scan":
            return self.scan(eqn, real_in)
        if name == "call_hi_primitive":
            if not self.may_hide:
                raise StateError(f"{self.where(eqn)} hides its body; audit the result of jax.jit(f).trace(...)")
            return self.transfer(eqn, real_in)
        bodies = list(subjaxprs(eqn))
        if len(bodies) == 1 and _is_call(eqn, bodies[0]):
            return self.body(bodies[0], real_in)
        for body in bodies if not _is_kernel(name) else ():
            self.body(body, [_varying(v) | _partial(v) for v in body.invars])
        self.partial_operands(eqn)
        self.replica_summed(eqn, real_in)
        return self.transfer(eqn, real_in)

    def transfer(self, eqn: Any, real_in: list[Axes]) -> list[Axes]:
        name, axes = name_of(eqn), collective_axes(eqn)
        if any(_is_ref(v) for v in (*eqn.invars, *eqn.outvars)):
            return self.reference(eqn, real_in)
        joined = NONE.union(*real_in)
        if name == "reduced_vary_cast":
            # The cotangent of a partial sum: equal everywhere, but each rank's belongs to its own addend, so the
            # gradient of a replica that went into every addend is rightly the sum of them all.
            return [joined | frozenset(eqn.params["axes"])]
        if name == "axis_index":
            axis = eqn.params["axis_name"]
            return [frozenset(axis if isinstance(axis, tuple) else (axis,))]
        if name == "optimization_barrier":
            return real_in
        if name == "io_callback":  # each process asks its own host
            return [self.manual] * len(eqn.outvars)
        if name == "ppermute" and len(eqn.params["perm"]) == math.prod(self.sizes.get(a, 0) for a in axes):
            return real_in  # a copy from a rank that holds the same is the same
        if name in MAKES_EQUAL:
            return [joined - axes] * len(eqn.outvars)
        return [joined | axes] * len(eqn.outvars)

    def reference(self, eqn: Any, real_in: list[Any]) -> list[Any]:
        name, joined = name_of(eqn), _joined(real_in)
        if not any(map(_is_ref, eqn.invars)):
            return [_Held(joined) for _ in eqn.outvars]
        held = real_in[0]
        if not isinstance(held, _Held) or name not in ("get", "swap", "addupdate", "freeze"):
            _widen(eqn, real_in)  # a kernel, say, that writes what it likes
            return [_varying(v) | _partial(v) for v in eqn.outvars]
        found = held.axes | joined
        if name in ("swap", "addupdate"):
            self.vanished(eqn, eqn.invars[0], joined)
            held.axes = found
        return [found] * len(eqn.outvars)

    def vanished(self, eqn: Any, var: Any, real: Axes) -> None:
        lost = real - _varying(var) - _partial(var)
        if lost:
            way_out = "move the reduction before it, or keep the value SHARD"
            if name_of(eqn) == "sort":
                way_out = "jax.numpy.argsort(x) mistypes positions, jax.numpy.lexsort((x,)) does not"
            raise StateError(
                f"{self.where(eqn)}: its result differs over {_names(lost)} but is typed as a replica there; {way_out}"
            )

    def partial_operands(self, eqn: Any) -> None:
        partial = [_partial(v) for v in eqn.invars]
        touched = NONE.union(*partial)
        if not touched:
            return
        name = name_of(eqn)
        axes = collective_axes(eqn)
        over_others = bool(axes) and name not in EXTREMES and not axes & touched
        completes = name in ("unreduced_psum", "unreduced_reduce_scatter") and axes <= touched
        if name not in LINEAR | CASTS and not over_others and not completes:
            raise StateError(
                f"{self.where(eqn)} touches a value that is PARTIAL over {_names(touched)}; until all_reduce "
                "or reduce_scatter completes it only + - reshape transpose slice broadcast sum and concatenation "
                "of partials keep the sum right"
            )
        if len(set(partial)) > 1 and name != "optimization_barrier":
            raise StateError(
                f"{self.where(eqn)} mixes a value that is PARTIAL over {_names(touched)} with one that is "
                "not; complete the partial first, or the complete part is counted once per rank"
            )

    def replica_summed(self, eqn: Any, real_in: list[Axes]) -> None:
        name = name_of(eqn)
        if eqn.params.get("axis_index_groups") is not None:
            raise StateError(f"{self.where(eqn)} uses axis_index_groups: such groups are no mesh axes")
        if twice := axes_named_twice(eqn):  # XLA ends the process
            raise StateError(f"{self.where(eqn)} names {_names(twice)} twice in its group; name each axis once")
        axes = collective_axes(eqn) if name in SUMS else NONE
        if name == "vary_unreduced_cast":
            axes = frozenset(eqn.params["axes"])
        for operand, real in zip(eqn.invars, real_in, strict=True) if axes else ():
            same = axes - real
            if same and not isinstance(operand, core.Literal):
                raise StateError(
                    f"{self.where(eqn)} sums over {_names(same)}, where every rank holds the same value: "
                    "a replica would be counted once per rank"
                )

    def shard_map(self, eqn: Any, real_in: list[Axes]) -> list[Axes]:
        if not eqn.params.get("check_vma", True):
            raise StateError(f"{self.where(eqn)} has check_vma=False: states are unknown in it")
        (inner,) = subjaxprs(eqn)
        cut = [_varying(v) | _partial(v) for v in inner.invars]
        known = [_varying(v) | _partial(v) for v in eqn.invars]  # by an enclosing shard_map
        self.sizes = dict(eqn.params["mesh"].shape)
        outside, self.manual = self.manual, self.manual | frozenset(eqn.params["newly_manual_axes"])
        self.body(inner, [_joined([real]) | c - k for real, c, k in zip(real_in, cut, known, strict=True)])
        self.manual = outside
        return [_varying(v) | _partial(v) for v in eqn.outvars]

    def predicate(self, eqn: Any, varying: Axes, bodies: list[Any]) -> None:
        for inner in (e for body in bodies for e in nested_collectives(body)):
            over = collective_axes(inner)
            if varying and name_of(inner) in PERMUTES or varying & over:
                raise StateError(
                    f"{self.where(eqn)} communicates over {_names(over)} ({name_of(inner)}) under a predicate "
                    f"that differs over {_names(varying)}: ranks that disagree would wait for each other for ever; "
                    "reduce the predicate first and use uniform_cond"
                )

    def decides(self, eqn: Any, differs: Axes, partials: Sequence[Any]) -> None:
        """Refuses a predicate that lets each rank choose what happens to its own addend of these values."""
        for axes in filter(None, (differs & _partial(v) for v in partials)):
            raise StateError(
                f"{self.where(eqn)} has a predicate that differs over {_names(axes)}, where a value that it decides "
                "about is PARTIAL: each rank would go its own way with its addend; choose before the partial is "
                "declared, or reduce the predicate first"
            )

    def cond(self, eqn: Any, real_in: list[Axes]) -> list[Axes]:
        branches = [opened(b) for b in eqn.params["branches"]]
        self.predicate(eqn, _varying(eqn.invars[0]) | real_in[0], branches)
        operands = enumerate(eqn.invars[1:])
        self.decides(eqn, real_in[0], [v for i, v in operands if not _only_passes(branches, i)])
        outs = [self.body(b, real_in[1:]) for b in branches]
        if real_in[0]:
            _widen(eqn, real_in)
        return [NONE.union(real_in[0], *axes) for axes in zip(*outs, strict=True)]

    def while_loop(self, eqn: Any, real_in: list[Axes]) -> list[Axes]:
        test, body = opened(eqn.params["cond_jaxpr"]), opened(eqn.params["body_jaxpr"])
        n_test, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test_consts, body_consts = real_in[:n_test], real_in[n_test : n_test + n_body]
        carry = real_in[n_test + n_body :]
        self.predicate(eqn, _varying(test.outvars[0]), [test, body])
        while True:
            held = _kept(real_in)
            decided = self.body(test, test_consts + carry)[0]
            grown = self.body(body, body_consts + carry)
            merged = [old | new for old, new in zip(carry, grown, strict=True)]
            if merged == carry and held == _kept(real_in):
                break
            carry = merged
        if decided:
            _widen(eqn, real_in)
        # A loop that ranks leave at different times leaves different values, but those still in it are in one round.
        changed = [new is not old for old, new in zip(body.invars[n_body:], body.outvars, strict=True)]
        self.decides(eqn, decided, [v for v, change in zip(eqn.outvars, changed, strict=True) if change])
        return [axes | decided if change else axes for axes, change in zip(carry, changed, strict=True)]

    def scan(self, eqn: Any, real_in: list[Axes]) -> list[Axes]:
        (body,) = subjaxprs(eqn)
        n_consts, n_carry = _scan_counts(eqn)
        consts, carry = real_in[:n_consts], real_in[n_consts : n_consts + n_carry]
        xs = real_in[n_consts + n_carry :]
        while True:
            held = _kept(real_in)
            out = self.body(body, consts + carry + xs)
            merged = [old | new for old, new in zip(carry, out[:n_carry], strict=True)]
            if merged == carry and held == _kept(real_in):
                return out[:n_carry] + out[n_carry:]
            carry = merged


def _scan_counts(eqn: Any) -> tuple[int, int]:
    """How many of a scan's operands are constants and how many are carried."""
    if "num_carry" in eqn.params:  # jax < 0.12
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].update(list(range(len(eqn.invars)))).unpack()
    return len(list(consts)), len(list(carry))


def _variables(*atoms: Sequence[Any]) -> Iterator[Any]:
    return (atom for some in atoms for atom in some if not isinstance(atom, core.Literal))


def _only_passes(bodies: Sequence[Any], index: int) -> bool:
    """Whether every body returns that operand in the same places, and nothing else reads it."""
    places = {tuple(out is body.invars[index] for out in body.outvars) for body in bodies}
    read = any(body.invars[index] in set(_variables(*(eqn.invars for eqn in body.eqns))) for body in bodies)
    return len(places) == 1 and not read


def _is_call(eqn: Any, body: Any) -> bool:
    """Whether the body runs on exactly the operands; a custom reduction's, for one, sees typeless scalars."""

    def types(variables: Sequence[Any]) -> list[Any]:
        return [getattr(v.aval, "mat", None) for v in variables]

    same = types(body.invars) == types(eqn.invars) and types(body.outvars) == types(eqn.outvars)
    return same and not _is_kernel(name_of(eqn))


def _joined(real: Sequence[Any]) -> Axes:
    """All axes of values; of references none."""
    return NONE.union(*(axes for axes in real if not isinstance(axes, _Held)))


def _kept(real: Sequence[Any]) -> list[Axes]:
    return [ref.axes for ref in real if isinstance(ref, _Held)]


def _widen(eqn: Any, real: Sequence[Any]) -> None:
    """Its references may hold anything that their types allow: some ranks wrote there and others did not."""
    for ref, var in zip(real, eqn.invars, strict=True):
        if isinstance(ref, _Held):
            ref.axes |= _varying(var) | _partial(var)


def _is_ref(var: Any) -> bool:
    return hasattr(var.aval, "inner_aval")


def _is_kernel(name: str) -> bool:
    """A kernel's body works on references, not on the values that the step passes around."""
    return name in ("pallas_call", "mpmd_map", "mosaic_gpu_call", "core_map", "run_scoped", "run_state")

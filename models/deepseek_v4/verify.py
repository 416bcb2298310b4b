"""`jaxcoll verify`: decode a golden fixture position by position, then greedily, and compare with its trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from models.deepseek_v4 import report
from models.deepseek_v4.compare import compare
from models.deepseek_v4.config import Config
from models.deepseek_v4.contents import hash_of
from models.deepseek_v4.decoder import TRACE
from models.deepseek_v4.requests import spread
from models.deepseek_v4.session import open_session
from models.deepseek_v4.trace import Trace
from models.options import VerifyOptions
from models.progress import Working


def run(options: VerifyOptions) -> int:
    """Runs the command; 0 equal, 1 not. Raises UserError for what cannot be compared."""
    with Working() as working:
        result, notes = verify(options, working)
    report.print_notes(notes)
    if options.json:
        print(json.dumps(result))
    else:
        _show(result, options.requests_per_replica)
    return 0 if result["ok"] else 1


def verify(options: VerifyOptions, working: Working) -> tuple[dict[str, Any], list[str]]:
    """Decodes and compares; returns the JSON's content and notes about what was ignored."""
    config = Config.from_folder(options.fixture)
    trace = Trace.load(options.fixture, config)
    session = open_session(
        options.fixture,
        config,
        options,
        working,
        requests=len(trace.input_ids),
        positions=trace.steps,
        what="the trace",
        counts=options.requests_per_replica,
        settings=options.paths.settings(),
        results=TRACE,
        contents={"contents of the trace": hash_of(trace.arrays)},
    )
    decoder = session.decoder
    result = compare(decoder, trace, session.homes, working) | {
        "topology": report.topology_json(decoder.topology),
        "plan": report.plan_json(decoder.plans[0]),
        "collectives": report.collectives_json(decoder.steps.values()),
    }
    return result, session.notes


def _show(result: dict[str, Any], requests_per_replica: Sequence[int] | None) -> None:
    console = Console(highlight=False)
    homes = spread(len(result["generated"]), result["topology"]["attn_dp"], requests_per_replica)
    console.print(report.topology_line(result["topology"]))
    report.print_table(
        console,
        "Largest absolute difference from the trace (streams as they enter)",
        report.differences_table(result["max_abs_err"]),
    )
    report.print_table(console, report.COLLECTIVES_TITLE, report.collectives_table(result["collectives"]))
    report.print_generated(console, result["generated"], homes)
    console.print(report.verdict(result))

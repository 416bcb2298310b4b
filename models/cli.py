"""The `jaxcoll` command: reads options, prepares the devices, then calls the module that does the work.

Nothing here imports jax before the options are known to be good. Exit codes: 0 done, 1 a check did not hold,
2 a request that cannot be served (one sentence on stderr), 130 interrupted, 141 nobody reads the output;
in a job of several processes also 75 a lost peer, 76 processes that disagree.
"""

import contextlib
import dataclasses
import importlib
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import tyro

from models.errors import UserError
from models.options import (
    BenchCollectivesOptions,
    BenchOptions,
    DemoOptions,
    ExplainOptions,
    GenerateOptions,
    LaunchOptions,
    MeshOptions,
    Options,
    VerifyOptions,
)
from models.planning_options import CompileOptions, PlanOptions
from models.startup import join_job, prepare_devices

COMMANDS: dict[str, type[Options]] = {
    "demo": DemoOptions,
    "verify": VerifyOptions,
    "generate": GenerateOptions,
    "bench": BenchOptions,
    "bench-collectives": BenchCollectivesOptions,
    "explain": ExplainOptions,
    "compile": CompileOptions,
    "plan": PlanOptions,
    "launch": LaunchOptions,
}
_COMMAND_LINE = (
    Annotated[DemoOptions, tyro.conf.subcommand("demo")]
    | Annotated[VerifyOptions, tyro.conf.subcommand("verify")]
    | Annotated[GenerateOptions, tyro.conf.subcommand("generate")]
    | Annotated[BenchOptions, tyro.conf.subcommand("bench")]
    | Annotated[BenchCollectivesOptions, tyro.conf.subcommand("bench-collectives")]
    | Annotated[ExplainOptions, tyro.conf.subcommand("explain")]
    | Annotated[CompileOptions, tyro.conf.subcommand("compile")]
    | Annotated[PlanOptions, tyro.conf.subcommand("plan")]
    | Annotated[LaunchOptions, tyro.conf.subcommand("launch")]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code; `argv` defaults to the process's arguments.

    In a job of several processes a failure ends this one here, so that it waits for nobody and the others hear why.
    """
    code, reason = _serve(sys.argv[1:] if argv is None else argv)
    if reason:
        print(f"jaxcoll: {reason}", file=sys.stderr)
    if code and _in_a_job():
        from jaxcoll.distributed import leave

        leave(code, reason)
    return code


def _serve(argv: Sequence[str]) -> tuple[int, str]:
    """The exit code of one command line, and why it was refused, if it was."""
    try:
        command, options = parse(argv)
        if isinstance(options, LaunchOptions):
            return _launch(options), ""
        prepare_devices(options.local_devices, cpu_only=options.cpu_only, quiet=options.compiles_for_gpus)
        code = _run(command, options)
        sys.stdout.flush()
        return code, ""
    except UserError as error:
        return _refused(str(error))
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it exits, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141, ""
    except OSError as error:
        return _refused(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        return 130, ""


def _refused(reason: str) -> tuple[int, str]:
    return 2, " ".join(reason.split())


def _in_a_job() -> bool:
    coordination = sys.modules.get("jaxcoll.coordination")  # nobody has joined one without it
    return coordination is not None and coordination.in_a_job()


def parse(argv: Sequence[str]) -> tuple[str, Options]:
    """Reads a command line into the subcommand's name and options.

    Raises:
        UserError: anything unknown, missing, ill-typed or contradictory.
        SystemExit: help was asked for and printed.
    """
    if not argv or argv[0] not in (*COMMANDS, "-h", "--help"):
        found = f"not {argv[0]!r}" if argv else "and none was given"
        raise UserError(f"the first word must be one of the commands {', '.join(COMMANDS)}, {found}")
    if argv[0] in COMMANDS:
        _check_option_names(argv[0], argv[1:])
    report = io.StringIO()
    try:
        with contextlib.redirect_stderr(report):
            options = tyro.cli(
                _COMMAND_LINE,
                prog="jaxcoll",
                description="Decode DeepSeek-V4 on a mesh of devices, and check or time it.",
                args=list(argv),
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(_sentence(report.getvalue())) from None
    options.check()
    return argv[0], options


def _check_option_names(command: str, words: Sequence[str]) -> None:
    """Refuses unknown options first: tyro would call them a missing value or a missing folder."""
    known = list(_option_names(COMMANDS[command]))
    for word in words:
        if word == "--":
            return
        name = word.partition("=")[0].replace("_", "-")
        if name.startswith("--") and name not in (*known, "--help"):
            raise UserError(f"{command} has no option {name}; its options are {', '.join(known)}")


def _option_names(options: type) -> Iterator[str]:
    """The options of a dataclass: fields with a default (a folder has none), nested groups included."""
    for field in dataclasses.fields(options):
        if isinstance(field.default_factory, type):
            yield from _option_names(field.default_factory)
        elif field.default is not dataclasses.MISSING:
            yield "--" + field.name.replace("_", "-")


def _sentence(report: str) -> str:
    """One sentence from tyro's report: a title, then paragraphs between rules, some repeating the help."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", report)
    body = "\n".join(line.strip("│ ") for line in plain.splitlines()[1:])
    paragraphs = [" ".join(part.split()) for part in re.split(r"^[─╰╯-]+$", body, flags=re.MULTILINE)]
    said = [p for p in paragraphs if p and not p.startswith(("For full helptext", "Argument helptext"))]
    text = "; ".join(said).removeprefix("Error parsing ")
    text = re.sub(r"^Missing value for argument '(.+?)'\. Expected.*", r"\1 needs a value", text)
    return re.sub(r"^Missing from jaxcoll (\S+): (\S+) (.*) \(required\)", r"\1 needs \2: \3", text)


def _launch(options: LaunchOptions) -> int:
    from jaxcoll.launch import LaunchError, launch

    try:
        return launch(
            options.command, options.processes, options.devices_per_process, grace_seconds=options.grace_seconds
        )
    except LaunchError as error:
        raise UserError(str(error)) from error


def _run(command: str, options: Options) -> int:
    """Imports the subcommand's module, and jax with it; what the lower layers refuse becomes a UserError."""
    try:
        if isinstance(options, MeshOptions):
            join_job(options.topology.sizes.world)
        work = importlib.import_module(f"models.deepseek_v4.{command.replace('-', '_')}")
    except UserError:  # a ValueError too
        raise
    except ValueError as error:  # jax reads its environment variables when it is imported
        raise UserError(f"jax cannot start: {error}") from error
    from jaxcoll.plan import PlanError
    from jaxcoll.settings import SettingsError
    from jaxcoll.states import StateError
    from jaxcoll.topology import TopologyError

    try:
        return work.run(options)
    except (PlanError, SettingsError, StateError, TopologyError) as error:
        raise UserError(str(error)) from error
    except RuntimeError as error:
        if str(error).startswith(("Unable to initialize backend", "RESOURCE_EXHAUSTED")):
            raise UserError(str(error)) from error
        raise


if __name__ == "__main__":
    sys.exit(main())

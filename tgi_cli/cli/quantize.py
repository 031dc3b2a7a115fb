"""``tgi quantize``: a smaller checkpoint out of a plain one; or what a checkpoint holds."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from tgi_cli.cli.parsers import ratio, whole
from tgi_cli.cli.setup import set_up_logs
from tgi_cli.errors import ExitCode

_GRID = "How weights are kept"
_SAMPLES = "Calibration"
_LAYERS = "Layers"
_RUN = "The run"
_WIDTHS = (2, 3, 4, 8)


def _bits(value: str) -> int:
    if value not in map(str, _WIDTHS):
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(map(str, _WIDTHS))}")
    return int(value)


def _group(value: str) -> int:
    try:
        size = int(value)
    except ValueError:
        size = -2
    if size < -1:
        raise typer.BadParameter(f"{value!r} is neither a number of inputs nor -1")
    return size


def quantize(
    context: typer.Context,
    model_id: Annotated[
        str, typer.Argument(metavar="MODEL_ID", help="A model of the hub, or a folder.")
    ],
    output_dir: Annotated[
        Path | None,
        typer.Argument(metavar="OUTPUT_DIR", help="The folder to be made.", show_default=False),
    ] = None,
    inspect: Annotated[
        bool, typer.Option("--inspect", help="Say what the checkpoint holds; make nothing.")
    ] = False,
    method: Annotated[
        Literal["gptq", "awq", "rtn", "fp8", "int8"],
        typer.Option(
            metavar="METHOD",
            help="gptq, awq (which look at calibration text), rtn (rounding), fp8 or int8.",
            rich_help_panel=_GRID,
        ),
    ] = "gptq",
    bits: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=_bits,
            help="2, 3, 4 or 8 (4; fp8 and int8 have 8).",
            show_default=False,
            rich_help_panel=_GRID,
        ),
    ] = None,
    groupsize: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=_group,
            help="Inputs that share a scale; -1: all of a row (128; fp8 and int8: -1, "
            "fp8 also 0: all of a weight).",
            show_default=False,
            rich_help_panel=_GRID,
        ),
    ] = None,
    sym: Annotated[
        bool | None,
        typer.Option(
            "--sym/--asym",
            help="Zero in the middle of the codes, or where it suits (awq: --asym, else --sym).",
            show_default=False,
            rich_help_panel=_GRID,
        ),
    ] = None,
    act_order: Annotated[
        bool,
        typer.Option(
            "--act-order/--no-act-order",
            help="gptq: columns in the order of their importance; a gather when served.",
            rich_help_panel=_GRID,
        ),
    ] = False,
    static_groups: Annotated[
        bool,
        typer.Option(
            "--static-groups",
            help="gptq: find all scales before any rounding.",
            rich_help_panel=_GRID,
        ),
    ] = False,
    group_aware: Annotated[
        bool | None,
        typer.Option(
            help="gptq: reorder within and among groups, which costs nothing when served "
            "(on without --act-order).",
            show_default=False,
            rich_help_panel=_GRID,
        ),
    ] = None,
    mse: Annotated[
        bool,
        typer.Option(
            "--mse", help="Search the scales with the least squared error.", rich_help_panel=_GRID
        ),
    ] = False,
    percdamp: Annotated[
        float,
        typer.Option(
            metavar="X",
            parser=ratio,
            help="gptq: share of the Hessian's mean diagonal that is added to it.",
            rich_help_panel=_GRID,
        ),
    ] = 0.01,
    format: Annotated[
        Literal["gptq", "gptq_v2", "awq", "compressed-tensors"] | None,
        typer.Option(
            metavar="FORMAT",
            help="gptq, gptq_v2, awq or compressed-tensors, which is that of fp8 and int8 (the "
            "method's; with --asym gptq_v2).",
            show_default=False,
            rich_help_panel=_GRID,
        ),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(parser=_group, help="The same as --groupsize.", hidden=True)
    ] = None,
    desc_act: Annotated[bool, typer.Option(help="The same as --act-order.", hidden=True)] = False,
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|DATASET",
            help="Text: .txt, .jsonl, .parquet, a data set of the hub (NAME or NAME:SUBSET), or "
            "'bundled' (wikitext2, or the bundled text where the hub cannot be reached).",
            show_default=False,
            rich_help_panel=_SAMPLES,
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(metavar="N", parser=whole(1), help="As many.", rich_help_panel=_SAMPLES),
    ] = 128,
    seq_len: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=whole(2),
            help="Tokens of each (2048, less for short texts and contexts).",
            show_default=False,
            rich_help_panel=_SAMPLES,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N", parser=whole(0), help="Of their choice.", rich_help_panel=_SAMPLES
        ),
    ] = 0,
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Only layers with such a name: '*.down_proj'. May be given again.",
            show_default=False,
            rich_help_panel=_LAYERS,
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="No layer with such a name. May be given again.",
            show_default=False,
            rich_help_panel=_LAYERS,
        ),
    ] = None,
    evaluate: Annotated[
        bool,
        typer.Option(
            "--evaluate",
            help="Compare with the original in the end: perplexity, KL divergence, top-1.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with a run that was stopped.", rich_help_panel=_RUN),
    ] = False,
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option(
            help="Where to compute (CUDA where there is one).",
            show_default=False,
            rich_help_panel=_RUN,
        ),
    ] = None,
    backend: Annotated[
        Literal["builtin", "gptqmodel"],
        typer.Option(help="Whose arithmetic.", rich_help_panel=_RUN),
    ] = "builtin",
    upload_to_model_id: Annotated[
        str | None,
        typer.Option(metavar="MODEL_ID", help="A repository for the result.", rich_help_panel=_RUN),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(help="A branch, a tag, a commit or refs/pr/N.", rich_help_panel=_RUN),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run Python code that comes with the model.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    logger_level: Annotated[
        str,
        typer.Option(
            help="debug, info, warning or error.", envvar="LOG_LEVEL", rich_help_panel=_RUN
        ),
    ] = "INFO",
    json_output: Annotated[
        bool,
        typer.Option(
            "--json-output", help="Log lines and the result as JSON.", rich_help_panel=_RUN
        ),
    ] = False,
) -> None:
    """Make a quantized checkpoint of a model, for tgi, vLLM and transformers.

    One block of the model is in memory at a time. OUTPUT_DIR is there when it is whole; a run
    that was stopped goes on with --resume.
    """
    from tgi_cli.quantize.command import run
    from tgi_cli.quantize.options import QuantizeOptions

    set_up_logs("quantize", logger_level, json_output)
    options = QuantizeOptions(
        model_id=model_id,
        output_dir=output_dir,
        inspect=inspect,
        method=method,
        bits=bits,
        group_size=group_size if groupsize is None else groupsize,
        sym=sym,
        act_order=act_order or desc_act,
        static_groups=static_groups,
        group_aware=group_aware,
        mse=mse,
        percdamp=percdamp,
        format=format,
        calibration=calibration,
        samples=samples,
        seq_len=seq_len,
        seed=seed,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        evaluate=evaluate,
        resume=resume,
        device=device,
        backend=backend,
        upload_to_model_id=upload_to_model_id,
        revision=revision,
        trust_remote_code=trust_remote_code,
        json_output=json_output,
    )
    command = _command_line(context)
    try:
        run(options, command)
    except KeyboardInterrupt:
        message = "interrupted: nothing was made"
        if output_dir and output_dir.with_name(f"{output_dir.name}.partial").exists():
            message = f"interrupted; to go on: {command.removesuffix(' --resume')} --resume"
        print(message, file=sys.stderr)
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _command_line(context: typer.Context) -> str:
    """What was typed, spelled out: arguments, then flags that were given."""
    arguments, flags = [], []
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        value = context.params.get(name)
        if source is None or source.name != "COMMANDLINE" or value is None:
            continue
        if parameter.param_type_name == "argument":
            arguments.append(str(value))
        elif isinstance(value, bool):
            spelled = parameter.opts if value else parameter.secondary_opts
            flags.append(spelled[0])
        elif isinstance(value, list | tuple):
            flags += [part for each in value for part in (parameter.opts[0], str(each))]
        else:
            flags += [parameter.opts[0], str(value)]
    return shlex.join(["tgi", "quantize", *arguments, *flags])

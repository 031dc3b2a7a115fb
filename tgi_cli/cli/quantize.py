"""``tgi quantize``: a smaller checkpoint out of a plain one; or what a checkpoint holds."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tgi_cli.cli.parsers import ratio, whole
from tgi_cli.cli.setup import set_up_logs
from tgi_cli.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from tgi_cli.quantization.algorithms.recipe import Recipe
    from tgi_cli.quantize.pipeline import Job

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
    from tgi_cli import hub

    set_up_logs("quantize", logger_level, json_output)
    if inspect:
        if output_dir is not None:
            raise ConfigError("--inspect makes nothing", f"leave out {output_dir}")
        _inspect(model_id, revision, trust_remote_code, device, json_output)
        return
    if output_dir is None:
        raise ConfigError("no OUTPUT_DIR is named", "tgi quantize MODEL_ID OUTPUT_DIR")
    from tgi_cli.quantization.algorithms.checks import check
    from tgi_cli.quantize import report
    from tgi_cli.quantize.hub_upload import check_upload, upload
    from tgi_cli.quantize.pipeline import Job

    recipe = _recipe(context.params)
    check(recipe)
    if upload_to_model_id is not None:
        check_upload(upload_to_model_id)
    command = _command_line(context)
    interrupted = f"interrupted; to go on: {command} --resume"
    try:
        folder = hub.resolve_model(
            model_id,
            revision=revision,
            trust_remote_code=trust_remote_code,
            progress=hub.pick_progress(json_output=json_output),
        )
        outcome = _run(
            Job(
                model=folder.path,
                out=output_dir,
                recipe=recipe,
                name=model_id,
                calibration=calibration,
                samples=samples,
                seq_len=seq_len,
                seed=seed,
                device=device,
                include=tuple(include or ()),
                exclude=tuple(exclude or ()),
                trust_remote_code=trust_remote_code,
                evaluate=evaluate,
                resume=resume,
                command=command,
            ),
            backend,
            json_output,
        )
    except KeyboardInterrupt:
        started = output_dir.with_name(f"{output_dir.name}.partial").exists()
        again = interrupted.replace("--resume --resume", "--resume")
        print(again if started else "interrupted: nothing was made", file=sys.stderr)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    address = None if upload_to_model_id is None else upload(output_dir, upload_to_model_id)
    report.show_outcome(outcome, json_output, address)


def _recipe(given: dict[str, Any]) -> Recipe:
    """What the flags of the first panel ask for."""
    from tgi_cli.quantization.algorithms.checks import default_format
    from tgi_cli.quantization.algorithms.recipe import Recipe

    method = given["method"]
    eight = method in ("fp8", "int8")
    group = given["group_size"] if given["groupsize"] is None else given["groupsize"]
    default_group = -1 if eight else 128
    symmetric = method != "awq" if given["sym"] is None else given["sym"]
    by_importance = given["act_order"] or given["desc_act"]
    within = given["group_aware"]
    return Recipe(
        method=method,
        bits=given["bits"] or (8 if eight else 4),
        group_size=default_group if group is None else group,
        sym=symmetric,
        desc_act=by_importance,
        static_groups=given["static_groups"],
        group_aware=method == "gptq" and not by_importance if within is None else within,
        mse=given["mse"],
        percdamp=given["percdamp"],
        format=given["format"] or default_format(method, symmetric),
    )


def _run(job: Job, backend: str, json_output: bool) -> Any:
    if backend == "gptqmodel":
        from tgi_cli.quantize import gptqmodel

        return gptqmodel.quantize(job)
    from tgi_cli.quantize.pipeline import quantize
    from tgi_cli.quantize.progress import BlockProgress

    return quantize(job, BlockProgress(json_output=json_output))


def _inspect(
    model_id: str,
    revision: str | None,
    trust_remote_code: bool,
    device: str | None,
    json_output: bool,
) -> None:
    from tgi_cli import hub
    from tgi_cli.models.inspect import describe
    from tgi_cli.quantize import report

    folder = hub.resolve_model(
        model_id,
        revision=revision,
        trust_remote_code=trust_remote_code,
        progress=hub.pick_progress(json_output=json_output),
    )
    report.show_inspection(model_id, describe(folder.path, device), json_output)


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

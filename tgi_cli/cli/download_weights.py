"""``tgi download-weights``: a model's files onto this machine, before it is served."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def download_weights(
    model_id: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_ID",
            help="A model of the hub, or a folder to be checked.",
            envvar="MODEL_ID",
        ),
    ],
    revision: Annotated[
        str | None,
        typer.Option(help="A branch, a tag, a commit or refs/pr/N.", envvar="REVISION"),
    ] = None,
    extension: Annotated[str, typer.Option(help="The weight files to take.")] = ".safetensors",
    auto_convert: Annotated[
        bool, typer.Option(help="Convert weights that come as .bin only to safetensors.")
    ] = True,
    merge_lora: Annotated[
        bool, typer.Option(help="Of a PEFT adapter: merge it into its base model.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Take the model's Python files too.", envvar="TRUST_REMOTE_CODE")
    ] = False,
    logger_level: Annotated[
        str, typer.Option(help="debug, info, warning or error.", envvar="LOG_LEVEL")
    ] = "INFO",
    json_output: Annotated[
        bool, typer.Option(help="Log lines as JSON.", envvar="JSON_OUTPUT")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="No progress; only warnings and errors.")
    ] = False,
) -> None:
    """Download what serving a model needs; print the folder it is in.

    Goes on where an earlier run was cut; checks sizes and checksums.
    HF_TOKEN, HF_HUB_CACHE, HF_HUB_OFFLINE and HF_ENDPOINT are honoured.
    """
    from tgi_cli import hub, logging
    from tgi_cli.errors import ConfigError, ExitCode

    try:
        logging.setup("download", "WARNING" if quiet else logger_level, json_output)
    except ValueError as error:
        raise ConfigError(f"--logger-level: {error}") from error
    try:
        model = hub.resolve_model(
            model_id,
            revision=revision,
            trust_remote_code=trust_remote_code,
            extension=extension,
            auto_convert=auto_convert,
            merge_lora=merge_lora,
            progress=hub.pick_progress(quiet=quiet, json_output=json_output),
        )
    except KeyboardInterrupt:
        print("interrupted: run the same again and it goes on where it stopped", file=sys.stderr)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    print(model.path)

"""``tgi download-weights``: a model's files onto this machine, before it is served."""

from __future__ import annotations

import sys

import typer

from tgi_cli.cli import setup
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.settings_flags import takes
from tgi_cli.config.settings import DOWNLOAD
from tgi_cli.errors import ConfigError, ExitCode


@takes(DOWNLOAD)
def download_weights(given: ParsedSettings) -> None:
    """Download what serving a model needs; print the folder it is in.

    Goes on where an earlier run was cut; checks sizes and checksums.
    HF_TOKEN, HF_HUB_CACHE, HF_HUB_OFFLINE and HF_ENDPOINT are honoured.
    """
    from tgi_cli import hub

    quiet, json_output = given["quiet"], given["json_output"]
    level = "WARNING" if quiet else given["logger_level"]
    setup.set_up_logs("download", level, json_output)
    given.explain()
    given.export()
    if not given["model_id"]:
        raise ConfigError("no model is named", "give MODEL: an id of the hub, or a folder")
    try:
        model = hub.resolve_model(
            given["model_id"],
            revision=given["revision"],
            trust_remote_code=given["trust_remote_code"],
            extension=given["extension"],
            auto_convert=given["auto_convert"],
            merge_lora=given["merge_lora"],
            progress=hub.download_progress(quiet=quiet, json_output=json_output),
        )
    except KeyboardInterrupt:
        print("interrupted: run the same again and it goes on where it stopped", file=sys.stderr)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    print(model.path)

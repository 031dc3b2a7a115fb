"""``tgi download-weights``: download a model before serving it."""

from __future__ import annotations

import sys

import typer

from tgi_cli.cli import setup
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.settings_flags import takes
from tgi_cli.config.settings.setting import DOWNLOAD
from tgi_cli.errors import ConfigError, ExitCode


@takes(
    DOWNLOAD,
    ("tgi download-weights Qwen/Qwen3-0.6B", "into the hub's cache"),
    ("tgi download-weights org/model --revision v1.1", "a tag, branch or commit"),
)
def download_weights(settings: ParsedSettings) -> None:
    """Download a model; print the folder of its files.

    Downloads what serving needs. Resumes an interrupted download; verifies sizes and checksums.
    HF_TOKEN, HF_HUB_CACHE, HF_HUB_OFFLINE and HF_ENDPOINT apply.
    """
    from tgi_cli.hub.download import download_progress
    from tgi_cli.hub.resolve import resolve_model

    quiet, json_output = settings["quiet"], settings["json_output"]
    setup.prepare(settings, "download", "WARNING" if quiet else settings["logger_level"])
    if not settings["model_id"] and settings["model_gguf"] is None:
        raise ConfigError("MODEL is missing", "give a model id on the hub, or a local folder")
    try:
        model = resolve_model(
            settings["model_id"] or "",
            revision=settings["revision"],
            trust_remote_code=settings["trust_remote_code"],
            extension=settings["extension"],
            auto_convert=settings["auto_convert"],
            merge_lora=settings["merge_lora"],
            gguf=settings["model_gguf"],
            tokenizer=settings["tokenizer_name"],
            progress=download_progress(quiet=quiet, json_output=json_output),
        )
    except KeyboardInterrupt:
        print("interrupted: run the same command again to resume", file=sys.stderr)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    print(model.path)

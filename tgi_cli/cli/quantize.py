"""``tgi quantize``: create a smaller checkpoint of a model, or describe a checkpoint."""

from __future__ import annotations

import shlex
import sys

import typer

from tgi_cli.cli.log_setup import set_up_logs
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.settings_flags import takes
from tgi_cli.config.settings.setting import QUANTIZE
from tgi_cli.errors import ExitCode


@takes(
    QUANTIZE,
    ("tgi quantize org/model ./model-4bit", "GPTQ, 4 bits"),
    ("tgi quantize org/model ./model-awq --method awq --evaluate", "compare, too"),
    ("tgi quantize --inspect ./model-4bit", "describe it"),
)
def quantize(settings: ParsedSettings) -> None:
    """Create a quantized checkpoint of a model.

    tgi, vLLM and transformers can load it. Holds one block of the model in memory at a time.
    OUTPUT_DIR appears once it is complete; an interrupted run continues with --resume.
    """
    from tgi_cli.quantize.command import run
    from tgi_cli.quantize.options import QuantizeOptions

    set_up_logs("quantize", settings["logger_level"], settings["json_output"])
    patterns = {name: tuple(settings[name] or ()) for name in ("include", "exclude")}
    options = QuantizeOptions(**settings.fields_of(QuantizeOptions) | patterns)
    command = shlex.join(settings.command_line())
    try:
        run(options, command)
    except KeyboardInterrupt:
        output, message = options.output_dir, "interrupted: nothing was made"
        if output and output.with_name(f"{output.name}.partial").exists():
            message = f"interrupted; to go on: {command.removesuffix(' --resume')} --resume"
        print(message, file=sys.stderr)
        raise typer.Exit(ExitCode.INTERRUPTED) from None

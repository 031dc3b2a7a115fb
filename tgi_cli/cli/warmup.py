"""``tgi warmup``: what can be made ready before a model is served, and how fast it will be."""

from __future__ import annotations

import json
import time
from typing import Any

from tgi_cli.cli import setup
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.settings_flags import takes
from tgi_cli.config.settings import WARMUP
from tgi_cli.errors import ConfigError


@takes(WARMUP)
def warmup(given: ParsedSettings) -> None:
    """Compile and measure what a server would at its start, so that `tgi serve` starts faster.

    With MODEL: runs its worst steps, keeps what they took for later starts with the same
    settings, and prints how long steps take. With --url: sends a running server prompts of all
    sizes. With neither: compiles the kernels for this machine's CPU, if they are not there yet
    (installing the package does that too where there is a C++ compiler; without them the CPU
    computes with torch's operations, several times slower).
    """
    setup.prepare(given, "warmup")
    if given["url"] is not None:
        _warm_server(given)
        return
    model = given["model_id"]
    compiled = _compile(needed=not model)
    if model:
        _measure(given, compiled)
    elif given["json_output"]:
        print(json.dumps(compiled))
    else:
        print(f"kernels for {compiled['kernels'].replace('_', ' ')}: {compiled['path']}")


def _compile(needed: bool) -> dict[str, Any]:
    """The kernels for the CPU: which, where, and how long it took; empty where there are none.

    Raises:
        ConfigError: there can be none, and they are all that is wanted.
    """
    from rich.console import Console

    from tgi_cli.kernels import build
    from tgi_cli.kernels.library import best_level

    level = best_level() if build.supported() else None
    if level is None:
        if not needed:
            return {}
        raise ConfigError(
            "there are no kernels for this processor: they are for x86-64 with AVX2, on Linux",
            "serving works without them, with torch's operations",
        )
    began = time.monotonic()
    try:
        with Console(stderr=True).status("compiling the kernels for the CPU"):
            path = build.build_for_use(level)
    except (build.BuildError, OSError) as error:
        if not needed:
            return {}  # the model's start says what it means
        raise ConfigError(
            f"the kernels cannot be compiled: {error}",
            "install g++ or clang++ (or set CXX); serving works without, several times slower",
        ) from error
    seconds = round(time.monotonic() - began, 3)
    return {"kernels": level, "path": str(path), "seconds": seconds}


def _measure(given: ParsedSettings, compiled: dict[str, Any]) -> None:
    from rich.console import Console

    from tgi_cli.cli.local_model import locate
    from tgi_cli.cli.warmup_report import print_model
    from tgi_cli.config import ServeConfig
    from tgi_cli.process.progress import ProgressReporter
    from tgi_cli.worker.sizing.warmup_command import measure

    config = ServeConfig(**given.fields_of(ServeConfig) | {"model_id": given["model_id"]})
    config, path = locate(config)
    progress = ProgressReporter(show_bar=False)
    with Console(stderr=True).status("") as status, progress:
        progress.start("loading weights", 0)
        found = measure(config, path, given["batch_sizes"], status.update, progress.update)
    found["compiled"] = compiled
    if given["json_output"]:
        print(json.dumps(found))
    else:
        print_model(found)


def _warm_server(given: ParsedSettings) -> None:
    from rich.console import Console

    from tgi_cli.cli.warmup_report import print_server
    from tgi_cli.cli.warmup_server import warm_server

    if given["model_id"] and given.said("model_id"):
        raise ConfigError(
            "--url names a running server, which has its model", "give MODEL or --url"
        )
    key = setup.checked_key(given)
    with Console(stderr=True).status("") as status:
        found = warm_server(given["url"], key, given["batch_sizes"], status.update)
    if given["json_output"]:
        print(json.dumps(found))
    else:
        print_server(found)

"""``tgi warmup``: what can be made ready before a model is served."""

from __future__ import annotations

from typing import Annotated

import typer


def warmup(
    json_output: Annotated[
        bool, typer.Option("--json-output", help="Print the result as JSON.", envvar="JSON_OUTPUT")
    ] = False,
) -> None:
    """Compile the kernels for this machine's CPU, if they are not there yet.

    Installing the package does that too where there is a C++ compiler (g++, clang++ or what CXX
    names). Without them the CPU computes with torch's operations, several times slower.
    """
    import json
    import time

    from rich.console import Console

    from tgi_cli.errors import ConfigError
    from tgi_cli.kernels import build
    from tgi_cli.kernels.library import best_level

    level = best_level() if build.supported() else None
    if level is None:
        raise ConfigError(
            "there are no kernels for this processor: they are for x86-64 with AVX2, on Linux",
            "serving works without them, with torch's operations",
        )
    console = Console(stderr=True)
    began = time.monotonic()
    try:
        with console.status("compiling the kernels for the CPU"):
            path = build.build_for_use(level)
    except (build.BuildError, OSError) as error:
        raise ConfigError(
            f"the kernels cannot be compiled: {error}",
            "install g++ or clang++ (or set CXX); serving works without, several times slower",
        ) from error
    seconds = time.monotonic() - began
    if json_output:
        print(json.dumps({"kernels": level, "path": str(path), "seconds": round(seconds, 3)}))
    else:
        print(f"kernels for {level.replace('_', ' ')}: {path}")

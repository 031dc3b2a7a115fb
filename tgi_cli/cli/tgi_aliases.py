"""TGI's programs, with TGI's commands, flags and defaults.

Installed as ``text-generation-launcher``, ``text-generation-router``, ``text-generation-server``
and ``text-generation-benchmark``, so that start scripts, charts and tests for TGI work unchanged.
Each function returns the exit code; its arguments are by default those of the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from tgi_cli.cli.help import ProgramHelp
from tgi_cli.cli.main import run
from tgi_cli.errors import ExitCode

SHARD_PREFIX = "/tmp/text-generation-server"

LAUNCHER_DEFAULTS: Mapping[str, str] = {
    "model_id": "bigscience/bloom-560m",
    "shard_uds_path": SHARD_PREFIX,
}
ROUTER_DEFAULTS: Mapping[str, str] = {
    "tokenizer_name": "bigscience/bloom",
    "master_shard_uds_path": f"{SHARD_PREFIX}-0",
    "waiting_served_ratio": "1.2",
    "max_batch_prefill_tokens": "4096",
    "max_waiting_tokens": "20",
}
SERVER_DEFAULTS: Mapping[str, str] = {
    "shard_uds_path": SHARD_PREFIX,
    "otlp_service_name": "text-generation-inference.server",
}


_LAUNCHER = ProgramHelp(
    "text-generation-launcher",
    "Serve a model, with the flags and variables of TGI's launcher.\n\n"
    "Runs `tgi serve` with TGI's default model and socket.",
)
_ROUTER = ProgramHelp(
    "text-generation-router",
    "Serve HTTP in front of a shard, with the flags and variables of TGI's router.\n\n"
    "Runs `tgi router` with TGI's defaults. `text-generation-router print-schema` prints the "
    "OpenAPI document.",
)
_BENCHMARK = ProgramHelp(
    "text-generation-benchmark",
    "Benchmark a shard, with the flags of TGI's benchmark.\n\n"
    "Runs `tgi bench`: `-t MODEL` names the tokenizer and the running shard's socket is "
    "/tmp/text-generation-server-0.",
)
_SHARD = ProgramHelp(
    "text-generation-server serve",
    "Run a model behind a unix socket, with the flags of TGI's shard.\n\n"
    "Runs `tgi model-server` with TGI's socket.",
)
_DOWNLOAD = ProgramHelp(
    "text-generation-server download-weights",
    "Download a model; print the folder of its files.\n\nRuns `tgi download-weights`.",
)
_QUANTIZE = ProgramHelp(
    "text-generation-server quantize",
    "Create a quantized checkpoint of a model.\n\nRuns `tgi quantize`.",
)


def launcher(arguments: Sequence[str] | None = None) -> int:
    """``text-generation-launcher``: ``tgi serve``."""
    return _run("serve", _words(arguments), _LAUNCHER, LAUNCHER_DEFAULTS)


def router(arguments: Sequence[str] | None = None) -> int:
    """``text-generation-router``: ``tgi router``, and ``print-schema``."""
    words = _words(arguments)
    if "print-schema" in words:
        from tgi_cli.router.app import schema  # brings starlette

        print(schema())
        return ExitCode.OK
    return _run("router", words, _ROUTER, ROUTER_DEFAULTS)


def server(arguments: Sequence[str] | None = None) -> int:
    """``text-generation-server``: ``tgi model-server``, ``download-weights``, ``quantize``."""
    command, *rest = _words(arguments) or ["--help"]
    if command == "serve":
        return _serve_shard(rest)
    if command in ("download-weights", "quantize"):
        return _run(command, rest, _DOWNLOAD if command == "download-weights" else _QUANTIZE)
    if command in ("-h", "--help"):
        print(
            "Usage: text-generation-server COMMAND [ARGS]...\n\n"
            "  serve MODEL                    tgi model-server\n"
            "  download-weights MODEL         tgi download-weights\n"
            "  quantize MODEL OUTPUT_FOLDER   tgi quantize"
        )
        return ExitCode.OK
    return run([command, *rest])  # --version, or an unknown command


def benchmark(arguments: Sequence[str] | None = None) -> int:
    """``text-generation-benchmark``: ``tgi bench``."""
    return _run("bench", _words(arguments), _BENCHMARK)


def _words(arguments: Sequence[str] | None) -> list[str]:
    return list(sys.argv[1:] if arguments is None else arguments)


def _run(
    command: str,
    arguments: list[str],
    program: ProgramHelp,
    defaults: Mapping[str, str] | None = None,
) -> int:
    if arguments in (["--version"], ["-V"]):
        return run(arguments)
    unparsed = None if defaults is None else {command: dict(defaults)}
    return run([command, *arguments], unparsed, program)


def _serve_shard(arguments: list[str]) -> int:
    """``serve``: TGI's launcher runs it for each shard; here shard 0 starts the others."""
    words = []
    for word in arguments:
        flag, equals, value = word.partition("=")
        words.append(f"--shard-uds-path{equals}{value}" if flag == "--uds-path" else word)
    defaults = dict(SERVER_DEFAULTS)
    if "--sharded" in words:
        words.remove("--sharded")
        if os.environ.get("RANK", "0") != "0":
            print(
                "error: shard 0 starts the others itself\n"
                "       start `text-generation-server serve --sharded` once, with RANK=0",
                file=sys.stderr,
            )
            return ExitCode.USAGE
        defaults["num_shard"] = os.environ.get("WORLD_SIZE", "1")
    return _run("model-server", words, _SHARD, defaults)

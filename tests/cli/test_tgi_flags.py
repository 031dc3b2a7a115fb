"""Every flag and variable of TGI 3.3's programs: accepted, and acted on or answered by a line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

import tgi_cli.model_server.main as model_server_module
import tgi_cli.router.server as router_server
from tgi_cli import demo
from tgi_cli.cli import main, tgi_aliases
from tgi_cli.cli.commands import COMMANDS
from tgi_cli.config.settings import settings_of
from tgi_cli.config.settings.setting import SERVE
from tgi_cli.errors import ExitCode
from tgi_cli.model_server.config import ModelServerConfig

SHARD = "/tmp/text-generation-server"
INFERENCE = "text-generation-inference"
MODEL = str(demo.model_path())


class Row(NamedTuple):
    """A flag of TGI.

    ``default`` is TGI's, except for two limits: TGI fetches images of 1 GiB, and its 2 MB for a
    request's body are too small for a photo, so that models that take images have another one.
    ``effect`` is the field of ServeConfig or RouterConfig that it sets (``=``: that of its own
    name; ``value`` is what it has then), or, behind ``note:``, words of the line that it is
    answered with.
    """

    flag: str
    default: Any
    word: str | None
    effect: str
    value: Any = None

    @property
    def name(self) -> str:
        """Of its setting."""
        return self.flag[2:].replace("-", "_")

    @property
    def words(self) -> list[str]:
        """As it is typed."""
        return [self.flag] if self.word is None else [self.flag, self.word]


LAUNCHER = [
    Row("--model-id", "bigscience/bloom-560m", "org/m", "=", "org/m"),
    Row("--revision", None, "refs/pr/2", "=", "refs/pr/2"),
    Row("--validation-workers", 2, "3", "=", 3),
    Row("--sharded", None, "true", "=", True),
    Row("--sharded", None, "false", "=", False),
    Row("--num-shard", None, "2", "=", 2),
    Row("--quantize", None, "bitsandbytes-nf4", "=", "bitsandbytes-nf4"),
    Row("--quantize", None, "eetq", "=", "eetq"),
    Row("--speculate", None, "2", "=", 2),
    Row("--speculate", None, "0", "=", 0),
    Row("--dtype", None, "float16", "=", "float16"),
    Row("--kv-cache-dtype", "auto", "fp8_e5m2", "=", "fp8_e5m2"),
    Row("--trust-remote-code", False, None, "=", True),
    Row("--max-concurrent-requests", 128, "9", "=", 9),
    Row("--max-best-of", 2, "3", "=", 3),
    Row("--max-stop-sequences", 4, "5", "=", 5),
    Row("--max-top-n-tokens", 5, "6", "=", 6),
    Row("--max-input-tokens", None, "70", "=", 70),
    Row("--max-input-length", None, "71", "max_input_tokens", 71),
    Row("--max-total-tokens", None, "80", "=", 80),
    Row("--waiting-served-ratio", None, "1.2", "=", 1.2),
    Row("--max-batch-prefill-tokens", None, "90", "=", 90),
    Row("--max-batch-total-tokens", None, "91", "=", 91),
    Row("--max-waiting-tokens", None, "21", "=", 21),
    Row("--max-batch-size", None, "22", "=", 22),
    Row("--cuda-graphs", None, "1,2,4", "=", (1, 2, 4)),
    Row("--hostname", "0.0.0.0", "127.0.0.1", "=", "127.0.0.1"),
    Row("--port", 3000, "8080", "=", 8080),
    Row("-p", 3000, "8080", "port", 8080),
    Row("--prometheus-port", 9000, "9001", "note: on the HTTP port, under /metrics"),
    Row("--shard-uds-path", SHARD, "/tmp/x", "=", Path("/tmp/x")),
    Row("--master-addr", "localhost", "other", "=", "other"),
    Row("--master-port", 29500, "29501", "=", 29501),
    Row("--huggingface-hub-cache", None, "/data", "environment"),
    Row("--weights-cache-override", None, "/data", "environment"),
    Row("--disable-custom-kernels", False, None, "=", True),
    Row("--cuda-memory-fraction", 1.0, "0.5", "=", 0.5),
    Row("--rope-scaling", None, "dynamic", "=", "dynamic"),
    Row("--rope-factor", None, "2.0", "=", 2.0),
    Row("--json-output", False, None, "=", True),
    Row("--otlp-endpoint", None, "http://c:4317", "=", "http://c:4317"),
    Row("--otlp-service-name", "text-generation-inference.router", "me", "=", "me"),
    Row("--cors-allow-origin", None, "https://a.b", "=", ("https://a.b",)),
    Row("--api-key", None, "secret", "=", "secret"),
    Row("--watermark-gamma", 0.5, "0.25", "=", 0.25),
    Row("--watermark-delta", 2.0, "1.5", "=", 1.5),
    Row("--ngrok", False, None, "error: no tunnel through ngrok"),
    Row("--ngrok-authtoken", None, "t", "note: no tunnel is opened"),
    Row("--ngrok-edge", None, "e", "note: no tunnel is opened"),
    Row("--tokenizer-config-path", None, "/t.json", "=", Path("/t.json")),
    Row("--disable-grammar-support", False, None, "=", True),
    Row("--env", False, None, "note: environment:"),
    Row("-e", False, None, "note: torch: "),
    Row("--max-client-batch-size", 4, "5", "=", 5),
    Row("--lora-adapters", (), "a/b@c,d=/e", "=", ("a/b@c", "d=/e")),
    Row("--usage-stats", "on", "off", "note: nothing is ever sent"),
    Row("--usage-stats", "on", "no-stack", "note: nothing is ever sent"),
    Row("--payload-limit", None, "10", "=", 10),
    Row("--enable-prefill-logprobs", False, None, "note: decoder_input_details"),
    Row("--max-image-fetch-size", 32 << 20, "9", "=", 9),
    Row("--graceful-termination-timeout", 90, "7", "=", 7),
    Row("-g", 90, "7", "graceful_termination_timeout", 7),
]  # fmt: skip


def ids(rows: list[Row]) -> Iterator[str]:
    return (f"{row.flag} {row.word or ''}".strip() for row in rows)


def check(row: Row, status: int, told: dict[str, Any], said: str) -> None:
    """That a run did with a flag what its row says."""
    kind, _, words = row.effect.partition(": ")
    if kind == "error":
        assert status == ExitCode.USAGE
        assert words in said
        return
    assert status == ExitCode.OK, said
    if kind == "note":
        assert words in said
        assert said.count(words) == 1
    elif kind != "environment":
        field = row.name if kind == "=" else kind
        owners = [part for part in told.values() if hasattr(part, field)]
        assert owners
        assert {getattr(part, field) for part in owners} == {row.value}


@pytest.mark.parametrize("row", LAUNCHER, ids=ids(LAUNCHER))
def test_each_flag_of_the_launcher_has_its_effect(
    row: Row, served: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    status = tgi_aliases.launcher(row.words)
    check(row, status, served, capsys.readouterr().err)


@pytest.mark.parametrize(
    "row",
    [row for row in LAUNCHER if row.flag.startswith("--") and row.flag != "--env"],
    ids=lambda row: f"{row.name.upper()}={row.word}",
)
def test_each_variable_of_the_launcher_has_its_effect(
    row: Row,
    served: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(row.name.upper(), row.word or "true")
    check(row, tgi_aliases.launcher([]), served, capsys.readouterr().err)


def test_each_default_of_the_launcher_is_tgis() -> None:
    table = {setting.flag: setting.default for setting in settings_of(SERVE)}
    for row in LAUNCHER:
        if row.flag.startswith("--"):
            default = tgi_aliases.LAUNCHER_DEFAULTS.get(row.name, table[row.flag])
            assert default == row.default, row.flag


def test_settings_that_libraries_read_are_exported(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    flags = ["--huggingface-hub-cache", "/a", "--weights-cache-override", "/b"]
    assert main.run(["serve", *flags, "--disable-custom-kernels"]) == ExitCode.OK
    assert os.environ["HF_HUB_CACHE"] == "/a"
    assert os.environ["WEIGHTS_CACHE_OVERRIDE"] == "/b"
    assert os.environ["DISABLE_CUSTOM_KERNELS"] == "true"


def test_only_settings_that_were_made_are_logged(
    served: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tgi_aliases.launcher(["--prometheus-port", "0"]) == ExitCode.OK
    assert capsys.readouterr().err == ""


ROUTER = [
    Row("--max-concurrent-requests", 128, "9", "=", 9),
    Row("--max-best-of", 2, "3", "=", 3),
    Row("--max-stop-sequences", 4, "5", "=", 5),
    Row("--max-top-n-tokens", 5, "6", "=", 6),
    Row("--max-input-tokens", None, "70", "=", 70),
    Row("--max-total-tokens", None, "80", "=", 80),
    Row("--waiting-served-ratio", 1.2, "2", "note: the model server decides"),
    Row("--max-batch-prefill-tokens", 4096, "90", "note: the model server decides"),
    Row("--max-batch-total-tokens", None, "91", "note: the model server decides"),
    Row("--max-waiting-tokens", 20, "21", "note: the model server decides"),
    Row("--max-batch-size", None, "22", "note: the model server decides"),
    Row("--hostname", "0.0.0.0", "127.0.0.1", "=", "127.0.0.1"),
    Row("--prometheus-port", 9000, "9001", "note: on the HTTP port, under /metrics"),
    Row("--master-shard-uds-path", f"{SHARD}-0", "/tmp/y-0", "engine_url", "unix:/tmp/y-0"),
    Row("--tokenizer-name", "bigscience/bloom", MODEL, "model_id", MODEL),
    Row("--tokenizer-config-path", None, "/t.json", "=", Path("/t.json")),
    Row("--trust-remote-code", False, None, "=", True),
    Row("--validation-workers", 2, "3", "=", 3),
    Row("--api-key", None, "secret", "=", "secret"),
    Row("--json-output", False, None, "=", True),
    Row("--otlp-endpoint", None, "http://c:4317", "=", "http://c:4317"),
    Row("--otlp-service-name", "text-generation-inference.router", "me", "=", "me"),
    Row("--cors-allow-origin", None, "https://a.b", "=", ("https://a.b",)),
    Row("--ngrok", False, None, "error: no tunnel through ngrok"),
    Row("--disable-grammar-support", False, None, "=", True),
    Row("--max-client-batch-size", 4, "5", "=", 5),
    Row("--usage-stats", "on", "off", "note: nothing is ever sent"),
    Row("--payload-limit", None, "10", "=", 10),
    Row("--max-image-fetch-size", 32 << 20, "9", "=", 9),
]  # fmt: skip


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(router_server, "run_router", lambda told: seen.__setitem__("router", told))
    monkeypatch.setattr("tgi_cli.logging.dump_on_signal", lambda: None)
    return seen


@pytest.mark.parametrize("by", ["flag", "variable"])
@pytest.mark.parametrize("row", ROUTER, ids=ids(ROUTER))
def test_each_flag_of_the_router_has_its_effect(
    by: str,
    row: Row,
    routed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--port", "0"]
    if row.flag != "--tokenizer-name":
        arguments += ["--tokenizer-name", MODEL]
    if by == "flag":
        arguments += row.words
    else:
        monkeypatch.setenv(row.name.upper(), row.word or "true")
    check(row, tgi_aliases.router(arguments), routed, capsys.readouterr().err)


def test_each_default_of_the_router_is_tgis(routed: dict[str, Any]) -> None:
    table = {setting.flag: setting.default for setting in settings_of("router")}
    for row in ROUTER:
        said = tgi_aliases.ROUTER_DEFAULTS.get(row.name)
        assert row.default == (table[row.flag] if said is None else type(row.default)(said))
    arguments = ["--port", "0", "--tokenizer-name", MODEL]
    assert tgi_aliases.router(arguments) == ExitCode.OK
    assert routed["router"].engine_url == "unix:/tmp/text-generation-server-0"


SERVER = [
    Row("--revision", None, "v1", "=", "v1"),
    Row("--quantize", None, "fp8", "=", "fp8"),
    Row("--speculate", None, "2", "=", 2),
    Row("--speculate", None, "0", "=", 0),
    Row("--dtype", None, "bfloat16", "=", "bfloat16"),
    Row("--kv-cache-dtype", "auto", "fp8_e4m3fn", "=", "fp8_e4m3fn"),
    Row("--trust-remote-code", False, None, "=", True),
    Row("--no-trust-remote-code", False, None, "trust_remote_code", False),
    Row("--uds-path", "/tmp/text-generation-server", "/tmp/x", "=", Path("/tmp/x")),
    Row("--logger-level", "INFO", "DEBUG", "=", "DEBUG"),
    Row("--json-output", False, None, "=", True),
    Row("--no-json-output", False, None, "json_output", False),
    Row("--otlp-endpoint", None, "http://c:4317", "=", "http://c:4317"),
    Row("--otlp-service-name", f"{INFERENCE}.server", "me", "=", "me"),
    Row("--max-input-tokens", None, "70", "=", 70),
]  # fmt: skip


@pytest.fixture
def run_shards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def run(config: ModelServerConfig, services: Any) -> None:
        seen.update(config=config.serve, generate=services[-1].keywords["options"])

    monkeypatch.setattr(model_server_module, "run_model_server", run)
    monkeypatch.setattr("tgi_cli.logging.dump_on_signal", lambda: None)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return seen


@pytest.mark.parametrize("row", SERVER, ids=ids(SERVER))
def test_each_flag_of_a_shard_has_its_effect(
    row: Row, run_shards: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", "org/m", "--model-path", MODEL, *row.words]
    check(row, tgi_aliases.server(words), run_shards, capsys.readouterr().err)


def test_the_first_shard_starts_the_others(
    run_shards: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert tgi_aliases.server(["serve", MODEL, "--sharded"]) == ExitCode.OK
    assert run_shards["config"].num_shard == 2
    assert run_shards["generate"].socket == Path("/tmp/text-generation-server-0")
    monkeypatch.setenv("RANK", "1")
    assert tgi_aliases.server(["serve", MODEL, "--sharded"]) == ExitCode.USAGE
    assert "shard 0 starts the others" in capsys.readouterr().err


def test_print_schema_prints_the_openapi_document(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    assert tgi_aliases.router(["print-schema"]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    assert told["openapi"].startswith("3.")
    assert "/generate_stream" in told["paths"]


@pytest.mark.parametrize(
    "program",
    [
        tgi_aliases.launcher,
        tgi_aliases.router,
        tgi_aliases.server,
        tgi_aliases.benchmark,
    ],
)
def test_each_program_has_help_and_a_version(
    program: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(["--version"]) == ExitCode.OK
    assert capsys.readouterr().out.startswith("tgi ")
    assert program(["--help"]) == ExitCode.OK
    assert "sage:" in capsys.readouterr().out


def test_unknown_commands_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert tgi_aliases.server(["convert", "m"]) == ExitCode.USAGE
    assert "No such command 'convert'" in capsys.readouterr().err


SAGEMAKER = {
    "HF_MODEL_ID": "org/m",
    "HF_MODEL_REVISION": "v1",
    "SM_NUM_GPUS": "4",
    "HF_MODEL_QUANTIZE": "eetq",
    "HF_MODEL_TRUST_REMOTE_CODE": "true",
}


def test_sagemakers_variables_are_accepted(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SAGEMAKER.items():
        monkeypatch.setenv(name, value)
    assert main.run(["serve"]) == ExitCode.OK
    config = served["config"]
    assert (config.model_id, config.revision, config.num_shard) == ("org/m", "v1", 4)
    assert (config.quantize, config.trust_remote_code, config.port) == ("eetq", True, 8080)
    monkeypatch.setenv("PORT", "80")
    monkeypatch.setenv("MODEL_ID", "org/other")
    assert main.run(["serve"]) == ExitCode.OK
    assert (served["config"].model_id, served["config"].port) == ("org/other", 80)


def test_vertex_sets_the_port(served: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "80")
    monkeypatch.setenv("AIP_HTTP_PORT", "8081")
    assert main.run(["serve"]) == ExitCode.OK
    assert served["config"].port == 8081


@pytest.mark.parametrize(
    "name",
    [
        "LOG_FORMAT",
        "USE_FLASH_ATTENTION",
        "ROCM_USE_FLASH_ATTN_V2_TRITON",
        "ROCM_USE_SKINNY_GEMM",
        "ROCM_USE_CUSTOM_PAGED_ATTN",
        "TGI_WIGGLE_ROOM",
        "XPU_MEMORY_FRACTION",
        "EXLLAMA_VERSION",
        "DISABLE_EXLLAMA",
        "HF_HUB_ENABLE_HF_TRANSFER",
        "HF_HUB_USER_AGENT_ORIGIN",
        "PREFILL_CHUNKING",
        "VLLM_API_KEY",
        "LLAMA_API_KEY",
    ],
)
def test_variables_without_a_flag_are_explained(
    name: str,
    served: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, "0")
    assert main.run(["serve"]) == ExitCode.OK
    lines = [line for line in capsys.readouterr().err.splitlines() if name in line]
    assert len(lines) == 1
    assert len(lines[0].split(f"{name}: ")[1]) > 20


def test_log_filters_set_the_level_of_packages(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("tgi_cli.router", "tgi_cli.engine", "h2")
    levels = {name: logging.getLogger(name).level for name in names}
    try:
        level = "info,text_generation_router=debug,engine=warn,h2=error"
        monkeypatch.setenv("LOG_LEVEL", level)
        assert main.run(["serve"]) == ExitCode.OK
        found = [logging.getLogger(name).level for name in names]
        assert found == [logging.DEBUG, logging.WARNING, logging.ERROR]
        monkeypatch.setenv("LOG_LEVEL", "info,engine=loud")
        assert main.run(["serve"]) == ExitCode.USAGE
    finally:
        for name, before in levels.items():
            logging.getLogger(name).setLevel(before)


def test_log_colorize_is_inverted_as_in_tgi(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    monkeypatch.setenv("LOG_COLORIZE", "0")
    assert main.run(["serve"]) == ExitCode.OK
    assert "NO_COLOR" not in os.environ
    monkeypatch.setenv("LOG_COLORIZE", "1")
    assert main.run(["serve"]) == ExitCode.OK
    assert os.environ["NO_COLOR"] == "1"


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (
            "bench",
            "-t --tokenizer-name --revision -b --batch-size -s --sequence-length -d "
            "--decode-length -r --runs -w --warmups -m --master-shard-uds-path --temperature "
            "--top-k --top-p --typical-p --repetition-penalty --frequency-penalty "
            "--top-n-tokens --watermark --do-sample",
        ),
        (
            "quantize",
            "--revision --logger-level --json-output --trust-remote-code --upload-to-model-id "
            "--percdamp --act-order --no-act-order --groupsize --no-trust-remote-code "
            "--no-json-output",
        ),
        (
            "download-weights",
            "--revision --extension --auto-convert --no-auto-convert --logger-level --json-output "
            "--no-json-output --trust-remote-code --no-trust-remote-code --merge-lora "
            "--no-merge-lora",
        ),
    ],
)
def test_the_flags_of_tgis_other_programs_are_accepted(command: str, flags: str) -> None:
    entry = next(entry for entry in COMMANDS if entry.name == command)
    built = typer.main.get_command(main.application(command))
    found = built.commands[entry.name]  # type: ignore[attr-defined]
    known = {word for p in found.params for word in (*p.opts, *p.secondary_opts)}
    assert set(flags.split()) <= known

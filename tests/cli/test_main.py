"""The commands as users find them: help, version, environment, what is imported when."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tgi_cli
from tests.tools.certificate_authority import CertificateFiles
from tgi_cli import demo
from tgi_cli.cli import main
from tgi_cli.cli.local_model import locate
from tgi_cli.config import ServeConfig
from tgi_cli.errors import ExitCode, ModelError
from tgi_cli.launcher import serve as launcher
from tgi_cli.launcher.child_process import inherited_environment
from tgi_cli.model_server.config import ModelServerConfig
from tgi_cli.process.installation import install_command
from tgi_cli.process.spawn import write_config
from tgi_cli.router.config import RouterConfig

HEAVY = {
    "torch",
    "transformers",
    "tokenizers",
    "httpx",
    "huggingface_hub",
    "grpc",
    "numpy",
    "starlette",
    "uvicorn",
    "asyncio",
    "pydantic",
}
COMMANDS = [
    "serve",
    "env",
    "download-weights",
    "warmup",
    "bench",
    "model-server",
    "router",
    "completion",
]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["serve", "--help"], ["env", "--port", "80"], ["--version"]]
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from tgi_cli.cli.main import run;"
        f"status = run({arguments!r});"
        f"heavy = {sorted(HEAVY)!r};"
        "print(*(name for name in heavy if name in sys.modules), file=sys.stderr);"
        "sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.split() == []
    assert done.stdout


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([]) == ExitCode.OK
    said = capsys.readouterr().out
    assert all(command in said for command in COMMANDS)


@pytest.mark.parametrize("spelling", ["--version", "-V"])
def test_version(spelling: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([spelling]) == ExitCode.OK
    assert capsys.readouterr().out == f"tgi {tgi_cli.__version__}\n"


@pytest.mark.parametrize(
    "command",
    ["serve", "env", "download-weights", "warmup", "model-server", "router", "completion"],
)
def test_every_command_has_help_that_fits_a_terminal(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([command, "-h"]) == ExitCode.OK
    said = capsys.readouterr().out
    assert "…" not in said, "a flag's name is cut off"
    assert max(len(line) for line in said.splitlines()) <= 80


def test_no_color_disables_colors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main.run(["serve", "--port", "x"]) == ExitCode.USAGE
    assert "\x1b[" not in capsys.readouterr().err
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    main.run(["serve", "--port", "x"])
    assert "\x1b[31merror:" in capsys.readouterr().err


def test_a_bug_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> int:
        raise KeyError("what")

    monkeypatch.setattr(launcher, "serve", broken)
    assert main.run(["serve"]) == ExitCode.FAILURE
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "error: KeyError: 'what'"
    assert "--traceback" in said[1]
    assert len(said) == 2


def test_what_errors_quote_does_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise ModelError("no tensor 'a\n\x1b[2J\udc80'", "rename\tit: ä")

    monkeypatch.setattr(launcher, "serve", refuse)
    assert main.run(["serve", "org/model"]) == ExitCode.MODEL_UNUSABLE
    said = capsys.readouterr().err.splitlines()
    assert said == ["error: no tensor 'a\\n\\x1b[2J\\udc80'", "       rename\\tit: ä"]


def test_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "serve", interrupted)
    assert main.run(["serve"]) == ExitCode.INTERRUPTED


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return CertificateFiles.make(tmp_path_factory.mktemp("tls"))


def test_defaults_are_those_of_the_configurations(served: dict[str, Any]) -> None:
    assert main.run(["serve"]) == ExitCode.OK
    assert served["config"] == ServeConfig(model_id="")
    router = served["router"]
    assert router == RouterConfig(model_path=Path(), model_id="", engine_url="")


VARIABLES = {
    "MODEL_ID": ("model_id", "org/model"),
    "REVISION": ("revision", "refs/pr/1"),
    "DTYPE": ("dtype", "bfloat16"),
    "TRUST_REMOTE_CODE": ("trust_remote_code", True),
    "HOSTNAME": ("hostname", "127.0.0.1"),
    "PORT": ("port", 8080),
    "GRACEFUL_TERMINATION_TIMEOUT": ("graceful_termination_timeout", 7),
    "MAX_CONCURRENT_REQUESTS": ("max_concurrent_requests", 64),
    "MAX_INPUT_TOKENS": ("max_input_tokens", 100),
    "MAX_TOTAL_TOKENS": ("max_total_tokens", 200),
    "MAX_BATCH_PREFILL_TOKENS": ("max_batch_prefill_tokens", 300),
    "MAX_BATCH_TOTAL_TOKENS": ("max_batch_total_tokens", 400),
    "MAX_PREFILL_DELAY": ("max_prefill_delay", 40),
    "MAX_BATCH_SIZE": ("max_batch_size", 5),
    "MAX_QUEUED_REQUESTS": ("max_queued_requests", 6),
    "MAX_QUEUED_TOKENS": ("max_queued_tokens", 700),
    "BATCHING": ("batching", "inflight"),
    "CAPACITY_POLICY": ("capacity_policy", "guaranteed_no_evict"),
    "WAITING_SERVED_RATIO": ("waiting_served_ratio", 0.25),
    "MAX_WAITING_TOKENS": ("max_waiting_tokens", 0),
    "PREFIX_CACHING": ("prefix_caching", False),
    "DISABLE_GRAMMAR_SUPPORT": ("disable_grammar_support", True),
    "KV_CACHE_DTYPE": ("kv_cache_dtype", "fp8_e5m2"),
    "KV_CACHE_DIR": ("kv_cache_dir", Path("/tmp/blocks")),
    "KV_CACHE_DIR_SIZE": ("kv_cache_dir_size", 5_000_000),
    "KV_OFFLOADING_SIZE": ("kv_offloading_size", 5_000_000),
    "ATTENTION": ("attention", "flashdecoding"),
    "CUDA_GRAPHS": ("cuda_graphs", (1, 2, 8)),
    "LOAD_FORMAT": ("load_format", "dummy"),
    "QUANTIZE": ("quantize", "bitsandbytes-nf4"),
    "QUANTIZE_HEAD": ("quantize_head", True),
    "QUANTIZE_ACTIVATIONS": ("quantize_activations", True),
    "QUANTIZE_HEAD_BITS": ("quantize_head_bits", 4),
    "CROSS_CHECK": ("cross_check", True),
    "CUDA_MEMORY_FRACTION": ("cuda_memory_fraction", 0.5),
    "ROPE_SCALING": ("rope_scaling", "linear"),
    "ROPE_FACTOR": ("rope_factor", 4.0),
    "MODEL_GGUF": ("model_gguf", "org/model:Q4_K_M"),
    "TOKENIZER_NAME": ("tokenizer_name", "org/tokenizer"),
    "DISABLE_CUSTOM_KERNELS": ("disable_custom_kernels", True),
    "MEASURED_LIMITS": ("measured_limits", False),
    "REPLICAS": ("replicas", 3),
    "STATE_PREFILL": ("state_prefill", "chunked"),
    "SPECULATE": ("speculate", 3),
    "SPECULATIVE_MODEL": ("speculative_model", "org/draft"),
    "SPECULATIVE_CONFIG": ("speculative_config", '{"method":"ngram"}'),
    "SHARD_UDS_PATH": ("shard_uds_path", Path("/tmp/tgi-shard")),
    "WATERMARK_GAMMA": ("watermark_gamma", 0.25),
    "WATERMARK_DELTA": ("watermark_delta", 3.5),
    "MAX_RESTARTS": ("max_restarts", 2),
    "WATCHDOG_TIMEOUT": ("watchdog_timeout", 30.0),
    "SHARDED": ("sharded", False),
    "NUM_SHARD": ("num_shard", 2),
    "PIPELINE_PARALLEL_SIZE": ("pipeline_parallel_size", 2),
    "NNODES": ("nnodes", 2),
    "NODE_RANK": ("node_rank", 0),
    "MASTER_ADDR": ("master_addr", "10.0.0.1"),
    "MASTER_PORT": ("master_port", 29501),
    "NODE_SECRET_FILE": ("node_secret_file", Path("/run/secret")),
    "LORA_ADAPTERS": ("lora_adapters", ("a=/data/a", "org/b@v1")),
    "MAX_LORAS": ("max_loras", 3),
    "MAX_CPU_LORAS": ("max_cpu_loras", 12),
    "MAX_LORA_RANK": ("max_lora_rank", 32),
    "OTLP_ENDPOINT": ("otlp_endpoint", "http://collector:4317"),
    "OTLP_SERVICE_NAME": ("otlp_service_name", "mine"),
    "LOG_LEVEL": ("logger_level", "info,text_generation_router=debug"),
    "JSON_OUTPUT": ("json_output", True),
}


def spelled(value: object) -> str:
    """A value as a flag or a variable has it."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_every_setting_has_its_variable(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, (_, value) in VARIABLES.items():
        monkeypatch.setenv(name, spelled(value))
    assert main.run(["serve"]) == ExitCode.OK
    assert served["config"] == ServeConfig(**dict(VARIABLES.values()))
    assert {field for field, _ in VARIABLES.values()} == set(ServeConfig.__dataclass_fields__)


def test_every_setting_has_its_flag(served: dict[str, Any]) -> None:
    arguments = ["serve"]
    for variable, (field, value) in VARIABLES.items():
        flag = "--" + ("logger-level" if variable == "LOG_LEVEL" else field.replace("_", "-"))
        if value is True:
            arguments.append(flag)
        elif value is False:
            arguments.append(flag.replace("--", "--no-"))
        else:
            arguments += [flag, spelled(value)]
    assert main.run(arguments) == ExitCode.OK
    assert served["config"] == ServeConfig(**dict(VARIABLES.values()))


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--batching", "eager", "'fused', 'inflight', 'static'"),
        ("--capacity-policy", "hope", "'max_utilization', 'guaranteed_no_evict'"),
        ("--kv-cache-dtype", "int4", "'auto', 'fp8_e4m3fn', 'fp8_e5m2'"),
        ("--waiting-served-ratio", "many", "'many' is not a number"),
        ("--waiting-served-ratio", "inf", "inf is not at least 0"),
        ("--max-waiting-tokens", "-1", "-1 is not at least 0"),
        ("--max-queued-requests", "0", "0 is not at least 1"),
        ("--max-queued-tokens", "1.5", "'1.5' is not a whole number"),
        ("--load-format", "gguf", "'auto', 'stream', 'dummy'"),
        ("--quantize", "int3", "'gptq', 'awq'"),
        ("--num-shard", "0", "0 is not at least 1"),
        ("--cuda-graphs", "1,two", "'two' is not a whole number"),
        ("--attention", "sparse", "'auto', 'triton'"),
        ("--cuda-graphs", "-1", "-1 is not at least 0"),
        ("--max-loras", "0", "0 is not at least 1"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "model-server"])
def test_an_invalid_value_is_reported_in_one_line(
    command: str, flag: str, value: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([command, flag, value]) == ExitCode.USAGE
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"error: Invalid value for '{flag}'")
    assert says in said[0]
    assert len(said) == 2


@pytest.mark.parametrize(
    ("words", "variable", "value"),
    [
        ([], None, None),
        (["--quantize-activations"], None, True),
        (["--quantize-activations=false"], None, False),
        (["--no-quantize-activations"], None, False),
        ([], "true", True),
        ([], "false", False),
        (["--no-quantize-activations"], "1", False),
    ],
)
def test_activations_may_be_rounded_or_not_or_as_the_model_asks_for(
    served: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    variable: str | None,
    value: bool | None,
) -> None:
    if variable is not None:
        monkeypatch.setenv("QUANTIZE_ACTIVATIONS", variable)
    assert main.run(["serve", *words]) == ExitCode.OK
    assert served["config"].quantize_activations is value


def test_max_input_length_is_an_alias(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_INPUT_LENGTH", "77")
    assert main.run(["serve"]) == ExitCode.OK
    assert served["config"].max_input_tokens == 77


def test_the_argument_and_the_flag_override_the_variable(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_ID", "of/variable")
    main.run(["serve", "of/argument"])
    assert served["config"].model_id == "of/argument"
    main.run(["serve", "--model-id", "of/flag"])
    assert served["config"].model_id == "of/flag"


def test_a_containers_hostname_is_not_an_address(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOSTNAME", "3f2a9c0d1e4b")
    main.run(["serve"])
    assert served["config"].hostname == "0.0.0.0"
    assert "HOSTNAME=3f2a9c0d1e4b is not an address" in capsys.readouterr().err
    # Said as a flag it is meant.
    main.run(["serve", "--hostname", "localhost"])
    assert served["config"].hostname == "localhost"


def test_the_children_get_the_configuration_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: CertificateFiles
) -> None:
    """The structs of the children, read by the children, give the same settings."""
    import tgi_cli.model_server.main as model_server
    import tgi_cli.router.server as router_server

    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        model_server, "run_model_server", lambda *got: seen.__setitem__("server", got)
    )
    monkeypatch.setattr(router_server, "run_router", lambda got: seen.__setitem__("router", got))
    monkeypatch.setattr("tgi_cli.process.parent_death.exit_with_parent", lambda *_: None)
    values = dict(VARIABLES.values()) | {"json_output": False}
    serve = ServeConfig(**values)  # type: ignore[arg-type]
    uds = tmp_path / "engine.sock"
    server = ModelServerConfig(serve=serve, model_path=tmp_path, uds_path=uds, parent_fd=3)
    arguments = ["model-server", "org/model", f"--config-fd={write_config(server)}"]
    assert main.run(arguments) == ExitCode.OK
    got, (generate,) = seen["server"]
    assert got == server
    options = generate.keywords["options"]
    assert options.uds_path == Path("/tmp/tgi-shard")
    assert (options.watermark.gamma, options.watermark.delta) == (0.25, 3.5)

    router = RouterConfig(
        model_path=tmp_path,
        model_id="org/model",
        engine_url=f"unix:{uds}",
        tokenizer_config_path=files.cert,
        api_key="secret,second",
        cors_allow_origin=("https://a.example", "http://localhost:8000"),
        socket_fd=4,
        parent_fd=3,
    )
    arguments = ["router", "org/model", f"--config-fd={write_config(router)}"]
    assert main.run(arguments) == ExitCode.OK
    assert seen["router"] == router
    assert seen["router"].api_keys == ("secret", "second")


def test_children_do_not_inherit_the_variables_of_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dropped = {
        *VARIABLES,
        *("MAX_INPUT_LENGTH", "MAX_BEST_OF", "API_KEY", "HF_MODEL_ID", "TGI_CONFIG"),
        *("ENGINE_URL", "ENGINE_LISTEN", "INSECURE_TCP", "ENGINE_TLS_CERT"),
    }
    for name in dropped:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_TOKEN", "secret")
    environment = inherited_environment()
    assert not set(environment) & dropped
    assert environment["HF_TOKEN"] == "secret"


@pytest.mark.parametrize("key", ["", "  ", "schlüssel", "a,,b", ",", "two words", "a\tb"])
def test_invalid_api_keys_are_rejected(
    key: str,
    served: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("API_KEY", key)
    assert main.run(["serve"]) == ExitCode.USAGE
    assert "API key" in capsys.readouterr().err
    assert not served
    monkeypatch.setenv("API_KEY", "secret")
    assert main.run(["serve"]) == ExitCode.OK
    assert served["router"].api_key == "secret"
    assert "secret" not in repr(served["router"])


def test_several_api_keys_are_combined(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main.run(["serve", "--api-key", "a, b", "--api-key", "c"]) == ExitCode.OK
    assert served["router"].api_key == "a,b,c"
    monkeypatch.setenv("API_KEY", "d,e")
    assert main.run(["serve"]) == ExitCode.OK
    assert served["router"].api_key == "d,e"
    assert main.run(["serve", "--api-key", "f"]) == ExitCode.OK
    assert served["router"].api_key == "f", "a flag beats its variable"


def test_cors_origins_are_validated(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--cors-allow-origin", "https://a.example", "--cors-allow-origin", "http://b:1"]
    assert main.run(["serve", *flags]) == ExitCode.OK
    assert served["router"].cors_allow_origin == ("https://a.example", "http://b:1")
    monkeypatch.setenv("CORS_ALLOW_ORIGIN", "https://a.example, http://b:1")
    assert main.run(["serve"]) == ExitCode.OK
    assert served["router"].cors_allow_origin == ("https://a.example", "http://b:1")
    assert main.run(["serve", "--cors-allow-origin", "*"]) == ExitCode.OK
    assert served["router"].cors_allow_origin == ()
    for origin in ("a.example", "https://a.example/", "https://a.example/page"):
        assert main.run(["serve", "--cors-allow-origin", origin]) == ExitCode.USAGE
        assert "is not an origin" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["org/model", "--served-model-name", "big", "gpt-9"],
        ["org/model", "--served-model-name", "big", "gpt-9", "--port", "0"],
        ["org/model", "--served-model-name", "big", "--served-model-name", "gpt-9"],
        ["org/model", "--served-model-name=big, gpt-9,big"],
        ["--served-model-name", "big", "gpt-9", "org/model"],
        ["--model-id", "org/model", "--served-model-name", "big", "gpt-9"],
    ],
)
def test_served_names_are_a_list(served: dict[str, Any], flags: list[str]) -> None:
    assert main.run(["serve", *flags]) == ExitCode.OK
    assert served["router"].served_model_name == ("big", "gpt-9")
    assert served["config"].model_id == "org/model"


def test_chat_template_is_a_file_or_a_template(served: dict[str, Any]) -> None:
    for given in ("folder/chat.jinja", "{{ messages[0].content }}"):
        assert main.run(["serve", "org/model", "--chat-template", given]) == ExitCode.OK
        assert served["router"].chat_template == given


def test_one_served_name_is_followed_by_the_model(
    served: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["serve", "--served-model-name", "big", "org/model"]) == ExitCode.OK
    assert served["router"].served_model_name == ("big",)
    assert served["config"].model_id == "org/model"
    assert main.run(["serve", "org/model", "--served-model-name", ""]) == ExitCode.USAGE
    assert "--served-model-name is empty" in capsys.readouterr().err


def test_certificates_are_validated_before_anything_starts(
    served: dict[str, Any], files: CertificateFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    good, other, locked = str(files.cert), str(files.other_key), str(files.locked)
    assert main.run(["serve", "--ssl-certfile", good, "--ssl-keyfile", str(files.key)]) == 0
    assert (served["router"].ssl_certfile, served["router"].ssl_keyfile) == (files.cert, files.key)
    assert main.run(["serve", "--ssl-certfile", str(files.both)]) == ExitCode.OK
    served.clear()
    for flags in (
        ["--ssl-certfile", good],
        ["--ssl-certfile", good, "--ssl-keyfile", other],
        ["--ssl-certfile", good, "--ssl-keyfile", "/none"],
        ["--ssl-certfile", good, "--ssl-keyfile", locked],
        ["--ssl-keyfile", str(files.key)],
    ):
        assert main.run(["serve", *flags]) == ExitCode.USAGE
        said = capsys.readouterr().err.splitlines()
        assert said[0].startswith("error: --ssl-")
        assert len(said) <= 2
    assert not served


def test_traces_require_a_collector_and_the_extra(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["serve", "--otlp-endpoint", "http://collector:4317"]) == ExitCode.OK
    assert served["router"].otlp_endpoint == "http://collector:4317"
    assert main.run(["serve", "--otlp-endpoint", "collector"]) == ExitCode.USAGE
    assert "is not a URL" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    assert main.run(["serve", "--otlp-endpoint", "http://collector:4317"]) == ExitCode.USAGE
    assert install_command("otlp") in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "model-server"])
def test_adapters_are_located_before_loading(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both commands: one line and a remedy, and no process and no model."""

    def never(*_: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr("tgi_cli.launcher.serve.ChildProcess", never)
    monkeypatch.setattr("tgi_cli.model_server.main.run_model_server", never)
    port = ["--port", "0"] if command == "serve" else []
    for adapters, code, says in (
        ("a=/x,a=/y", ExitCode.USAGE, "'a' twice"),
        ("a=", ExitCode.USAGE, "'a=' is not an adapter"),
        (f"a={tmp_path}/none", ExitCode.MODEL_UNAVAILABLE, "no folder"),
        (f"a={tmp_path}", ExitCode.MODEL_UNUSABLE, "is not an adapter"),
        (f"tgi={tmp_path}", ExitCode.USAGE, "base model"),
    ):
        assert main.run([command, *port, "--lora-adapters", adapters]) == code
        said = [line for line in capsys.readouterr().err.splitlines() if "INFO" not in line]
        assert said[0].startswith("error: ")
        assert says in said[0]
        assert len(said) == 2


@pytest.mark.tgi_pain(3)
def test_without_a_model_the_bundled_one_is_served(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="tgi_cli"):
        config, path = locate(ServeConfig(model_id=""))
    assert (config.model_id, path) == (demo.MODEL_ID, demo.model_path())
    assert "bundled" in caplog.text


def test_the_parts_of_a_server_do_not_import_the_parser_of_commands() -> None:
    code = """
import sys
from tgi_cli.cli import server_part
import tgi_cli.model_server.config, tgi_cli.model_server.main
import tgi_cli.router.config, tgi_cli.router.server
print(*sorted({"typer", "jinja2", "importlib.metadata", "tgi_cli.hub.resolve"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_command_lines_of_the_parts_of_a_server() -> None:
    from tgi_cli.cli.server_part import is_server_part

    assert is_server_part(["router", "org/model", "--config-fd=7"])
    assert is_server_part(["model-server", "org/model", "--config-fd=7", "--json-output"])
    for others in (
        [],
        ["serve", "org/model", "--config-fd=7"],
        ["router", "org/model"],
        ["router", "org/model", "--config-fd", "7"],
        ["router", "org/model", "--config-fd=x"],
    ):
        assert not is_server_part(others)

"""Settings from a file: what beats what, and what is said of a file that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tgi_cli.cli import main
from tgi_cli.config.settings import SETTINGS
from tgi_cli.config.settings.file import read_file
from tgi_cli.config.settings.setting import SERVE
from tgi_cli.errors import ExitCode


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "server.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_flags_override_variables_override_the_file_overrides_defaults(
    served: dict[str, Any], write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("max-best-of: 7\nmax_total_tokens: 100\nport: 1001\n")
    monkeypatch.setenv("MAX_TOTAL_TOKENS", "200")
    monkeypatch.setenv("PORT", "1002")
    assert main.run(["serve", "--config", path, "--port", "1003"]) == ExitCode.OK
    config, router = served["config"], served["router"]
    assert (config.port, config.max_total_tokens, router.max_best_of) == (1003, 200, 7)
    assert router.max_stop_sequences == 4
    # The order of the flags makes no difference, and the variable names the file too.
    assert main.run(["serve", "--port", "1003", "--config", path]) == ExitCode.OK
    assert (served["config"], served["router"]) == (config, router)
    monkeypatch.setenv("TGI_CONFIG", path)
    assert main.run(["serve", "--port", "1003"]) == ExitCode.OK
    assert (served["config"], served["router"]) == (config, router)


EVERYTHING = """
model_id: org/m
sharded: false
cuda-graphs: [1, 2, 4]
lora_adapters:
  - a=/data/a
  - org/b@v1
cors_allow_origin: [https://a.example, "http://b:1"]
api_key: secret
usage_stats: off
prefix_caching: no
otlp_endpoint:
rope-factor: 2
"""


def test_each_kind_of_value_is_parsed(
    served: dict[str, Any], write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(EVERYTHING)
    assert main.run(["serve", "--config", path]) == ExitCode.OK
    config, router = served["config"], served["router"]
    assert (config.model_id, config.sharded, config.prefix_caching) == ("org/m", False, False)
    assert config.cuda_graphs == (1, 2, 4)
    assert config.lora_adapters == ("a=/data/a", "org/b@v1")
    assert config.rope_factor == 2.0
    assert router.cors_allow_origin == ("https://a.example", "http://b:1")
    assert (router.api_key, router.otlp_endpoint) == ("secret", None)
    said = capsys.readouterr().err
    assert f"usage_stats in {path}: nothing is ever sent" in said


def test_a_section_applies_to_one_command(served: dict[str, Any], write: Any) -> None:
    path = write("max_best_of: 3\nserve:\n  max-best-of: 4\nrouter:\n  max_stop_sequences: 9\n")
    assert main.run(["serve", "--config", path]) == ExitCode.OK
    assert (served["router"].max_best_of, served["router"].max_stop_sequences) == (4, 4)
    file = Path(path)
    assert read_file(file, "router") == {"max_best_of": "3", "max_stop_sequences": "9"}
    assert read_file(file, "model-server") == {}, "the router's limits are none of its settings"


@pytest.mark.parametrize(
    ("text", "cause", "remedy"),
    [
        ("max_bets_of: 3", "'max_bets_of' is not a setting", "did you mean max_best_of?"),
        ("zzz: 3", "'zzz' is not a setting", "configuration.md"),
        ("port: many", "port: 'many' is not a whole number", ""),
        ("port: 70000", "port: 70000 is not from 0 to 65535", ""),
        ("port: yes", "port: True is not a value (N)", ""),
        ("batching: eager", "batching: 'eager' is not one of 'fused'", ""),
        ("trust_remote_code: maybe", "trust_remote_code: 'maybe' is not true or false", ""),
        ("port: [1, 2]", "port: [1, 2] is not one value", ""),
        ("config_fd: 3", "'config_fd' is not a setting", ""),
        ("config: x.yaml", "'config' is not a setting", ""),
        ("serve: 3", "serve is not a section", ""),
        ("serve:\n  engine_url: x", "serve: 'engine_url' is not a setting", ""),
        ("router:\n  pots: 3", "router: 'pots' is not a setting", "did you mean port?"),
        ("- port", "does not consist of keys and values", "port: 8080"),
        ("port: [", "is not YAML", ""),
    ],
)
def test_an_invalid_file_is_reported_with_path_and_key(
    text: str,
    cause: str,
    remedy: str,
    served: dict[str, Any],
    write: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(text)
    assert main.run(["serve", "--config", path]) == ExitCode.USAGE
    said = capsys.readouterr().err.splitlines()
    assert path in said[0]
    assert cause in said[0]
    assert remedy in "".join(said[1:])
    assert len(said) <= 2
    assert not served


def test_a_missing_file_is_a_usage_error(
    served: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["serve", "--config", str(tmp_path / "none.yaml")]) == ExitCode.USAGE
    assert "none.yaml cannot be read: No such file" in capsys.readouterr().err


def test_aliases_follow_the_precedence_of_their_sources(
    served: dict[str, Any], write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("max_input_length: 10\nmodel_id: of/file\n")
    assert main.run(["serve", "--config", path]) == ExitCode.OK
    assert (served["config"].max_input_tokens, served["config"].model_id) == (10, "of/file")
    assert main.run(["serve", "of/argument", "--config", path, "--max-input-tokens", "20"]) == 0
    assert (served["config"].max_input_tokens, served["config"].model_id) == (20, "of/argument")
    monkeypatch.setenv("MODEL_ID", "of/variable")
    assert main.run(["serve", "--config", path]) == ExitCode.OK
    assert served["config"].model_id == "of/variable"
    both = write("max_input_length: 10\nmax_input_tokens: 11\n")
    assert main.run(["serve", "--config", both]) == ExitCode.USAGE


def told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main.run(["env", "--json-output", *arguments]) == ExitCode.OK
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_env_shows_the_source_of_each_setting(
    write: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write("max_total_tokens: 100\napi_key: secret\n")
    monkeypatch.setenv("MAX_BEST_OF", "3")
    monkeypatch.setenv("NGROK_AUTHTOKEN", "hidden")
    found = told(["org/m", "--config", path, "--port", "8080"], capsys)
    assert found["port"] == {"value": 8080, "source": "flag", "name": "--port"}
    assert found["max_best_of"] == {"value": 3, "source": "variable", "name": "MAX_BEST_OF"}
    assert found["max_total_tokens"] == {"value": 100, "source": "file", "name": path}
    assert found["payload_limit"] == {"value": None, "source": "default", "name": None}
    assert found["model_id"] == {"value": "org/m", "source": "flag", "name": "MODEL"}
    assert found["api_key"]["value"] == found["ngrok_authtoken"]["value"] == "********"
    visible = {s.name for s in SETTINGS if SERVE in s.commands and not (s.hidden or s.argument)}
    assert set(found) == visible - {"config", "env"}


def test_env_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("API_KEY", "hunter2")
    assert main.run(["env", "--port", "8080", "--cuda-graphs", "1,2"]) == ExitCode.OK
    said = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in said.splitlines()}
    assert rows["setting"] == ["setting", "value", "from"]
    assert rows["--port"] == ["--port", "8080", "flag", "--port"]
    assert rows["--cuda-graphs"] == ["--cuda-graphs", "1,2", "flag", "--cuda-graphs"]
    assert rows["--api-key"] == ["--api-key", "********", "variable", "API_KEY"]
    assert rows["--num-shard"] == ["--num-shard", "-", "default"]
    assert "hunter2" not in said
    assert "\x1b" not in said


def test_env_prints_a_table_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main.run(["env", "--port", "8080"]) == ExitCode.OK
    assert "flag --port" in capsys.readouterr().out

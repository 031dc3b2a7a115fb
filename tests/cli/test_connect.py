"""``tgi connect``: what it prints for each client, and what it writes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tgi_cli.cli import main
from tgi_cli.cli.client_files import FORMATS
from tgi_cli.cli.client_settings import CLIENTS
from tgi_cli.config.settings.connect import CLIENT_NAMES
from tgi_cli.errors import ExitCode

MODEL = "acme/coder"
KEY = "sk-secret-1"


class Stub(ThreadingHTTPServer):
    """A server that lists models.

    Attributes:
        cards: its models.
        key: the API key that it requires; empty: none.
    """

    cards: list[dict[str, Any]]
    key = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        stub = self.server
        assert isinstance(stub, Stub)
        bodies = {
            "/v1/models": {"object": "list", "data": stub.cards},
            "/info": {"max_total_tokens": 2048},
        }
        allowed = not stub.key or self.headers["authorization"] == f"Bearer {stub.key}"
        status = 401 if not allowed else 200 if self.path in bodies else 404
        body = json.dumps(bodies.get(self.path, {})).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Stub]:
    for name in ("TGI_API_KEY", "CODEX_HOME", "CLAUDE_CONFIG_DIR", "OPENCODE_CONFIG", "QWEN_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("CONTINUE_GLOBAL_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    server = Stub(("127.0.0.1", 0), Handler)
    server.cards = [{"id": MODEL, "context_length": 40_000}, {"id": "adapter", "max_model_len": 9}]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def printed(
    capsys: pytest.CaptureFixture[str], client: str, *arguments: str
) -> tuple[dict[str, Any], str]:
    """The settings on stdout, and all that was printed."""
    assert main.run(["connect", client, *arguments]) == ExitCode.OK
    out, err = capsys.readouterr()
    return FORMATS[CLIENTS[client].format].parse(out), out + err


def provider(client: str, found: dict[str, Any]) -> tuple[Any, ...]:
    """URL, model and context length in a client's settings."""
    if client == "codex":
        table = found["model_providers"][found["model_provider"]]
        assert table["wire_api"] == "responses"
        return table["base_url"], found["model"], found["model_context_window"]
    if client == "claude":
        env = found["env"]
        assert env["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == env["ANTHROPIC_MODEL"]
        window = int(env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"])
        return env["ANTHROPIC_BASE_URL"] + "/v1", env["ANTHROPIC_MODEL"], window
    if client == "opencode":
        name, _, model = found["model"].partition("/")
        options = found["provider"][name]
        return options["options"]["baseURL"], model, options["models"][model]["limit"]["context"]
    if client == "qwen-code":
        (model,) = found["modelProviders"][found["security"]["auth"]["selectedType"]]
        assert model["id"] == found["model"]["name"]
        return model["baseUrl"], model["id"], model["generationConfig"]["contextWindowSize"]
    if client == "continue":
        (model,) = found["models"]
        return model["apiBase"], model["model"], model["defaultCompletionOptions"]["contextLength"]
    if client == "zed":
        chosen = found["agent"]["default_model"]
        table = found["language_models"]["openai_compatible"][chosen["provider"]]
        (model,) = table["available_models"]
        assert model["name"] == chosen["model"]
        return table["api_url"], model["name"], model["max_tokens"]
    if client == "aider":
        return found["OPENAI_API_BASE"], found["AIDER_MODEL"].removeprefix("openai/"), None
    return found["OPENAI_API_BASE_URL"], found["DEFAULT_MODELS"], None


@pytest.mark.parametrize("client", CLIENT_NAMES)
@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_settings_name_the_url_the_model_and_its_context_length(
    client: str, suffix: str, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    found, text = printed(capsys, client, stub.url + suffix)
    window = None if CLIENTS[client].format == "env" else 40_000
    assert provider(client, found) == (f"{stub.url}/v1", MODEL, window)
    assert str(CLIENTS[client].path({})).rpartition("/")[2] in text


@pytest.mark.parametrize("client", CLIENT_NAMES)
def test_settings_refer_to_the_variable_of_the_key(
    client: str,
    stub: Stub,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub.key = KEY
    monkeypatch.setenv("TGI_API_KEY", KEY)
    _, text = printed(capsys, client, stub.url)
    assert "TGI_API_KEY" in text
    assert KEY not in text


@pytest.mark.parametrize("client", [name for name in CLIENT_NAMES if name != "zed"])
def test_a_key_that_is_given_is_in_the_settings(
    client: str, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.key = KEY
    found, _ = printed(capsys, client, stub.url, "--api-key", KEY)
    assert KEY in json.dumps(found)


def test_zed_takes_no_key_and_no_other_variable(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in (["--api-key", KEY], ["--api-key-env", "OTHER"]):
        assert main.run(["connect", "zed", stub.url, *flags]) == ExitCode.USAGE
        assert "TGI_API_KEY" in capsys.readouterr().err


def test_the_variable_can_be_another(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    found, text = printed(capsys, "codex", stub.url, "--api-key-env", "MY_KEY")
    assert found["model_providers"]["tgi"]["env_key"] == "MY_KEY"
    assert "Set MY_KEY" in text
    found, _ = printed(capsys, "codex", stub.url)
    assert "env_key" not in found["model_providers"]["tgi"]  # Codex would require the variable


def test_another_model_can_be_chosen(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = printed(capsys, "codex", stub.url, "--model", "adapter")
    assert provider("codex", found) == (f"{stub.url}/v1", "adapter", 9)
    assert main.run(["connect", "codex", stub.url, "--model", "nobody"]) == ExitCode.USAGE
    assert MODEL in capsys.readouterr().err


def test_the_window_is_that_of_info_if_the_list_has_none(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.cards = [{"id": MODEL}]
    found, _ = printed(capsys, "codex", stub.url)
    assert found["model_context_window"] == 2048


def test_a_refused_key_is_an_error_that_names_the_variable(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.key = KEY
    assert main.run(["connect", "codex", stub.url]) == ExitCode.FAILURE
    assert "TGI_API_KEY" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["nowhere", "ftp://host", "http://"])
def test_a_url_must_be_of_http(url: str) -> None:
    assert main.run(["connect", "codex", url]) == ExitCode.USAGE


@pytest.mark.parametrize("client", CLIENT_NAMES)
def test_write_merges_into_the_clients_file(
    client: str, stub: Stub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = CLIENTS[client].path({})
    file_format = FORMATS[CLIENTS[client].format]
    assert path.is_relative_to(tmp_path) or not path.is_absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    others = {"OTHER_ONE": "1"} if CLIENTS[client].format == "env" else {"other": "kept"}
    path.write_text(file_format.dump(others), encoding="utf-8")
    assert main.run(["connect", client, stub.url, "--write"]) == ExitCode.OK
    out, err = capsys.readouterr()
    assert not out
    assert ".bak" in err
    found = file_format.parse(path.read_text(encoding="utf-8"))
    assert found.items() >= others.items()
    shown, _ = printed(capsys, client, stub.url)
    assert found == {**others, **shown}
    stub.cards[0]["context_length"] = 50_000  # served with another limit: one entry, renewed
    assert main.run(["connect", client, stub.url, "--write"]) == ExitCode.OK
    found = file_format.parse(path.read_text(encoding="utf-8"))
    assert provider(client, found)[2] in (50_000, None)


def test_codex_gets_one_source_of_the_key(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.key = KEY
    path = CLIENTS["codex"].path({})
    for flags, expected in (
        (["--api-key", KEY], "experimental_bearer_token"),
        ([], "env_key"),
        (["--api-key", KEY], "experimental_bearer_token"),
    ):
        monkeypatch.setenv("TGI_API_KEY", KEY)
        assert main.run(["connect", "codex", stub.url, "--write", *flags]) == ExitCode.OK
        text = path.read_text(encoding="utf-8")
        provider_keys = set(FORMATS["toml"].parse(text)["model_providers"]["tgi"])
        assert provider_keys == {"name", "base_url", "wire_api", expected}


@pytest.mark.parametrize("flags", [[], ["--api-key", KEY]])
def test_claude_sends_no_key_of_another_server(
    flags: list[str], stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _ = printed(capsys, "claude", stub.url, *flags)
    assert found["env"]["ANTHROPIC_API_KEY"] == ""
    assert found["env"]["ANTHROPIC_AUTH_TOKEN"] == (KEY if flags else "none")


def test_write_takes_another_file(stub: Stub, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    assert main.run(["connect", "codex", stub.url, "--write", "--file", str(path)]) == ExitCode.OK
    assert MODEL in path.read_text(encoding="utf-8")


def test_opencode_prefers_the_file_with_comments(stub: Stub, tmp_path: Path) -> None:
    folder = tmp_path / ".config" / "opencode"
    folder.mkdir(parents=True)
    commented = folder / "opencode.jsonc"
    commented.write_text("{\n  // mine\n}\n", encoding="utf-8")
    assert main.run(["connect", "opencode", stub.url, "--write"]) == ExitCode.OK
    assert "// mine" in commented.read_text(encoding="utf-8")
    assert not (folder / "opencode.json").exists()

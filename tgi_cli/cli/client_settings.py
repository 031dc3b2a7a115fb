"""The settings that make each client of ``tgi connect`` use a server."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tgi_cli.config.settings.connect import CLIENT_NAMES
from tgi_cli.errors import ConfigError

NO_KEY = "none"
"""Sent by clients that require an API key when the server requires none."""

PROVIDER = "tgi"
"""The provider's name in settings that name providers."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server, as clients shall use it.

    Attributes:
        url: its URL, without ``/v1`` and without a trailing slash.
        model: the model's name.
        window: tokens of a request, prompt and answer together.
        key_variable: the environment variable that holds the API key, or an empty string if the
            server needs none.
        api_key: the key itself if the settings shall contain it, else an empty string.
    """

    url: str
    model: str
    window: int
    key_variable: str = ""
    api_key: str = ""

    @property
    def v1(self) -> str:
        """The base URL of OpenAI's routes."""
        return f"{self.url}/v1"

    @property
    def answer(self) -> int:
        """Tokens that clients shall reserve for an answer: a quarter of the window, at most
        32,000. Clients compact a conversation when only this many tokens are left."""
        return max(1, min(self.window // 4, 32_000))

    def key(self, reference: str) -> str:
        """The API key as a value of settings; ``reference`` is the client's syntax for an
        environment variable, with ``{}`` for its name."""
        if self.api_key or not self.key_variable:
            return self.api_key or NO_KEY
        return reference.format(self.key_variable)


@dataclass(frozen=True, slots=True)
class Client:
    """A client of ``tgi connect``.

    Attributes:
        format: format of its file: json, toml, yaml or env.
        path: finds its file, from the environment variables.
        settings: makes the settings, which replace those of the same name.
        start: how to start it.
        defaults: settings that are added only if the file lacks them.
        note: what the user has to know or do in addition.
    """

    format: str
    path: Callable[[Mapping[str, str]], Path]
    settings: Callable[[Server], dict[str, Any]]
    start: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


def _in_home(variable: str, folder: str, name: str) -> Callable[[Mapping[str, str]], Path]:
    """``$variable/name``, by default ``~/folder/name``."""

    def find(environ: Mapping[str, str]) -> Path:
        base = environ.get(variable)
        return (Path(base).expanduser() if base else Path.home() / folder) / name

    return find


def _opencode_path(environ: Mapping[str, str]) -> Path:
    if environ.get("OPENCODE_CONFIG"):
        return Path(environ["OPENCODE_CONFIG"]).expanduser()
    folder = _in_home("XDG_CONFIG_HOME", ".config", "opencode")(environ)
    commented = folder / "opencode.jsonc"  # read last, so that it would override the other
    return commented if commented.exists() else folder / "opencode.json"


def _codex(server: Server) -> dict[str, Any]:
    # https://developers.openai.com/codex/config-reference
    # None removes what an earlier call has written: Codex insists on the variable of env_key.
    named = server.key_variable if not server.api_key else ""
    provider = {
        "name": PROVIDER,
        "base_url": server.v1,
        "wire_api": "responses",
        "env_key": named or None,
        "experimental_bearer_token": server.api_key or None,
    }
    return {
        "model": server.model,
        "model_provider": PROVIDER,
        "model_context_window": server.window,
        "model_providers": {PROVIDER: provider},
    }


def _claude(server: Server) -> dict[str, Any]:
    # https://code.claude.com/docs/en/settings: "env" has plain values; apiKeyHelper is a command.
    # The variables of keys are set in any case, so that no key for another server is sent.
    env = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_MODEL": server.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": server.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": server.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": server.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.window),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.answer),
    }
    if server.key_variable and not server.api_key:
        env |= {"ANTHROPIC_AUTH_TOKEN": "", "ANTHROPIC_API_KEY": ""}
        return {"env": env, "apiKeyHelper": f"printenv {server.key_variable}"}
    return {"env": env | {"ANTHROPIC_AUTH_TOKEN": server.key("{}"), "ANTHROPIC_API_KEY": ""}}


def _opencode(server: Server) -> dict[str, Any]:
    # https://opencode.ai/docs/providers
    name = f"{PROVIDER}/{server.model}"
    return {
        "model": name,
        "small_model": name,
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": PROVIDER,
                "options": {"baseURL": server.v1, "apiKey": server.key("{{env:{}}}")},
                "models": {
                    server.model: {
                        "name": server.model,
                        "limit": {"context": server.window, "output": server.answer},
                    }
                },
            }
        },
    }


def _qwen_code(server: Server) -> dict[str, Any]:
    # https://qwenlm.github.io/qwen-code-docs/en/users/configuration/model-providers
    model = {
        "id": server.model,
        "name": server.model,
        "baseUrl": server.v1,
        "envKey": server.key_variable,
        "generationConfig": {"contextWindowSize": server.window},
    }
    settings: dict[str, Any] = {
        "modelProviders": {"openai": [model]},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": server.model},
    }
    if server.api_key or not server.key_variable:
        model["envKey"] = "TGI_API_KEY"
        settings["env"] = {"TGI_API_KEY": server.key("")}
    return settings


def _aider(server: Server) -> dict[str, Any]:
    # https://aider.chat/docs/llms/openai-compat.html, https://aider.chat/docs/config/dotenv.html
    return {
        "OPENAI_API_BASE": server.v1,
        "OPENAI_API_KEY": server.key("${{{}}}"),
        "AIDER_MODEL": f"openai/{server.model}",
    }


def _continue(server: Server) -> dict[str, Any]:
    # https://docs.continue.dev/reference
    model = {
        "name": f"{PROVIDER}: {server.model}",
        "provider": "openai",
        "model": server.model,
        "apiBase": server.v1,
        "apiKey": server.key("${{{{ secrets.{} }}}}"),
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {
            "contextLength": server.window,
            "maxTokens": server.answer,
        },
    }
    return {"models": [model]}


def _zed(server: Server) -> dict[str, Any]:
    # https://zed.dev/docs/ai/use-api-access#openai-compatible
    variable = f"{PROVIDER.upper()}_API_KEY"
    if server.api_key:
        raise ConfigError(
            "Zed does not read API keys from its settings", f"set the variable {variable} instead"
        )
    if server.key_variable not in ("", variable):
        raise ConfigError(
            f"Zed reads the API key from {variable}, not from {server.key_variable}",
            f"set {variable}, and omit --api-key-env",
        )
    model = {
        "name": server.model,
        "display_name": server.model,
        "max_tokens": server.window,
        "max_output_tokens": server.answer,
        "capabilities": {
            "tools": True,
            "images": False,
            "parallel_tool_calls": True,
            "prompt_cache_key": False,
        },
    }
    provider = {"api_url": server.v1, "available_models": [model]}
    return {
        "language_models": {"openai_compatible": {PROVIDER: provider}},
        "agent": {"default_model": {"provider": PROVIDER, "model": server.model}},
    }


def _open_webui(server: Server) -> dict[str, Any]:
    # https://docs.openwebui.com/getting-started/env-configuration
    return {
        "ENABLE_OPENAI_API": "true",
        "OPENAI_API_BASE_URL": server.v1,
        "OPENAI_API_KEY": server.key("${{{}}}"),
        "DEFAULT_MODELS": server.model,
    }


CLIENTS: dict[str, Client] = dict(
    zip(
        CLIENT_NAMES,
        (
            Client("toml", _in_home("CODEX_HOME", ".codex", "config.toml"), _codex, "codex"),
            Client(
                "json", _in_home("CLAUDE_CONFIG_DIR", ".claude", "settings.json"), _claude, "claude"
            ),
            Client(
                "json",
                _opencode_path,
                _opencode,
                "opencode",
                {"$schema": "https://opencode.ai/config.json"},
            ),
            Client("json", _in_home("QWEN_HOME", ".qwen", "settings.json"), _qwen_code, "qwen"),
            Client(
                "env",
                lambda environ: Path(".env"),
                _aider,
                "aider",
                note="Aider warns that it does not know the model, which does no harm",
            ),
            Client(
                "yaml",
                _in_home("CONTINUE_GLOBAL_DIR", ".continue", "config.yaml"),
                _continue,
                "Continue in the editor",
                {"name": "Local", "version": "1.0.0", "schema": "v1"},
                "Continue reads the API key from ~/.continue/.env",
            ),
            Client(
                "json",
                _in_home("XDG_CONFIG_HOME", ".config", "zed/settings.json"),
                _zed,
                "zed",
                note="Zed requires the variable TGI_API_KEY, with any value if the server needs "
                "no key",
            ),
            Client(
                "env",
                lambda environ: Path(".env"),
                _open_webui,
                "open-webui serve, or docker with --env-file",
                note="Open WebUI takes these variables over only at its first start, unless "
                "ENABLE_PERSISTENT_CONFIG is false",
            ),
        ),
        strict=True,
    )
)


def file_of(client: Client) -> Path:
    """The file of a client's settings, in this process's environment."""
    return client.path(os.environ)

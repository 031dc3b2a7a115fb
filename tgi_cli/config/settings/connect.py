"""Settings of ``tgi connect``."""

from __future__ import annotations

from tgi_cli.config.settings.setting import CONNECT, Setting, panel
from tgi_cli.config.settings.values import SWITCH, one_of, path, text

CLIENT_NAMES = ("codex", "claude", "opencode", "qwen-code", "continue", "zed", "open-webui")

CONNECT_SETTINGS = panel(
    "Clients",
    (CONNECT,),
    Setting(
        "client",
        one_of("CLIENT", *CLIENT_NAMES),
        None,
        f"Client: {', '.join(CLIENT_NAMES)}.",
        argument=True,
        required=True,
    ),
    Setting(
        "url",
        text("URL"),
        "http://127.0.0.1:3000",
        "URL of the server. Default: http://127.0.0.1:3000.",
        argument=True,
    ),
    Setting("model", text("NAME"), None, "Model or adapter to use. Default: the served model."),
    Setting(
        "api_key_env",
        text("VARIABLE"),
        "TGI_API_KEY",
        "Environment variable from which the client reads the API key.",
    ),
    Setting(
        "api_key",
        text("KEY"),
        None,
        "API key to store in the settings in plain text, instead of the variable's name.",
        secret=True,
    ),
    Setting(
        "write",
        SWITCH,
        False,
        "Merge the settings into the client's file instead of printing them; keep a backup.",
    ),
    Setting("file", path("FILE"), None, "File to merge into. Default: the client's."),
    variables=(),
)

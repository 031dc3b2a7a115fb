"""Settings of ``tgi connect``."""

from __future__ import annotations

from tgi_cli.config.settings.setting import CONNECT, Setting, panel
from tgi_cli.config.settings.values import SWITCH, one_of, path, text

CLIENT_NAMES = (
    *("codex", "claude", "opencode", "qwen-code", "aider"),
    *("continue", "zed", "open-webui"),
)

CONNECT_SETTINGS = panel(
    "Clients",
    (CONNECT,),
    variables=(),
    client=Setting(
        one_of("CLIENT", *CLIENT_NAMES),
        f"Client: {', '.join(CLIENT_NAMES)}.",
        argument=True,
        required=True,
    ),
    url=Setting(
        text("URL"),
        "URL of the server. Default: http://127.0.0.1:3000.",
        "http://127.0.0.1:3000",
        argument=True,
    ),
    model=Setting(text("NAME"), "Model or adapter to use. Default: the served model."),
    api_key_env=Setting(
        text("VARIABLE"),
        "Environment variable from which the client reads the API key.",
        "TGI_API_KEY",
    ),
    api_key=Setting(
        text("KEY"),
        "API key to store in the settings in plain text, instead of the variable's name.",
        secret=True,
    ),
    write=Setting(
        SWITCH, "Merge the settings into the client's file instead of printing them; keep a backup."
    ),
    file=Setting(path("FILE"), "File to merge into. Default: the client's."),
)

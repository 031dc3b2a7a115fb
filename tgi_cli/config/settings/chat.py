"""Settings of ``tgi chat``."""

from __future__ import annotations

from tgi_cli.config.settings.setting import CHAT, Setting, panel
from tgi_cli.config.settings.values import RATIO, SECONDS, SWITCH, path, text, whole, words

CHAT_SETTINGS = (
    *panel(
        "Model",
        (CHAT,),
        variables=(),
        target=Setting(
            text("MODEL|URL"),
            "Model to start a server for, an id on the hub, a folder or a GGUF file, or the URL of "
            "a running server with OpenAI's API. Default: the bundled miniature model.",
            argument=True,
        ),
        model=Setting(
            text("NAME"),
            "Model or adapter that requests name. Default: the only one that the server lists.",
            short="m",
        ),
        api_key=Setting(
            text("KEY"),
            "API key of the server. For api.openai.com, also from OPENAI_API_KEY.",
            secret=True,
            variables=("TGI_API_KEY", "API_KEY"),
        ),
        serve_args=Setting(text("'FLAGS'"), "Additional flags for the server that is started.", ""),
        timeout=Setting(SECONDS, "Longest wait for the next part of an answer.", 600.0),
    ),
    *panel(
        "Conversation",
        (CHAT,),
        variables=(),
        prompt=Setting(
            text("TEXT"),
            "Print the answer to this prompt, and exit. Text from a pipe precedes it.",
            short="p",
        ),
        system=Setting(text("TEXT"), "System prompt.", short="s"),
        image=Setting(
            words("FILE|URL"), "Image for the first message; may be repeated.", short="i"
        ),
        load=Setting(path("FILE"), "Continue a conversation that /save has written as JSON."),
        no_history=Setting(SWITCH, "Keep nothing of what is typed in a history file."),
    ),
    *panel(
        "Sampling",
        (CHAT,),
        variables=(),
        temperature=Setting(RATIO, "Sampling temperature; 0: greedy.", short="t"),
        max_tokens=Setting(whole(1), "Longest answer, in tokens.", short="n"),
        set=Setting(words("NAME=VALUE"), "Any parameter of /set, as top_p=0.9; may be repeated."),
    ),
)

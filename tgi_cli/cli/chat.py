"""``tgi chat``: chat with a model in the terminal, or in a pipe."""

from __future__ import annotations

from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.settings_flags import takes
from tgi_cli.config.settings.setting import CHAT


@takes(
    CHAT,
    ("tgi chat Qwen/Qwen3-0.6B", "start a server for a model, and chat"),
    ("tgi chat localhost:3000", "chat with a running server"),
    ('git diff | tgi chat -p "Explain this."', "answer once"),
)
def chat(settings: ParsedSettings) -> None:
    """Chat with a model in the terminal, or in a pipe.

    For MODEL, a server is started, which ends with the chat; URL is a server with OpenAI's API.
    With -p, or with text from a pipe, prints the answer alone.
    """
    from tgi_cli.chat.parameters import parse_assignment
    from tgi_cli.chat.run import ChatOptions, run_chat, split_arguments

    parameters = dict(map(parse_assignment, settings["set"] or ()))
    for name in ("temperature", "max_tokens"):
        if settings[name] is not None:
            parameters[name] = settings[name]
    run_chat(
        ChatOptions(
            target=settings["target"] or "",
            model=settings["model"] or "",
            api_key=(settings["api_key"] or "").partition(",")[0].strip(),
            serve_arguments=split_arguments(settings["serve_args"]),
            timeout=settings["timeout"],
            prompt=settings["prompt"],
            system=settings["system"],
            images=tuple(settings["image"] or ()),
            load=settings["load"],
            history=not settings["no_history"],
            parameters={name: each for name, each in parameters.items() if each is not None},
        )
    )

"""Runs a chat: finds or starts the server, and answers one prompt or chats in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tgi_cli.chat.client import ChatClient, as_url
from tgi_cli.chat.conversation import AttachedImage, ChatConversation
from tgi_cli.chat.errors import ChatInputError, ChatServerError
from tgi_cli.chat.images import attach_image
from tgi_cli.chat.one_shot import answer_once, report_pause
from tgi_cli.chat.own_server import own_server
from tgi_cli.errors import ConfigError, TgiError

_SHOWN_MODELS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What to chat with, and how.

    Attributes:
        target: a model, the URL of a server, or empty for the bundled model.
        model: the name that requests give, or empty for the server's only model.
        api_key: key of the server behind a URL.
        serve_arguments: additional arguments for a server that is started.
        timeout: seconds to wait for the next part of an answer.
        prompt: to be answered once; None: chat in the terminal, unless stdin is a pipe.
        system: the system prompt, or None for that of ``load``.
        images: files and URLs for the first message.
        load: a saved conversation.
        history: whether to keep what is typed.
        parameters: parameters of requests.
    """

    target: str = ""
    model: str = ""
    api_key: str = ""
    serve_arguments: tuple[str, ...] = ()
    timeout: float = 600.0
    prompt: str | None = None
    system: str | None = None
    images: tuple[str, ...] = ()
    load: Path | None = None
    history: bool = True
    parameters: dict[str, Any] = field(default_factory=dict)


def run_chat(options: ChatOptions) -> None:
    """Answer one prompt on stdout, or chat in the terminal.

    Raises:
        TgiError: an invalid option, a model that cannot be served, an error of the server.
        KeyboardInterrupt: Ctrl-C, but for that which stops an answer in the terminal.
        BrokenPipeError: nothing reads stdout any more.
    """
    prompt = _prompt(options)
    conversation = _conversation(options)
    try:
        asyncio.run(_run(options, prompt, conversation))
    except asyncio.CancelledError:  # by a signal
        raise KeyboardInterrupt from None


async def _run(options: ChatOptions, prompt: str | None, conversation: ChatConversation) -> None:
    _cancel_on_signals()
    images = [await attach_image(source) for source in options.images]
    async with contextlib.AsyncExitStack() as stack:
        if prompt is None:
            from tgi_cli.chat.input import keys_held_back

            stack.enter_context(keys_held_back())
        url, key = as_url(options.target), options.api_key
        failure: Callable[[], TgiError | None] = lambda: None  # noqa: E731
        if url is None:
            own = await stack.enter_async_context(
                own_server(options.target, options.serve_arguments)
            )
            url, key, failure = own.server.url, own.api_key, own.server.failure
        else:
            if options.serve_arguments:
                raise ConfigError("--serve-args are for a server that is started here")
            key = key or _openai_key(url)
        client = await stack.enter_async_context(ChatClient(url, key, options.timeout))
        names = await _models(client, options.model, url)
        if prompt is not None:
            conversation.ask(prompt, tuple(images))
            await answer_once(client, _only(names, url), conversation, sys.stdout)
        else:
            await _chat(client, names, url, conversation, images, options, failure)


async def _models(client: ChatClient, wanted: str, url: str) -> list[str]:
    """The models to choose from: only the one that the user names, if any.

    Many servers answer with their model whatever a request names. A name that is not in a short
    list is taken for a mistake; long ones, of hosting services, may be incomplete.

    Raises:
        ChatServerError: the server is unavailable, fails, or refuses the key.
        ConfigError: it does not have the model that the user names.
    """
    try:
        names = await client.models(adapters=bool(wanted), on_pause=report_pause)
    except ChatServerError as error:
        if not (wanted and error.status):
            raise
        return [wanted]
    if wanted and names and wanted not in names and len(names) <= _SHOWN_MODELS:
        raise ConfigError(f"{url} has no model {wanted!r}", f"it has: {', '.join(names)}")
    return [wanted] if wanted else names


def _prompt(options: ChatOptions) -> str | None:
    """The prompt to answer once, after what a pipe brings; None to chat in the terminal."""
    terminal = sys.stdin is not None and sys.stdin.isatty()
    piped = ""
    if not terminal and sys.stdin is not None:
        piped = sys.stdin.buffer.read().decode("utf-8", "replace")
    if options.prompt is not None:
        # Words that are not UTF-8 have surrogates, which JSON cannot have.
        given = os.fsencode(options.prompt).decode("utf-8", "replace")
        prompt = "\n\n".join(filter(None, (piped.rstrip(), given)))
    elif not terminal:
        prompt = piped.rstrip()
    elif not sys.stdout.isatty():
        raise ConfigError("stdout is not a terminal to chat in", "give the prompt with -p")
    else:
        return None
    if not prompt and not options.images:
        raise ConfigError("the prompt is empty", "give it with -p, or through a pipe")
    return prompt


def _conversation(options: ChatOptions) -> ChatConversation:
    conversation = ChatConversation()
    if options.load is not None:
        conversation = ChatConversation.load(options.load)
    if options.system is not None:
        conversation.system = options.system
    conversation.parameters |= options.parameters
    return conversation


def _openai_key(url: str) -> str:
    """The key that OpenAI's own clients use, for OpenAI's own server alone."""
    return os.environ.get("OPENAI_API_KEY", "") * (urlsplit(url).hostname == "api.openai.com")


def _only(names: list[str], url: str) -> str:
    """The only model of a server. Raises ConfigError."""
    if len(names) != 1:
        shown = ", ".join(names[:_SHOWN_MODELS]) + ", ..." * (len(names) > _SHOWN_MODELS)
        remedy = "name one with --model" + (f": {shown}" if names else "")
        raise ConfigError(f"{url} lists {len(names) or 'no'} models", remedy)
    return names[0]


async def _chat(
    client: ChatClient,
    names: list[str],
    url: str,
    conversation: ChatConversation,
    images: list[AttachedImage],
    options: ChatOptions,
    server_failure: Callable[[], TgiError | None],
) -> None:
    """Chat in the terminal."""
    from prompt_toolkit.history import InMemoryHistory
    from rich.console import Console

    from tgi_cli.chat.commands import ChatState
    from tgi_cli.chat.input import ChatInput, history_path, open_history
    from tgi_cli.chat.session import ChatSession

    console = Console(highlight=False)
    history = open_history(history_path()) if options.history else InMemoryHistory()
    reader = ChatInput(history)
    model = await _choose(names, reader, console.print) if len(names) > 1 else _only(names, url)
    say = lambda text: console.print(text, style="dim", markup=False)  # noqa: E731
    state = ChatState(client, model, conversation, say, images)
    await ChatSession(state, reader, console, server_failure).run()


async def _choose(names: list[str], reader: Any, say: Callable[[str], None]) -> str:
    """Let the user choose one of several models."""
    for number, name in enumerate(names, 1):
        say(f"{number:>4}  {name}")
    while True:
        try:
            answer = await reader.choose("Model (number or name): ")
        except EOFError:
            raise ChatInputError("no model was chosen", "name one with --model") from None
        if answer in names:
            return str(answer)
        if answer.isdecimal() and 1 <= int(answer) <= len(names):
            return names[int(answer) - 1]


def _cancel_on_signals() -> None:
    """SIGTERM, and the loss of the terminal, end the chat as Ctrl-C does, and its server, too."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


def split_arguments(text: str) -> tuple[str, ...]:
    """The words of ``--serve-args``. Raises ConfigError."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"--serve-args: {error}") from error

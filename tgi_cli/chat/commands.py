"""The commands of a chat, which begin with a slash, and what they change."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from tgi_cli.chat.answer import ReceivedAnswer
from tgi_cli.chat.client import ChatClient
from tgi_cli.chat.conversation import AttachedImage, ChatConversation, Message
from tgi_cli.chat.errors import ChatInputError
from tgi_cli.chat.images import attach_image
from tgi_cli.chat.parameters import PARAMETERS, UNSET, parse_parameter

_COMMAND = re.compile(r"/([a-z?]+)(?:\s+(.*))?\s*", re.DOTALL)


class NextStep(Enum):
    """What follows a command."""

    READ = "read"
    """The next input."""
    ANSWER = "answer"
    """A request for an answer to the conversation."""
    QUIT = "quit"
    """The end of the chat."""


@dataclass(slots=True)
class ChatState:
    """A chat between two inputs.

    Attributes:
        client: the server's client.
        model: the model's name.
        conversation: the messages so far.
        say: prints a line of text for the user.
        images: for the next message.
        last: the last answer.
        unanswered: the last message if it has no answer, because the request failed.
    """

    client: ChatClient
    model: str
    conversation: ChatConversation
    say: Callable[[str], None]
    images: list[AttachedImage] = field(default_factory=list)
    last: ReceivedAnswer | None = None
    unanswered: Message | None = None


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A command.

    Attributes:
        run: carries it out, with its argument as the user has written it.
        argument: how help names the argument; empty: none.
        help: what it does.
        hidden: whether help omits it, being another name of a command.
    """

    run: Callable[[ChatState, str], Awaitable[NextStep]]
    argument: str
    help: str
    hidden: bool = False


def parse_command(text: str) -> tuple[str, str] | None:
    """The name and the argument of a command, or None for a message.

    A message may begin with a path, such as ``/etc/fstab``.
    """
    found = _COMMAND.fullmatch(text.strip())
    return None if found is None else (found[1], (found[2] or "").strip())


async def run_command(state: ChatState, name: str, argument: str) -> NextStep:
    """Carry out a command.

    Raises:
        ChatInputError: there is no such command, or its argument cannot be used.
        ChatServerError: the server cannot be asked.
    """
    command = COMMANDS.get(name)
    if command is None:
        raise ChatInputError(
            f"there is no command /{name}", "/help lists them; a space before it makes it text"
        )
    if argument and not command.argument:
        raise ChatInputError(f"/{name} takes no argument")
    return await command.run(state, argument)


async def _system(state: ChatState, text: str) -> NextStep:
    if text:
        state.conversation.system = "" if text in ('""', "''") else text
    state.say(state.conversation.system or "no system prompt")
    return NextStep.READ


async def _reset(state: ChatState, _: str) -> NextStep:
    state.conversation.messages.clear()
    state.images.clear()
    state.last = state.unanswered = None
    state.say("the conversation starts anew")
    return NextStep.READ


async def _retry(state: ChatState, _: str) -> NextStep:
    conversation = state.conversation
    message = state.unanswered or conversation.withdraw()
    if message is None:
        raise ChatInputError("there is no message to answer again")
    conversation.messages.append(message)
    state.unanswered = None
    return NextStep.ANSWER


async def _save(state: ChatState, argument: str) -> NextStep:
    if not argument:
        raise ChatInputError("/save needs a file", "/save chat.json, or chat.md for Markdown")
    path = _path(argument)
    state.conversation.save(path, state.model)
    count = len(state.conversation.messages)
    state.say(f"{count} message{'s' * (count != 1)} saved in {path}")
    return NextStep.READ


async def _set(state: ChatState, argument: str) -> NextStep:
    parameters = state.conversation.parameters
    name, _, value = argument.replace("=", " ", 1).partition(" ") if argument else ("", "", "")
    if name and value.strip():
        parsed = parse_parameter(name, value.strip())
        if parsed is None:
            parameters.pop(name, None)
        else:
            parameters[name] = parsed
    elif name:
        raise ChatInputError(f"/set {name} needs a value", f"/set {name} {UNSET} unsets it")
    shown = [f"{key} {json.dumps(each)}" for key, each in parameters.items()]
    state.say("\n".join(shown) if shown else f"nothing is set; possible: {', '.join(PARAMETERS)}")
    return NextStep.READ


async def _image(state: ChatState, argument: str) -> NextStep:
    if not argument and not state.images:
        raise ChatInputError("/image needs a file or a URL", "/image photo.jpg")
    if argument:
        source = argument if "://" in argument else str(_path(argument))
        state.images.append(await attach_image(source))
    for image in state.images:
        state.say(f"{image.name} ({image.description}) goes with the next message")
    return NextStep.READ


async def _thinking(state: ChatState, _: str) -> NextStep:
    reasoning = state.last.reasoning.strip() if state.last else ""
    state.say(reasoning or "the last answer has no reasoning")
    return NextStep.READ


async def _model(state: ChatState, name: str) -> NextStep:
    names = await state.client.models(adapters=True)
    if name:
        if names and name not in names:
            raise ChatInputError(f"the server has no model {name!r}", "/model lists the models")
        state.model = name
        state.say(f"{name} answers from now on")
    else:
        for each in names or [state.model]:
            state.say(f"{'*' if each == state.model else ' '} {each}")
    return NextStep.READ


async def _help(state: ChatState, _: str) -> NextStep:
    shown = [(f"/{n} {c.argument}".strip(), c.help) for n, c in COMMANDS.items() if not c.hidden]
    width = max(len(usage) for usage, _ in shown)
    for usage, text in shown:
        state.say(f"{usage:<{width}}  {text}")
    state.say("")
    for keys, text in _KEYS:
        state.say(f"{keys:<{width}}  {text}")
    return NextStep.READ


async def _quit(state: ChatState, _: str) -> NextStep:
    return NextStep.QUIT


_KEYS = (
    ("Enter", "sends the message"),
    ("Alt-Enter, Ctrl-J", 'starts a new line, as Enter does behind \\ or within """'),
    ("Ctrl-C", "stops the answer, or clears the input"),
    ("Ctrl-D", "ends the chat"),
    ("Up, Down, Ctrl-R", "look through the history"),
    ("Ctrl-X Ctrl-E", "opens the input in $EDITOR"),
)


COMMANDS = {
    "system": SlashCommand(_system, "[TEXT]", 'show or set the system prompt; "" removes it'),
    "set": SlashCommand(_set, "[NAME VALUE]", "show or set parameters, as temperature 0.7"),
    "image": SlashCommand(_image, "FILE|URL", "add an image to the next message"),
    "retry": SlashCommand(_retry, "", "answer the last message again"),
    "thinking": SlashCommand(_thinking, "", "show the reasoning of the last answer"),
    "save": SlashCommand(_save, "FILE", "save the conversation: .json, or .md for Markdown"),
    "reset": SlashCommand(_reset, "", "forget the conversation, but not the system prompt"),
    "model": SlashCommand(_model, "[NAME]", "list the server's models, or choose one"),
    "help": SlashCommand(_help, "", "show this"),
    "quit": SlashCommand(_quit, "", "end the chat"),
    "clear": SlashCommand(_reset, "", "", hidden=True),
    "?": SlashCommand(_help, "", "", hidden=True),
    "bye": SlashCommand(_quit, "", "", hidden=True),
    "exit": SlashCommand(_quit, "", "", hidden=True),
}
"""Commands by name; hidden ones are those of ollama and llama.cpp."""


def _path(argument: str) -> Path:
    """A path as it is typed, or dragged into the terminal: quoted, escaped, or with ``~``."""
    try:
        words = shlex.split(argument)
    except ValueError:
        words = []
    return Path(words[0] if len(words) == 1 else argument).expanduser()

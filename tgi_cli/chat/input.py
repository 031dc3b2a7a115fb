"""Reads messages in a terminal: several lines, history, completion of commands and paths."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
from collections.abc import Iterable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth, Output
from prompt_toolkit.shortcuts import CompleteStyle

from tgi_cli.chat.commands import COMMANDS
from tgi_cli.chat.parameters import PARAMETERS, UNSET

PROMPT, CONTINUATION = ">>> ", "... "
_QUOTES = '"""'
_PLACEHOLDER = "Write a message, or /help"
_PATHS = ("image", "save")


def history_path() -> Path:
    """The file of the history, in the XDG base directory for state."""
    base = os.environ.get("XDG_STATE_HOME")
    folder = Path(base) if base else Path.home() / ".local" / "state"
    return folder / "tgi" / "chat_history"


def open_history(path: Path) -> History:
    """The history in a file that only its owner can read; in memory if that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


class ChatInput:
    """The input line of a chat.

    Args:
        history: what was typed before.
        read_from, write_to: the terminal. Default: stdin and stdout.
    """

    def __init__(
        self,
        history: History,
        read_from: Input | None = None,
        write_to: Output | None = None,
    ) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=history,
            multiline=True,
            key_bindings=_key_bindings(),
            completer=CommandCompleter(),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            prompt_continuation=lambda width, number, wrapped: CONTINUATION,
            enable_open_in_editor=True,
            enable_suspend=True,
            color_depth=ColorDepth.DEPTH_1_BIT if "NO_COLOR" in os.environ else None,
            input=read_from,
            output=write_to,
        )

    async def read(self) -> str:
        """Read a message or a command.

        Raises:
            EOFError: Ctrl-D.
            KeyboardInterrupt: Ctrl-C at an empty input.
        """
        placeholder = FormattedText([("ansibrightblack", _PLACEHOLDER)])
        text = await self._session.prompt_async(
            PROMPT, placeholder=placeholder, handle_sigint=False
        )
        return unquoted(text)

    async def choose(self, question: str) -> str:
        """Read one line that is not part of the history."""
        session: PromptSession[str] = PromptSession(history=InMemoryHistory())
        return (await session.prompt_async(question, handle_sigint=False)).strip()


def unquoted(text: str) -> str:
    """The message without the quotes around several lines."""
    bare = text.strip()
    if bare.startswith(_QUOTES) and bare.endswith(_QUOTES) and len(bare) >= 2 * len(_QUOTES):
        return bare[len(_QUOTES) : -len(_QUOTES)].strip("\n")
    return text


def is_open(text: str) -> bool:
    """Whether more lines follow: after a backslash, and until quotes are closed."""
    bare = text.strip()
    if bare.startswith(_QUOTES):
        return len(bare) < 2 * len(_QUOTES) or not bare.endswith(_QUOTES)
    return text.endswith("\\")


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if not is_open(buffer.text) or buffer.cursor_position < len(buffer.text):
            if buffer.text.strip():
                buffer.validate_and_handle()
            return
        if buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
        buffer.insert_text("\n")

    @bindings.add("escape", "enter")
    @bindings.add("c-j")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    def _interrupt(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return bindings


class CommandCompleter(Completer):
    """Completes commands, parameters of ``/set``, and paths of commands that take files."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        """See :class:`prompt_toolkit.completion.Completer`."""
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        command, space, argument = text[1:].partition(" ")
        if not space:
            names = (name for name, entry in COMMANDS.items() if not entry.hidden)
            yield from _beginning_with(command, names)
        elif command in _PATHS:
            yield from self._paths.get_completions(Document(argument), complete_event)
        elif command == "set":
            name, value_follows, value = argument.partition(" ")
            known = [UNSET] if value_follows else PARAMETERS
            yield from _beginning_with(value if value_follows else name, known)


def _beginning_with(start: str, words: Iterable[str]) -> Iterator[Completion]:
    return (Completion(word, -len(start)) for word in words if word.startswith(start))


@contextlib.contextmanager
def keys_held_back() -> Iterator[None]:
    """What is typed while nothing is read is not echoed, but read with the next input."""
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (OSError, ValueError, termios.error):
        yield
        return
    silent = termios.tcgetattr(fd)
    silent[0] &= ~termios.ICRNL  # Enter stays Enter for the input
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(fd, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)

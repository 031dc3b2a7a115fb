"""A chat in a terminal: reads inputs, carries out commands, shows answers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from tgi_cli.chat.answer import ReceivedAnswer, receive
from tgi_cli.chat.answer_view import AnswerView, PlainAnswer, TerminalAnswer
from tgi_cli.chat.commands import ChatState, NextStep, parse_command, run_command
from tgi_cli.chat.errors import ChatInputError, ChatServerError
from tgi_cli.chat.input import ChatInput
from tgi_cli.chat.markdown import printable
from tgi_cli.errors import TgiError

_REFRESH_SECONDS = 0.05


class ChatSession:
    """A chat in a terminal.

    Args:
        state: the conversation, and its model.
        reader: reads the inputs.
        console: the terminal.
        server_failure: why the server that was started for the chat has ended, or None while it
            runs.
    """

    def __init__(
        self,
        state: ChatState,
        reader: ChatInput,
        console: Console,
        server_failure: Callable[[], TgiError | None] = lambda: None,
    ) -> None:
        self._state = state
        self._reader = reader
        self._console = console
        self._server_failure = server_failure
        self._receiving: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Chat until the user ends it.

        Raises:
            TgiError: the server that was started for the chat has ended.
        """
        with self._interrupts():
            await self._run()

    async def _run(self) -> None:
        self._say(f"{self._state.model} · /help shows the commands")
        while True:
            try:
                text = await self._reader.read()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._say("Ctrl-D or /quit ends the chat")
                continue
            try:
                step = await self._handle(text)
            except (ChatInputError, ChatServerError) as error:
                self._report(error)
                if failure := self._server_failure():
                    raise failure from None
                continue
            if step is NextStep.QUIT:
                return

    async def _handle(self, text: str) -> NextStep:
        """Carry out an input, which may be a command."""
        state = self._state
        command = parse_command(text)
        if command is not None:
            step = await run_command(state, *command)
        else:
            state.conversation.ask(text, tuple(state.images))
            state.images.clear()
            state.unanswered = None
            step = NextStep.ANSWER
        if step is NextStep.ANSWER:
            await self._answer()
        return step

    async def _answer(self) -> None:
        """Request an answer and show it. Ctrl-C ends it; what has arrived is kept.

        Raises:
            ChatServerError: there is no complete answer.
        """
        state = self._state
        answer = state.last = ReceivedAnswer()
        dumb = self._console.is_dumb_terminal
        view: AnswerView = (PlainAnswer if dumb else TerminalAnswer)(self._console)
        body = state.conversation.body(state.model)

        def pause(seconds: float, error: ChatServerError) -> None:
            view.notice(f"{error.cause}; trying again in {seconds:.0f} s")

        kept = False
        try:
            receiving = receive(state.client, body, answer, view.add, pause)
            stopped = await self._until_stopped(receiving, view.refresh)
            kept = bool(answer.content.strip()) or not stopped
        finally:
            view.finish()
            if kept:
                state.conversation.answer(answer.content.strip())
            else:
                state.unanswered = state.conversation.messages.pop()
        for call in answer.tool_calls():
            self._say(f"calls {call}")
        warning = "stopped" if stopped else answer.warning()
        self._say(" · ".join(filter(None, (warning, answer.summary()))) + "\n")

    async def _until_stopped(
        self, receiving: Coroutine[Any, Any, None], refresh: Callable[[], None]
    ) -> bool:
        """Run a coroutine, refreshing several times a second; whether Ctrl-C has ended it."""
        task = self._receiving = asyncio.create_task(receiving)
        try:
            while not task.done():
                refresh()
                await asyncio.wait([task], timeout=_REFRESH_SECONDS)
            if not task.cancelled():
                task.result()
            return task.cancelled()
        finally:
            task.cancel()
            self._receiving = None

    @contextlib.contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Ctrl-C ends an answer, and nothing else."""
        loop = asyncio.get_running_loop()
        before = signal.getsignal(signal.SIGINT)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, before)

    def _interrupt(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()

    def _say(self, text: str) -> None:
        """Print a quiet line."""
        self._console.print(Text(printable(text), style="dim"))

    def _report(self, error: TgiError) -> None:
        line = Text.assemble(("error: ", "red"), printable(error.cause))
        self._console.print(line)
        if error.remedy:
            self._say(error.remedy)

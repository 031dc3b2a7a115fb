"""One prompt, one answer: plain text on stdout and nothing else, for pipes and scripts."""

from __future__ import annotations

import sys
from functools import partial
from typing import TextIO

from tgi_cli.chat.answer import ReceivedAnswer, receive
from tgi_cli.chat.client import ChatClient
from tgi_cli.chat.conversation import ChatConversation
from tgi_cli.chat.errors import ChatServerError
from tgi_cli.chat.markdown import printable
from tgi_cli.chat.reasoning_tags import SplitText
from tgi_cli.chat.stream_parser import AnswerPart


def report_pause(seconds: float, error: ChatServerError, output: TextIO = sys.stderr) -> None:
    """Say that the server is busy, and how long that is waited for."""
    print(f"{error.cause}; trying again in {seconds:.0f} s", file=output, flush=True)


async def answer_once(
    client: ChatClient,
    model: str,
    conversation: ChatConversation,
    output: TextIO,
    errors: TextIO = sys.stderr,
) -> None:
    """Write the answer to the conversation's last message as it arrives, without its reasoning.

    What the user should know besides the answer goes to ``errors``.

    Raises:
        ChatServerError: as :meth:`ChatClient.answer`, or the answer has no text.
        BrokenPipeError: nothing reads ``output`` any more.
    """
    clean = printable if output.isatty() else str
    answer = ReceivedAnswer()
    written = ""

    def write(part: AnswerPart, split: SplitText) -> None:
        nonlocal written
        if split.was_reasoning and written:  # known by its end alone
            print("the text so far was the model's reasoning", file=errors, flush=True)
        text = clean(split.content)
        text = text if written else text.lstrip("\n")
        if text:
            output.write(text)
            output.flush()
            written = text

    try:
        await receive(
            client, conversation.body(model), answer, write, partial(report_pause, output=errors)
        )
    finally:
        if written and not written.endswith("\n"):
            output.write("\n")
            output.flush()
    for call in answer.tool_calls():
        print(f"the model calls a tool: {call}", file=errors)
    warning = answer.warning()
    if not answer.content.strip() and not answer.calls:
        raise ChatServerError(f"the answer is empty{': ' * bool(warning)}{warning}")
    if warning:
        print(f"the answer was {warning}", file=errors)

"""Commands, and what they change."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.tools.chat_server import PNG, ChatServer
from tgi_cli.chat.answer import ReceivedAnswer
from tgi_cli.chat.client import ChatClient
from tgi_cli.chat.commands import COMMANDS, ChatState, NextStep, parse_command, run_command
from tgi_cli.chat.conversation import ChatConversation
from tgi_cli.chat.errors import ChatInputError
from tgi_cli.chat.parameters import PARAMETERS, parse_assignment


class Chat:
    """A chat that commands are run on; ``said`` is what they print."""

    def __init__(self, url: str = "http://127.0.0.1:1") -> None:
        self.said: list[str] = []
        self.conversation = ChatConversation()
        self.state = ChatState(ChatClient(url), "acme/chat", self.conversation, self.said.append)

    async def run(self, line: str) -> NextStep:
        command = parse_command(line)
        assert command is not None
        return await run_command(self.state, *command)


@pytest.fixture
def chat() -> Chat:
    return Chat()


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/help", ("help", "")),
        ("/set temperature 0.7", ("set", "temperature 0.7")),
        ("/system You are\nbrief.", ("system", "You are\nbrief.")),
        ("/?", ("?", "")),
        ("/etc/fstab is what?", None),
        ("/", None),
        ("hello /help", None),
        ("// a comment", None),
    ],
)
def test_what_is_a_command(text: str, command: tuple[str, str] | None) -> None:
    assert parse_command(text) == command


async def test_system(chat: Chat) -> None:
    await chat.run("/system")
    await chat.run("/system Be brief.")
    chat.conversation.ask("hi")
    assert chat.conversation.body("m")["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    await chat.run('/system ""')
    assert chat.said == ["no system prompt", "Be brief.", "no system prompt"]
    assert chat.conversation.body("m")["messages"] == [{"role": "user", "content": "hi"}]


async def test_set(chat: Chat) -> None:
    await chat.run("/set")
    await chat.run("/set temperature 0.7")
    await chat.run("/set top_p=0.9")
    await chat.run('/set stop ["a", "b c"]')
    await chat.run('/set chat_template_kwargs {"enable_thinking": false}')
    body = chat.conversation.body("m")
    assert (body["temperature"], body["top_p"], body["stop"]) == (0.7, 0.9, ["a", "b c"])
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    await chat.run("/set temperature default")
    assert "temperature" not in chat.conversation.body("m")
    assert chat.said[0].startswith("nothing is set; possible: temperature")
    assert chat.said[2] == "temperature 0.7\ntop_p 0.9"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set temprature 1", "no parameter 'temprature'"),
        ("/set temperature warm", "'warm' is not a number"),
        ("/set top_p 2", "top_p: 2 is not above 0"),
        ("/set temperature", "needs a value"),
        ("/set stop [3]", "not a list of strings"),
        ("/set response_format {", "not JSON"),
        ("/nonsense", "no command /nonsense"),
        ("/reset now", "takes no argument"),
        ("/save", "needs a file"),
        ("/save /nowhere/at/all.json", "cannot be written: No such file"),
        ("/image", "needs a file"),
        ("/image /nowhere.png", "/nowhere.png: No such file"),
        ("/retry", "no message"),
    ],
)
async def test_what_cannot_be_done(chat: Chat, line: str, words: str) -> None:
    with pytest.raises(ChatInputError, match=words):
        await chat.run(line)
    assert chat.conversation == ChatConversation()


def test_parameters_of_the_command_line() -> None:
    assert parse_assignment("top_k = 5") == ("top_k", 5)
    with pytest.raises(ChatInputError, match="not NAME=VALUE"):
        parse_assignment("top_k")
    assert all(name.isidentifier() for name in PARAMETERS)


async def test_reset_keeps_the_settings(chat: Chat) -> None:
    chat.conversation.ask("a")
    chat.conversation.answer("b")
    await chat.run("/system S")
    await chat.run("/set seed 3")
    await chat.run("/clear")
    assert chat.conversation == ChatConversation("S", [], {"seed": 3})


async def test_retry_asks_the_last_message_again(chat: Chat) -> None:
    chat.conversation.ask("a")
    chat.conversation.answer("b")
    chat.conversation.ask("c")
    chat.conversation.answer("d")
    assert await chat.run("/retry") is NextStep.ANSWER
    assert [m["content"] for m in chat.conversation.messages] == ["a", "b", "c"]


async def test_retry_after_a_request_that_failed(chat: Chat) -> None:
    chat.conversation.ask("a")
    chat.conversation.answer("b")
    chat.state.unanswered = {"role": "user", "content": "c"}
    await chat.run("/retry")
    assert [m["content"] for m in chat.conversation.messages] == ["a", "b", "c"]


async def test_save_and_load(chat: Chat, tmp_path: Path) -> None:
    conversation = chat.conversation
    conversation.ask("Grüße?")
    conversation.answer("**Yes.**")
    await chat.run("/system Be brief.")
    await chat.run("/set temperature 0")
    path = tmp_path / "a chat.json"
    await chat.run(f"/save {shlex.quote(str(path))}")
    assert json.loads(path.read_text()) == conversation.body("acme/chat")
    assert ChatConversation.load(path) == conversation
    await chat.run(f"/save {tmp_path / 'chat.md'}")
    assert (tmp_path / "chat.md").read_text() == (
        "# acme/chat\n\n## System\n\nBe brief.\n\n## User\n\nGrüße?\n\n## Assistant\n\n**Yes.**\n"
    )
    assert chat.said[-1] == f"2 messages saved in {tmp_path / 'chat.md'}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "not a conversation"),
        ('{"messages": [{"role": "tool", "content": ""}]}', "not a conversation"),
        ('{"messages": [{"role": "assistant", "content": ""}]}', "do not take turns"),
        ('{"messages": [{"role": "user", "content": ""}]}', "do not take turns"),
    ],
)
def test_files_that_are_no_conversation(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "chat.json"
    path.write_text(text)
    with pytest.raises(ChatInputError, match=words):
        ChatConversation.load(path)


async def test_images_of_files_and_urls(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "my photo.png"
    path.write_bytes(PNG)
    await chat.run("/image " + str(path).replace(" ", "\\ "))
    await chat.run(f"/image '{path}'")
    with ChatServer().serving() as server:
        await chat.run(f"/image {server.url}/image.png?size=3")
        with pytest.raises(ChatInputError, match="returned status 404"):
            await chat.run(f"/image {server.url}/other.png")
    names = [image.name for image in chat.state.images]
    assert names == ["my photo.png", "my photo.png", "image.png"]
    assert len({image.url for image in chat.state.images}) == 1
    assert chat.said[0] == "my photo.png (image/png, 28 B) goes with the next message"
    chat.conversation.ask("What is it?", tuple(chat.state.images[:1]))
    image, text = chat.conversation.messages[0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert text == {"type": "text", "text": "What is it?"}


async def test_files_that_are_no_image(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "notes.png"
    path.write_text("not an image")
    with pytest.raises(ChatInputError, match="not a PNG, JPEG, WebP or GIF image"):
        await chat.run(f"/image {path}")
    with pytest.raises(ChatInputError, match="a device or a socket"):
        await chat.run("/image /dev/zero")
    with pytest.raises(ChatInputError, match="Is a directory"):
        await chat.run(f"/image {tmp_path}")


async def test_models() -> None:
    with ChatServer(cards=[{"id": "acme/chat"}, {"id": "acme/code"}]).serving() as server:
        chat = Chat(server.url)
        await chat.run("/model")
        await chat.run("/model acme/code")
        with pytest.raises(ChatInputError, match="no model 'other'"):
            await chat.run("/model other")
    assert chat.said == ["* acme/chat", "  acme/code", "acme/code answers from now on"]
    assert chat.state.model == "acme/code"


async def test_thinking_shows_the_reasoning(chat: Chat) -> None:
    await chat.run("/thinking")
    chat.state.last = ReceivedAnswer(reasoning="\nHm.\n")
    await chat.run("/thinking")
    assert chat.said == ["the last answer has no reasoning", "Hm."]


async def test_help_and_quit(chat: Chat) -> None:
    await chat.run("/help")
    text = "\n".join(chat.said)
    assert all(f"/{name}" in text for name, entry in COMMANDS.items() if not entry.hidden)
    assert max(len(line) for line in chat.said) <= 80
    for line in ("/quit", "/bye", "/exit"):
        assert await chat.run(line) is NextStep.QUIT

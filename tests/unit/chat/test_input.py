"""Keys, several lines, completion and history."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from tgi_cli.chat.input import ChatInput, CommandCompleter, history_path, open_history, unquoted


async def read(keys: str, history: History | None = None) -> str:
    with create_pipe_input() as terminal:
        terminal.send_text(keys)
        reader = ChatInput(history or InMemoryHistory(), terminal, DummyOutput())
        return await reader.read()


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("hello\r", "hello"),
        ("\r\rhello\r", "hello"),  # an empty input is none
        ("one\x1b\rtwo\r", "one\ntwo"),  # Alt-Enter
        ("one\ntwo\r", "one\ntwo"),  # Ctrl-J
        ("one\\\rtwo\r", "one\ntwo"),
        ('"""one\r\rtwo"""\r', "one\n\ntwo"),
        ("\x1b[200~def f():\r\n    return 1\r\n\x1b[201~\r", "def f():\n    return 1\n"),  # pasted
        ("a mistake\x03hello\r", "hello"),  # Ctrl-C clears
    ],
)
async def test_what_is_read(keys: str, text: str) -> None:
    assert await read(keys) == text


async def test_the_end() -> None:
    with pytest.raises(EOFError):
        await read("\x04")
    with pytest.raises(KeyboardInterrupt):
        await read("\x03")


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ('"""a"""', "a"),
        ('"""\na\nb\n"""', "a\nb"),
        ('"""', '"""'),
        ("'a'", "'a'"),
    ],
)
def test_quotes_around_several_lines(text: str, bare: str) -> None:
    assert unquoted(text) == bare


async def test_history_of_the_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = history_path()
    assert path == tmp_path / "tgi" / "chat_history"
    await read("first\nline\r", open_history(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(FileHistory(path).load_history_strings()) == ["first\nline"]
    assert await read("\x1b[A\r", open_history(path)) == "first\nline"  # Up


def test_history_that_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    history = open_history(tmp_path / "file" / "history")
    assert isinstance(history, InMemoryHistory)


@pytest.mark.parametrize(
    ("text", "completions"),
    [
        ("/re", ["retry", "reset"]),
        ("/set top", ["top_p", "top_k"]),
        ("/set top_p d", ["default"]),
        ("/system Be", []),
        ("hello /re", []),
    ],
)
def test_completion(text: str, completions: list[str]) -> None:
    found = CommandCompleter().get_completions(Document(text), CompleteEvent())
    assert [each.text for each in found] == completions


def test_completion_of_paths(tmp_path: Path) -> None:
    (tmp_path / "photo.png").touch()
    document = Document(f"/image {tmp_path}/ph")
    found = CommandCompleter().get_completions(document, CompleteEvent())
    assert [each.text for each in found] == ["oto.png"]

"""``tgi chat`` as people use it: in a terminal and in pipes, with a real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.chat_server import (
    DONE,
    ChatServer,
    Reply,
    delta,
    error_reply,
    text_reply,
    usage,
)
from tests.tools.process_tree import descendants_of, is_gone
from tests.tools.server_process import ServerProcess, poll
from tests.tools.terminal import Terminal
from tgi_cli.errors import ExitCode

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

CHAT = [sys.executable, "-m", "tgi_cli", "chat"]
PROMPT = ">>>"
SECONDS = 240.0
"""For whatever is waited for."""
CUT_OFF = "the answer was cut off by the limit of tokens (max_tokens, or the model's context)\n"


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Variables of a user who has no key and no history."""
    found = {"HF_HUB_OFFLINE": "1", "XDG_STATE_HOME": str(tmp_path / "state")}
    return found | dict.fromkeys(("API_KEY", "TGI_API_KEY", "OPENAI_API_KEY"), "")


def piped(
    variables: dict[str, str], *arguments: str, text: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CHAT, *arguments],
        env={**os.environ, **variables},
        input=text,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.fixture
def scripted() -> Iterator[ChatServer]:
    with ChatServer().serving() as server:
        yield server


def test_a_pipe_with_a_server_of_its_own(variables: dict[str, str]) -> None:
    done = piped(variables, "-p", "What does it change?", "-n", "16", text="-x = 1\n+x = 2\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert done.stdout.endswith("\n")
    assert done.stderr in ("", CUT_OFF), "no log"


def test_the_answer_is_that_of_the_server(variables: dict[str, str], server: ServerProcess) -> None:
    done = piped(variables, server.url, "-p", "Hello!", "-n", "5", "-t", "0")
    assert (done.returncode, done.stdout.strip() != "") == (0, True), done.stderr
    assert done.stderr == CUT_OFF


def test_errors_go_to_stderr_with_exit_codes(
    variables: dict[str, str], server: ServerProcess, tmp_path: Path
) -> None:
    image = tmp_path / "x.gif"
    image.write_bytes(b"GIF89a" + bytes(20))
    cases = [
        ((server.url,), ExitCode.USAGE, "the prompt is empty"),
        ((server.url, "-p", "x", "-m", "nobody"), ExitCode.USAGE, "has no model 'nobody'"),
        ((server.url, "-p", "x", "-i", str(image)), ExitCode.FAILURE, "vision-language model"),
        ((server.url, "-p", "x", "--set", "heat=3"), ExitCode.USAGE, "no parameter 'heat'"),
        (("http://127.0.0.1:1", "-p", "x"), ExitCode.FAILURE, "is unavailable"),
        ((str(tmp_path), "-p", "x"), ExitCode.MODEL_UNUSABLE, "tgi serve: "),
    ]
    for arguments, code, words in cases:
        done = piped(variables, *arguments)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert done.stderr.startswith("error: ")
        assert words in done.stderr
        assert len(done.stderr.splitlines()) <= 2


def test_a_pipe_gets_text_alone(variables: dict[str, str], scripted: ChatServer) -> None:
    body = delta(reasoning_content="Hm.") + delta(content="<think>a</think>\n**Yes**\x1b[1m")
    scripted.script = [Reply(body=body + delta("stop") + usage(3, 4) + DONE)]
    done = piped(variables, scripted.url, text="Is it?\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "**Yes**\x1b[1m\n", "")
    assert scripted.requests[0]["messages"] == [{"role": "user", "content": "Is it?"}]
    scripted.script = [error_reply(429, "quota", **{"retry-after": "1"}), text_reply("fine")]
    done = piped(variables, scripted.url, "-s", "Be brief.", "-p", "Why?", text="data\n")
    assert (done.stdout, done.stderr.count("\n")) == ("fine\n", 1)
    assert "trying again in 1 s" in done.stderr
    assert [m["content"] for m in scripted.requests[-1]["messages"]] == [
        "Be brief.",
        "data\n\nWhy?",
    ]


def test_a_pipe_whose_reader_leaves(variables: dict[str, str], scripted: ChatServer) -> None:
    scripted.script = [text_reply(*["many words "] * 20_000)]
    command = " ".join([*CHAT, scripted.url, "-p", "x"]) + " | head -c 5; echo ${PIPESTATUS[0]}"
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("many 1\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_its_server(
    variables: dict[str, str], number: signal.Signals
) -> None:
    process = subprocess.Popen(
        [*CHAT, "-p", "Tell me everything.", "--set", "seed=1"],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    poll(lambda: len(descendants_of(process.pid)) >= 3, SECONDS, "the server runs")
    children = descendants_of(process.pid)
    process.send_signal(number)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == ExitCode.INTERRUPTED
    assert err == b""
    poll(lambda: all(map(is_gone, children)), SECONDS, "they end")


def test_a_chat_with_a_server_of_its_own(variables: dict[str, str], tmp_path: Path) -> None:
    with Terminal([*CHAT, "-n", "24", "-t", "0"], variables) as terminal:
        screen = terminal.wait_for(PROMPT)
        assert "INFO" not in terminal.everything(), "no log lines"
        assert "tgi-demo · /help shows the commands" in screen
        terminal.type("How do I open a file?\r")
        screen = terminal.wait_for("first after")
        assert "prompt" in screen
        terminal.wait_for(lambda screen: screen.count(PROMPT) == 2)
        terminal.type("And how do I read it?\r")
        screen = terminal.wait_for("of them cached")
        terminal.type("/retry\r")
        terminal.wait_for(lambda screen: screen.count("of them cached") == 2)
        saved = tmp_path / "chat.json"
        terminal.type(f"/save {saved}\r")
        terminal.wait_for("4 messages saved")
        body = json.loads(saved.read_text())
        assert [message["role"] for message in body["messages"]] == ["user", "assistant"] * 2
        assert (body["max_tokens"], body["temperature"]) == (24, 0)
        terminal.wait_for(lambda screen: screen.endswith("Write a message, or /help"))
        terminal.type("\x03")
        terminal.wait_for("Ctrl-D or /quit ends the chat")
        children = descendants_of(terminal.process.pid)
        assert children
        terminal.type("\x04")
        assert terminal.wait() == ExitCode.OK
    poll(lambda: all(map(is_gone, children)), SECONDS, "they end")
    history = Path(variables["XDG_STATE_HOME"]) / "tgi" / "chat_history"
    assert "+How do I open a file?" in history.read_text()


def test_markdown_thinking_and_ctrl_c_in_a_terminal(
    variables: dict[str, str], scripted: ChatServer
) -> None:
    typed, ended = threading.Event(), threading.Event()
    thinking = b"".join(delta(reasoning=f"thought {number}. ") for number in range(50))
    text = "# Title\n\n- one **bold**\n- two\n\n```python\nx = 1\n```\n"
    scripted.script = [
        Reply(
            body=thinking + delta(content=text) + delta("stop") + usage(9, 60) + DONE,
            meanwhile=lambda: typed.wait(SECONDS),
        ),
        Reply(
            body=delta(content="Half an ans") + delta("stop") + DONE,
            meanwhile=lambda: ended.wait(SECONDS),
        ),
        Reply(body=delta(content="Half"), cut=True),
        text_reply("Whole."),
    ]
    with Terminal([*CHAT, scripted.url, "--no-history"], variables, 60, 20) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("First\x1b\rsecond line\r")
        terminal.wait_for("thinking")
        terminal.type("/think")  # ahead
        typed.set()
        screen = terminal.wait_for("60 tokens")
        assert "thought for " in screen
        assert "thought 49." not in screen
        for line in ("Title", " • one bold", " • two", "  x = 1", "... second line"):
            assert line in screen.splitlines()
        assert b"\x1b[1mbold" in terminal.written or b"bold" in terminal.written
        assert not any(line.startswith("/think") for line in screen.splitlines())
        terminal.wait_for(">>> /think")
        terminal.type("ing\r")
        terminal.wait_for("thought 49.")
        terminal.type("Next\r")
        terminal.wait_for("Half an ans")
        terminal.resize(40, 20)
        terminal.type("\x03")
        terminal.wait_for("stopped")
        ended.set()
        terminal.type("Third\r")
        terminal.wait_for(lambda screen: "was lost while it answered" in " ".join(screen.split()))
        terminal.type("/retry\r")
        terminal.wait_for("Whole.")
        terminal.type("/quit\r")
        assert terminal.wait() == ExitCode.OK
    assert scripted.requests[0]["messages"][0]["content"] == "First\nsecond line"
    assert [m["content"] for m in scripted.requests[-1]["messages"]] == [
        *("First\nsecond line", text.strip()),
        *("Next", "Half an ans"),
        "Third",
    ]


def test_several_models_and_a_terminal_without_colors(
    variables: dict[str, str], scripted: ChatServer
) -> None:
    scripted.cards = [{"id": f"acme/model-{number}"} for number in range(3)]
    scripted.script = [text_reply("**Hi**")]
    done = piped(variables, scripted.url, "-p", "x")
    assert done.returncode == ExitCode.USAGE
    assert "name one with --model: acme/model-0, acme/model-1" in done.stderr
    plain = {**variables, "NO_COLOR": "1"}
    with Terminal([*CHAT, scripted.url, "--no-history"], plain) as terminal:
        terminal.wait_for("Model (number or name)")
        terminal.type("2\r")
        terminal.wait_for(PROMPT)
        terminal.type("hello\r")
        terminal.wait_for("8 tokens")
        terminal.type("\x04")
        assert terminal.wait() == ExitCode.OK
    assert scripted.requests[0]["model"] == "acme/model-1"
    assert b"[3" not in terminal.written.replace(b"[3;", b""), "no colors"
    with Terminal(
        [*CHAT, scripted.url, "-m", "acme/model-0"], {**variables, "TERM": "dumb"}
    ) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("hello\r")
        terminal.wait_for("**Hi**")
        terminal.type("\x04")
        assert terminal.wait() == ExitCode.OK

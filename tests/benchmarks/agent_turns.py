"""Measure how many prompt tokens of each turn of an agent are computed, per API.

``python -m tests.benchmarks.agent_turns [--turns 5] [--revision FOLDER]``

Serves the bundled model. The agent has instructions, two tools, a task and, as coding agents do, a
system message after the task. Each turn's response is a forced tool call, whose result starts the
next turn. Computed tokens are the prompt tokens less the cached tokens that the server reports. The
conversation of each API starts with a text of its own, so that it reuses no other API's tokens.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.tools.server_process import ServerProcess, stop

COMMANDS = ("ls", "cat README.md", "cat src/main.py", "make test", "git diff")
INSTRUCTIONS = (
    "You work on a small program in the current folder. Read the files before you change them, "
    "keep changes small, run the tests after each of them, and stop when they pass. Explain what "
    "you did in two sentences. Do not use the network, and do not change files outside of the "
    "folder. If a command fails, read its output and try something else."
)
TASK = "The tests fail since yesterday. Find out why, and correct it."
REMINDER = "The folder is /home/me/program. The branch is main. It has two changes."
OUTPUTS = (
    "Makefile\nREADME.md\nsrc\ntests",
    "# program\n\nCounts the words of a text. `make test` runs the tests.",
    "def count(text):\n    return len(text.split(' '))\n\nprint(count(input()))",
    "FAILED tests/test_main.py::test_two_spaces - assert 3 == 2\n1 failed, 4 passed",
    "-    return len(text.split())\n+    return len(text.split(' '))",
)
TOOLS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("run", "Run a command and return its output.", {"command": {"enum": COMMANDS}}),
    ("finish", "End the task.", {"success": {"type": "boolean"}}),
)
MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class TurnUsage:
    """Prompt tokens of one turn, as reported by the server.

    Attributes:
        prompt: All tokens of the prompt.
        cached: Tokens found in the prefix cache.
    """

    prompt: int
    cached: int


class Agent(ABC):
    """The conversation of an agent over one API."""

    name: str
    path: str

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self.instructions = f"This is {self.name}. {INSTRUCTIONS}"

    def next_turn(self, output: str | None) -> TurnUsage:
        """Run a turn, which starts with the result of the previous turn's call."""
        if output is not None:
            self.add_result(output)
        response = self._client.post(self.path, json=self.body())
        if response.status_code != 200:
            raise RuntimeError(f"{self.path}: {response.status_code} {response.text}")
        answer: dict[str, Any] = response.json()
        self.add_response(answer)
        return self.usage(answer["usage"])

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the request of the next turn."""

    @abstractmethod
    def add_response(self, answer: dict[str, Any]) -> None:
        """Add the model's call to the conversation."""

    @abstractmethod
    def add_result(self, output: str) -> None:
        """Add the result of the last call."""

    @abstractmethod
    def usage(self, usage: dict[str, Any]) -> TurnUsage:
        """Read the prompt tokens from a response's usage."""


class Chat(Agent):
    name = "chat completions"
    path = "/v1/chat/completions"

    def __init__(self, client: httpx.Client) -> None:
        super().__init__(client)
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": self.instructions},
            {"role": "user", "content": TASK},
            {"role": "system", "content": REMINDER},
        ]

    def body(self) -> dict[str, Any]:
        tools = [
            {"type": "function", "function": {"name": name, "description": text, "parameters": it}}
            for name, text, it in _schemas()
        ]
        choice = {"type": "function", "function": {"name": "run"}}
        options = {"tools": tools, "tool_choice": choice, "max_tokens": MAX_TOKENS}
        return {"model": "tgi", "messages": self.messages, "temperature": 0, **options}

    def add_response(self, answer: dict[str, Any]) -> None:
        self.messages.append(answer["choices"][0]["message"])

    def add_result(self, output: str) -> None:
        call = self.messages[-1]["tool_calls"][0]["id"]
        self.messages.append({"role": "tool", "tool_call_id": call, "content": output})

    def usage(self, usage: dict[str, Any]) -> TurnUsage:
        return TurnUsage(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


class Responses(Agent):
    name = "responses"
    path = "/v1/responses"

    def __init__(self, client: httpx.Client) -> None:
        super().__init__(client)
        self.input: list[dict[str, Any]] = [
            {"role": "user", "content": TASK},
            {"role": "developer", "content": REMINDER},
        ]

    def body(self) -> dict[str, Any]:
        tools = [
            {"type": "function", "name": name, "description": text, "parameters": it}
            for name, text, it in _schemas()
        ]
        choice = {"type": "function", "name": "run"}
        options = {"tools": tools, "tool_choice": choice, "max_output_tokens": MAX_TOKENS}
        base = {"model": "tgi", "temperature": 0, "instructions": self.instructions}
        return {**base, "input": self.input, **options}

    def add_response(self, answer: dict[str, Any]) -> None:
        self.input += answer["output"]

    def add_result(self, output: str) -> None:
        [call] = [item for item in self.input[-2:] if item.get("type") == "function_call"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": output}
        self.input.append(result)

    def usage(self, usage: dict[str, Any]) -> TurnUsage:
        return TurnUsage(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"])


class Messages(Agent):
    name = "messages"
    path = "/v1/messages"

    def __init__(self, client: httpx.Client) -> None:
        super().__init__(client)
        self.messages: list[dict[str, Any]] = [
            {"role": "user", "content": [{"type": "text", "text": TASK}]},
            {"role": "system", "content": REMINDER},
        ]

    def body(self) -> dict[str, Any]:
        tools = [
            {"name": name, "description": text, "input_schema": it} for name, text, it in _schemas()
        ]
        choice = {"type": "tool", "name": "run"}
        options = {"tools": tools, "tool_choice": choice, "max_tokens": MAX_TOKENS}
        system = [{"type": "text", "text": self.instructions}]
        base = {"model": "tgi", "temperature": 0, "system": system}
        return {**base, "messages": self.messages, **options}

    def add_response(self, answer: dict[str, Any]) -> None:
        self.messages.append({"role": "assistant", "content": answer["content"]})

    def add_result(self, output: str) -> None:
        [call] = [each for each in self.messages[-1]["content"] if each["type"] == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": output}
        self.messages.append({"role": "user", "content": [result]})

    def usage(self, usage: dict[str, Any]) -> TurnUsage:
        cached = usage["cache_read_input_tokens"]
        created = usage.get("cache_creation_input_tokens") or 0
        return TurnUsage(usage["input_tokens"] + created + cached, cached)


def _schemas() -> list[tuple[str, str, dict[str, Any]]]:
    """Return name, description and parameters of each tool."""
    return [
        (name, text, {"type": "object", "properties": properties, "required": [*properties]})
        for name, text, properties in TOOLS
    ]


def measure(agent: Agent, turns: int) -> list[TurnUsage]:
    """Run a conversation and return the usage of each turn."""
    outputs = [OUTPUTS[index % len(OUTPUTS)] for index in range(turns - 1)]
    return [agent.next_turn(output) for output in (None, *outputs)]


def table(rows: Sequence[tuple[str, Sequence[TurnUsage]]]) -> str:
    """Format the computed tokens of each turn as a Markdown table."""
    count = len(rows[0][1])
    heads = ["API", *(f"turn {index + 1}" for index in range(count)), "later turns"]
    lines = [heads, ["---"] * len(heads)]
    for name, turns in rows:
        cells = [f"{turn.prompt - turn.cached} of {turn.prompt}" for turn in turns]
        later = turns[1:]
        prompt = sum(turn.prompt for turn in later)
        computed = prompt - sum(turn.cached for turn in later)
        lines.append([name, *cells, f"{computed} of {prompt} ({computed / prompt:.0%})"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--revision", type=Path, help="folder of another revision to serve")
    parser.add_argument(
        "--api", choices=["chat", "responses", "messages"], nargs="*", help="APIs to measure [all]"
    )
    arguments = parser.parse_args()
    agents: dict[str, type[Agent]] = {"chat": Chat, "responses": Responses, "messages": Messages}
    environment = {}
    if arguments.revision:
        os.chdir(arguments.revision)  # `python -m` imports from the current folder
        environment["PYTHONPATH"] = str(Path.cwd())
    rows: list[tuple[str, list[TurnUsage]]] = []
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(Path(folder) / "tgi", ["serve", "--port", "0"], environment)
        try:
            server.wait_ready()
            with httpx.Client(base_url=server.url, timeout=120) as client:
                for name in arguments.api or agents:
                    agent = agents[name](client)
                    rows.append((agent.path, measure(agent, arguments.turns)))
        finally:
            stop(server.process)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

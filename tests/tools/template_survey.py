"""Whether the turns of conversations are prefixes of each other, for folders of chat templates.

``python -m tests.tools.template_survey FOLDER [FOLDER ...] [--conversations 100]``

Every ``*.jinja`` file below the folders is probed as the server does, and renders random
conversations of all roles with tools and reasoning. For each conversation, the rendering of the
messages up to a turn must be a prefix of that with the model's reply, and of that of the next turn.
A template that fails is tried again without reasoning, then without tools, to tell why.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tgi_cli.text.conversation import adapt
from tgi_cli.text.template_process import Templates
from tgi_cli.text.template_traits import TemplateTraits, probe, with_parts
from tgi_cli.text.tools import with_calls_as_text

Message = dict[str, Any]

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<?>"}
PARAMETERS = {
    "type": "object",
    "properties": {"key": {"type": "string", "description": "A key."}},
    "required": ["key"],
}
TOOL = {
    "type": "function",
    "function": {"name": "find", "description": "Find.", "parameters": PARAMETERS},
}
REASONING = ("reasoning_content", "reasoning", "thinking")
EMPTY_REASONING = re.compile(r"(<think>)?\s*</think>\s*")
"""Some templates write it into replies of the last turn, and omit it from earlier ones."""


class Survey:
    """One template."""

    def __init__(self, source: str) -> None:
        self._templates = Templates({"default": source}, SPECIAL_TOKENS)
        variables = self._templates(b'{"job": "variables"}').get("variables", [])
        self.takes_tools = "tools" in variables
        self.error = ""
        self.traits = probe(self._render, source, self.takes_tools)

    def renders(self, messages: Sequence[Message], tools: bool) -> str | None:
        """The conversation as the server renders it, or None if the template refuses it."""
        traits, described = self.traits, not (tools and self.takes_tools)
        calls, results = described or not traits.calls, described or not traits.results
        told = adapt(with_calls_as_text(messages, None, calls=calls, results=results), traits)
        if traits.parts:
            told = [with_parts(message) for message in told]
        return self._render(told, None if described else [TOOL])

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> str | None:
        given = {"messages": messages, "tools": tools, "add_generation_prompt": False}
        job = {"job": "render", "name": "default", "most": 1 << 22, "variables": {}, "given": given}
        answer = self._templates(json.dumps(job).encode())
        self.error = answer.get("error", "")
        text: str | None = answer.get("text")
        return text

    def failure(self, conversations: Sequence[Sequence[Message]], tools: bool) -> str:
        """The first failure, or an empty text."""
        for messages in conversations:
            turns = [end for end in range(1, len(messages)) if _is_turn(messages, end)]
            begin = ""
            for end in sorted({*turns, *(turn + 1 for turn in turns)}):
                longer = self.renders(messages[:end], tools)
                if longer is None:
                    return f"raises {self.error[:60]!r}"
                if not any(REASONING[0] in message for message in messages):
                    longer = EMPTY_REASONING.sub("", longer)
                if not longer.startswith(begin):
                    return "is no prefix"
                if end in turns:
                    begin = longer
        return ""

    def verdict(self, conversations: Sequence[Sequence[Message]]) -> str:
        """Whether the property holds, and if not, what it depends on."""
        plain = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
        if self.traits == TemplateTraits() and self.renders(plain, True) is None:
            return "renders no plain conversation"
        failure = self.failure(conversations, True)
        if not failure:
            return "holds"
        bare = [[_without_reasoning(message) for message in each] for each in conversations]
        if not self.failure(bare, True):
            return "holds, but earlier reasoning is omitted"
        if self.takes_tools and not self.failure(bare, False):
            return "holds without tools"
        return failure


def _is_turn(messages: Sequence[Message], end: int) -> bool:
    """Whether a request may end there: behind the user or all results, in front of a reply."""
    roles = [message["role"] for message in messages[:end]]
    replies = messages[end]["role"] == "assistant"
    return replies and roles[-1] != "assistant" and "user" in roles


def _without_reasoning(message: Message) -> Message:
    return {key: value for key, value in message.items() if key not in REASONING}


def _conversation(rng: random.Random) -> Iterator[Message]:
    """Messages of all roles, each with another text."""
    count = 0

    def text() -> str:
        nonlocal count
        count += 1
        return f"[{count}]{rng.choice(('', ' a', ' b', ' ü'))}"

    def reply(content: str) -> Message:
        reasoning = dict.fromkeys(REASONING, f"Hmm {count}.") if rng.random() < 0.3 else {}
        return {"role": "assistant", "content": content, **reasoning}

    for _ in range(rng.choice((0, 1, 1, 2))):
        yield {"role": rng.choice(("system", "developer")), "content": text()}
    yield {"role": "user", "content": text()}
    for _ in range(rng.randint(1, 7)):
        kind = rng.choice(("system", "developer", "user", "user", "reply", "reply", "calls"))
        if kind == "calls":
            ids = [f"call_{count}_{index}" for index in range(rng.choice((1, 1, 2)))]
            calls = [
                {
                    "id": each,
                    "type": "function",
                    "function": {"name": "find", "arguments": {"key": each}},
                }
                for each in ids
            ]
            yield {**reply(rng.choice(("", text()))), "tool_calls": calls}
            for each in ids:
                yield {"role": "tool", "tool_call_id": each, "content": text()}
            yield reply(text())
        else:
            yield reply(text()) if kind == "reply" else {"role": kind, "content": text()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--conversations", type=int, default=100)
    arguments = parser.parse_args()
    rng = random.Random(0)
    conversations = [list(_conversation(rng)) for _ in range(arguments.conversations)]
    paths = sorted(path for folder in arguments.folders for path in folder.rglob("*.jinja"))
    sources = {path.read_text(encoding="utf-8"): path for path in reversed(paths)}
    found: dict[str, list[str]] = defaultdict(list)
    for source, path in sources.items():
        found[Survey(source).verdict(conversations)].append(path.stem)
    for verdict, names in sorted(found.items(), key=lambda item: -len(item[1])):
        listed = "" if verdict == "holds" else ": " + ", ".join(sorted(names))
        print(f"{len(names):4d} {verdict}{listed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

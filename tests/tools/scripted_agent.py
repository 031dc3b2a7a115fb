"""A router for real coding agents, over an engine whose model follows a script.

``python -m tests.tools.scripted_agent --port 3000 --log requests.jsonl``

The first turns call the client's shell tool in the model's own format (``--calls``, by default one
turn), the turn that has the last result ends with a text, and requests without such a tool (titles,
memories) get a short text. Cached tokens are those of the engine's own prefix cache,
:class:`KVCache`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.router.fakes import FakeEngine, FakeStream
from tests.router.serve_fake import serve
from tgi_cli import demo
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.kv_cache import KVCache
from tgi_cli.engine.messages import GenerationRequest
from tgi_cli.engine.sequence import Sequence
from tgi_cli.router.config import RouterConfig
from tgi_cli.rpc.interface import TokenBatch
from tgi_cli.text.tokenizer import Tokenizer

WINDOW = 65536
FINAL = "The command printed a greeting. The task is done."
SIDE = "Greeting"
COMMAND = "echo hello from step {} of the script"
"""Tells that a prompt holds the call: no client's own text contains it."""
END = "<|im_end|>"

SYSTEM_FIRST = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- 'Functions:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\nA call is <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not loop.first %}{{ raise_exception('The system message must come first.') }}{% endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n' if loop.first or loop.previtem.role != 'tool' else '\\n' }}
{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""Hermes' format, with the conditions of Qwen's templates: one system message, in front, and
contents that are strings."""

ALTERNATING = """\
{%- for message in messages %}
{%- if message.role not in ('user', 'assistant') %}{{ raise_exception('No such role.') }}{% endif %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('The roles must alternate.') }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""The conditions of Gemma's first templates: no system message, no tools, alternating roles."""

TEMPLATES = {"system-first": SYSTEM_FIRST, "alternating": ALTERNATING}
"""By name."""

_NOTE = {"description": "Print a greeting"}
SHELL_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "exec_command": ("cmd", {}),
    "Bash": ("command", _NOTE),
    "bash": ("command", _NOTE),
    "run_shell_command": ("command", _NOTE | {"is_background": False}),
}
"""The argument for the command, and others, by the names of Codex's, Claude Code's, OpenCode's and
Qwen Code's shell tools."""


@dataclass(frozen=True, slots=True)
class Served:
    """One request, as the engine saw it.

    Attributes:
        kind: ``call``, ``final`` or ``side``.
        prompt_tokens, cached_tokens, answer_tokens: counts; cached ones lead the prompt.
        block_size: prefixes are cached in multiples of it.
    """

    kind: str
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    block_size: int


class AgentEngine(FakeEngine):
    """Answers by the prompt, and reports cached tokens as an engine would.

    Attributes:
        served: the requests so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        log: Path | None = None,
        prompts: bool = False,
        calls: int = 1,
        window: int = WINDOW,
    ):
        super().__init__(tokenizer)
        self.step = 8
        self.end_id = tokenizer.encode(END, False)[0]
        self.info = replace(
            self.info,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=(self.end_id,),
            max_input_tokens=window - 1,
            max_total_tokens=window,
            max_batch_total_tokens=4 * WINDOW,
        )
        size = self.info.block_size
        self.cache = KVCache(
            SchedulerConfig(
                max_total_tokens=WINDOW,
                max_batch_prefill_tokens=WINDOW,
                max_batch_size=8,
                block_size=size,
                num_blocks=16 * WINDOW // size,
            )
        )
        self.served: list[Served] = []
        self._log = log
        self._prompts = prompts
        self._calls = calls

    def submit(
        self, request: GenerationRequest, adapter: str = "", session: str = ""
    ) -> FakeStream:
        prompt = self.tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False)
        kind, text = script(prompt, self._calls)
        reply = [*self.tokenizer.encode(text, False), self.end_id]
        sequence = Sequence(request, len(self.served))
        admitted = self.cache.admit(sequence, self.cache.match(sequence), [])
        assert admitted, "the script needs more blocks"
        cached = sequence.num_computed
        sequence.token_ids += reply[: request.max_new_tokens]
        known = len(sequence.token_ids) - 1  # the last token's KV is not computed
        self.cache.grow(sequence, known)
        self.cache.index_computed(sequence, known)
        self.cache.release(sequence)
        found = Served(kind, len(request.prompt_ids), cached, len(reply), self.info.block_size)
        self.served.append(found)
        self._record(found, prompt)
        self.requests.append(request)
        return _Stream(self, request, reply, self.chances[0], cached)

    def _record(self, found: Served, prompt: str) -> None:
        if self._log is None:
            return
        line = asdict(found) | ({"prompt": prompt} if self._prompts else {})
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class _Stream(FakeStream):
    def __init__(
        self, engine: AgentEngine, request: GenerationRequest, reply: list[int], *rest: Any
    ) -> None:
        chance, self._cached = rest
        super().__init__(engine, request, reply, chance)

    async def __aiter__(self) -> AsyncIterator[TokenBatch]:
        async for batch in super().__aiter__():
            if batch.started is not None:
                batch.started = replace(batch.started, cached_tokens=self._cached)
            await asyncio.sleep(0)
            yield batch


def script(prompt: str, calls: int = 1) -> tuple[str, str]:
    """What kind of request a prompt is, and the answer to it; ``calls``: of tools, one a turn."""
    offered = [
        name for name in SHELL_TOOLS if re.search(rf'"function": ?{{"name": ?"{name}"', prompt)
    ]
    if not offered:
        return "side", SIDE
    commands = [COMMAND.format(step) for step in range(1, calls + 1)]
    command = next((each for each in commands if each not in prompt), None)
    if command is None:
        return "final", FINAL
    argument, others = SHELL_TOOLS[offered[0]]
    call = {"name": offered[0], "arguments": {argument: command, **others}}
    return "call", f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def write_model(folder: Path, template: str) -> Path:
    """A model's folder, as far as the router reads it: the bundled tokenizer, another template."""
    source = demo.model_path()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "config.json", "generation_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    config |= {"chat_template": template, "model_max_length": WINDOW}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def main() -> int:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=3000)
    parser.add_argument("--log", type=Path, help="a JSON line for each request")
    parser.add_argument("--prompts", action="store_true", help="log the prompts, too")
    parser.add_argument(
        "--template", default="system-first", help=f"{', '.join(TEMPLATES)}, or a file"
    )
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens of a request")
    parser.add_argument("--calls", type=int, default=1, help="turns that call a tool")
    parser.add_argument("--api-key")
    given = parser.parse_args()
    template = TEMPLATES.get(given.template) or Path(given.template).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="tgi-agent-") as base:
        path = write_model(Path(base), template)
        engine = AgentEngine(
            Tokenizer.load(path), given.log, given.prompts, given.calls, given.window
        )
        config = RouterConfig(
            model_path=path,
            model_id="acme/agent",
            engine_url="unix:///engine",
            hostname="127.0.0.1",
            port=given.port,
            api_key=given.api_key,
            tool_call_parser="auto",
        )
        return serve(engine, config)


if __name__ == "__main__":
    sys.exit(main())

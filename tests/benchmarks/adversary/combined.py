"""Request bodies that are expensive only by a combination of valid fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_IDS = [100 + n % 3000 for n in range(2000)]
_TEXT = "The quick brown fox jumps over the lazy dog. " * 40
_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": _TEXT}]}


def bodies(limit: int) -> Iterator[tuple[str, str, bytes]]:
    """Yield path, name and body of each."""
    cases: list[tuple[str, str, dict[str, Any]]] = []
    for echo in (True, False):
        cases.append((
            "/v1/completions", f"4 prompts of 2,000 ids with logprobs, echo {echo}".lower(),
            {"prompt": [_IDS] * 4, "echo": echo, "logprobs": 5, "max_tokens": 1}))  # fmt: skip
    cases += [
        ("/v1/completions", "1 prompt of 2,000 ids, echoed, streamed",
         {"prompt": _IDS, "echo": True, "logprobs": 5, "max_tokens": 40, "stream": True}),
        ("/v1/completions", "4 prompts of 100,000 ids",
         {"prompt": [_IDS * 50] * 4, "max_tokens": 1}),
        ("/generate", "prompt, details and top tokens", {"inputs": _TEXT * 2, "parameters": {
            "max_new_tokens": 200, "details": True, "decoder_input_details": True,
            "top_n_tokens": 5, "return_full_text": True}}),
        ("/generate_stream", "full_text of a long text", {"inputs": _TEXT * 2, "parameters": {
            "max_new_tokens": 300, "full_text": True, "top_n_tokens": 5}}),
        ("/generate", "stop strings with a common prefix", {"inputs": _TEXT, "parameters": {
            "max_new_tokens": 200, "stop": ["a" * 900 + str(n) for n in range(4)]}}),
        ("/v1/chat/completions", "samples with logprobs",
         {**_CHAT, "n": 2, "logprobs": True, "top_logprobs": 5, "max_tokens": 200}),
        ("/v1/chat/completions", "a penalty, a bias and banned words",
         {**_CHAT, "max_tokens": 100, "logit_bias": {str(n): 1 for n in range(300)},
          "bad_words": [f"word{n}" for n in range(256)], "presence_penalty": 1.5}),
        ("/v1/chat/completions", "many messages", {"max_tokens": 2, "messages": [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 20_000}),
        ("/chat_tokenize", "many messages", {"messages": [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 20_000}),
        ("/v1/chat/completions", "many tools", {**_CHAT, "max_tokens": 2, "tools": [
            {"type": "function", "function": {"name": f"f{n}", "parameters": {"type": "object",
             "properties": {"a": {"type": "string"}}}}} for n in range(10_000)]}),
        ("/v1/chat/completions", "many tools, one required", {
            **_CHAT, "max_tokens": 2, "tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": f"f{n}", "parameters": {"type": "object",
             "properties": {"a": {"type": "string"}}}}} for n in range(2_000)]}),
        ("/v1/responses", "many messages", {"max_output_tokens": 2, "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]}] * 20_000}),
        ("/vertex", "4 instances of long prompts", {"instances": [
            {"inputs": _TEXT * 2, "parameters": {"max_new_tokens": 2}}] * 4}),
        ("/vertex", "chats", {"instances": [{**_CHAT, "max_tokens": 2}] * 900}),
        ("/v2/models/a/infer", "600,000 bytes as integers", {"inputs": [
            {"name": "a", "shape": [1], "datatype": "BYTES", "data": [97] * 600_000}]}),
        ("/v2/models/a/infer", "tensors of one text each", {"parameters": {"max_new_tokens": 2},
         "inputs": [{"name": "a", "shape": [1], "datatype": "BYTES", "data": ["a"]}] * 20_000}),
        ("/tokenize", "a text of 1.35 MB", {"inputs": "a word and 1 more " * 75_000}),
        ("/v1/completions", "300,000 prompts", {"prompt": ["a"] * 300_000, "max_tokens": 2}),
        ("/v1/chat/completions", "a stop string of 200 KB",
         {**_CHAT, "max_tokens": 2, "stop": ["a" * 200_000]}),
        ("/v1/completions", "banned words of 1.7 MB",
         {"prompt": "a", "max_tokens": 2, "bad_words": [f"w{n:06d}" for n in range(170_000)]}),
        ("/v1/completions", "a banned word of 900 KB",
         {"prompt": "a", "max_tokens": 2, "bad_words": ["a" * 900_000]}),
        ("/vertex", "60,000 instances", {"instances": [{"inputs": "a"}] * 60_000}),
    ]  # fmt: skip
    for path, name, body in cases:
        content = json.dumps(body, separators=(",", ":")).encode()
        assert len(content) <= limit, f"{path}, {name}: {len(content)} bytes"
        yield path, name, content

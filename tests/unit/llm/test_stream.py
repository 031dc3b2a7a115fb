"""Text as it comes, and what ends it before its time."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tools.checkpoints import make_llama
from tests.unit.llm.conftest import LIMITS
from tgi_cli import LLM, EngineDeadError, GenerationError, SamplingParams, demo
from tgi_cli.errors import ConfigError

PROMPT = "def read_json(path):"
LONG: dict[str, Any] = {"max_new_tokens": 100, "ignore_eos": True}


class Watch:
    """A logits processor that says when a request runs, and when it does no more.

    Each call takes ``pause`` seconds: so that a test can act before a long request ends.
    """

    def __init__(self, pause: float) -> None:
        self.pause = pause
        self.calls = 0
        self.called = threading.Event()

    def __call__(
        self, request_id: int, logits: Any, token_ids: Sequence[int], client_id: int | None
    ) -> Any:
        self.calls += 1
        self.called.set()
        time.sleep(self.pause)
        return logits


def test_pieces_join_to_the_completion(llm: LLM) -> None:
    params = SamplingParams(seed=5, top_logprobs=2)
    (whole,) = llm.generate(PROMPT, params, max_new_tokens=20)
    stream = llm.stream(PROMPT, params, max_new_tokens=20)
    pieces = list(stream)
    assert "".join(p.text for p in pieces) == whole.text
    assert [i for p in pieces for i in p.token_ids] == whole.token_ids
    assert [value for p in pieces for value in p.logprobs] == whole.logprobs
    assert [top for p in pieces for top in p.top_logprobs] == whole.top_logprobs
    assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert len(pieces) > 1
    assert stream.completion.text == whole.text
    assert stream.completion.finish_reason == "length"
    assert next(stream, None) is None


def test_a_stop_string_is_never_shown(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPT, max_new_tokens=20)
    stop = whole.text[10:18]
    pieces = list(llm.stream(PROMPT, stop=[stop], **LONG))
    assert "".join(p.text for p in pieces) == whole.text[: whole.text.index(stop)]
    assert pieces[-1].finish_reason == "stop_sequence"


@pytest.mark.parametrize("way", ["break", "close", "with"])
def test_leaving_early_cancels_at_the_next_step(llm: LLM, way: str) -> None:
    watch = Watch(pause=0.1)
    if way == "break":
        for piece in llm.stream(PROMPT, logits_processors=[watch], **LONG):
            assert piece.token_ids
            break
    elif way == "close":
        stream = llm.stream(PROMPT, logits_processors=[watch], **LONG)
        next(stream)
        stream.close()
        assert next(stream, None) is None
        assert stream.completion.finish_reason == "cancelled"
    else:
        with llm.stream(PROMPT, logits_processors=[watch], **LONG) as stream:
            next(stream)
    llm.generate("something else", max_new_tokens=2)
    at_that_time = watch.calls
    llm.generate("something else", max_new_tokens=4)
    assert watch.calls == at_that_time < 100


def test_cancel_by_id_from_another_thread(llm: LLM) -> None:
    stream = llm.stream(PROMPT, logits_processors=[Watch(pause=0.1)], **LONG)
    next(stream)
    canceller = threading.Thread(target=llm.cancel, args=(stream.request_id,))
    canceller.start()
    pieces = list(stream)
    canceller.join(60)
    assert pieces[-1].finish_reason == "cancelled"
    assert 0 < len(stream.completion.token_ids) < 100
    llm.cancel(stream.request_id)  # has ended: ignored
    llm.cancel(1 << 60)


def test_cancel_within_a_batch(llm: LLM) -> None:
    def cancel_7(
        request_id: int, logits: Any, token_ids: Sequence[int], client_id: int | None
    ) -> Any:
        if token_ids[0] == 7 and len(token_ids) == 4:
            llm.cancel(request_id)
        return logits

    completions = llm.generate([[5], [7], [6]], logits_processors=[cancel_7], **LONG)
    assert [c.finish_reason for c in completions] == ["length", "cancelled", "length"]
    assert 3 <= len(completions[1].token_ids) <= 4


@pytest.fixture
def python_handles_ctrl_c() -> Iterator[None]:
    """As at the start of a program, whatever an event loop or a server set before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_cancels_live_requests(llm: LLM, python_handles_ctrl_c: None) -> None:
    watch = Watch(pause=0.002)

    def interrupt() -> None:
        assert watch.called.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5], [6]] * 20, logits_processors=[watch], **LONG)
    thread.join(60)
    llm.generate("something else", max_new_tokens=2)
    at_that_time = watch.calls
    llm.generate("something else", max_new_tokens=4)
    assert watch.calls == at_that_time < 40 * 100


def test_a_failing_stream_raises_an_error(llm: LLM) -> None:
    def fail_later(
        request_id: int, logits: Any, token_ids: Sequence[int], client_id: int | None
    ) -> Any:
        if len(token_ids) > 4:
            raise RuntimeError("out of ideas")
        return logits

    stream = llm.stream([5, 6], logits_processors=[fail_later], **LONG)
    with pytest.raises(GenerationError, match="out of ideas") as failed:
        list(stream)
    assert len(failed.value.completions[0].token_ids) == 3


def test_a_stream_is_one_continuation(llm: LLM) -> None:
    with pytest.raises(ValueError, match="n and best_of must be 1"):
        llm.stream(PROMPT, n=2)
    with pytest.raises(ValueError, match="prompt 0: the prompt has no tokens"):
        llm.stream("")


def test_a_stream_keeps_its_llm(make_llm: Callable[..., LLM]) -> None:
    stream = make_llm().stream(PROMPT, max_new_tokens=5)
    gc.collect()
    assert sum(len(p.token_ids) for p in stream) == 5


def test_an_llm_without_references_frees_its_model(make_llm: Callable[..., LLM]) -> None:
    from tgi_cli.worker.worker import ModelWorker

    def workers() -> int:
        gc.collect()
        return sum(type(o) is ModelWorker for o in gc.get_objects())

    before = workers()
    llm = make_llm()
    engine = weakref.ref(llm._engine)
    assert workers() == before + 1
    llm.close()
    assert workers() == before
    with pytest.raises(EngineDeadError):
        llm.generate("x")
    del llm
    gc.collect()
    assert engine() is None
    unclosed = make_llm()
    unclosed.generate("x", max_new_tokens=1)
    del unclosed
    assert workers() == before


@pytest.fixture(scope="module")
def bundled() -> Iterator[LLM]:
    limits = LIMITS | {"max_total_tokens": 256}
    with LLM(**limits) as llm:
        yield llm


HELLO = [{"role": "user", "content": "Hello!"}]


def test_the_bundled_model_chats(bundled: LLM) -> None:
    assert bundled.info.model_id == demo.MODEL_ID
    (answer,) = bundled.chat(HELLO, max_new_tokens=40)
    assert answer.prompt == "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    assert answer.finish_reason == "eos_token"
    assert answer.text.strip()
    assert "<|im_end|>" not in answer.text
    several = bundled.chat([HELLO, [{"role": "user", "content": "Bye"}]], max_new_tokens=40)
    assert [a.prompt_index for a in several] == [0, 1]
    assert several[0].text == answer.text
    streamed = "".join(p.text for p in bundled.stream_chat(HELLO, max_new_tokens=40))
    assert streamed == answer.text


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        (None, ConfigError, "has no chat template"),
        ("{{ raise_exception('no greetings') }}", ValueError, "refuses the conversation: no greet"),
    ],
)
def test_an_invalid_conversation_is_refused(
    tmp_path: Path, template: str | None, error: type[Exception], message: str
) -> None:
    folder = make_llama(tmp_path, vocab_size=4096, tokenizer=demo.model_path())
    config = {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with LLM(folder, **LIMITS) as llm, pytest.raises(error, match=message):
        llm.chat(HELLO)

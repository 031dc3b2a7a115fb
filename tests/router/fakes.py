"""An engine with scripted answers, to test the router without a real one."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from tgi_cli.engine.messages import (
    EngineInfo,
    Finished,
    FinishReason,
    GenerationRequest,
    PromptLogprobs,
    Started,
    VerifiedDrafts,
)
from tgi_cli.engine.metrics import EngineLoad, EngineMetrics
from tgi_cli.errors import ShardError
from tgi_cli.rpc.interface import (
    Adapter,
    AdapterError,
    AdapterFault,
    Adapters,
    TokenBatch,
)
from tgi_cli.text.tokenizer import Tokenizer

END_ID = 1
"""<|im_end|> of the tiny tokenizer."""


def engine_info(vocab_size: int = 400) -> EngineInfo:
    """Small limits, so that tests can reach them."""
    return EngineInfo(
        model_id="tiny",
        revision="",
        model_type="llama",
        dtype="float32",
        device="cpu",
        vocab_size=vocab_size,
        eos_token_ids=(END_ID,),
        max_input_tokens=63,
        max_total_tokens=64,
        max_batch_prefill_tokens=512,
        max_batch_total_tokens=1024,
        max_batch_size=8,
        block_size=16,
        weight_bytes=1000,
        load_seconds=0.1,
        grammar=True,
        pipeline_parallel_size=2,
    )


class FakeEngine:
    """An EngineClient whose answers are scripted.

    Attributes:
        replies: token ids of the coming answers, in order of submission; the last is repeated.
        step: tokens per batch.
        drafted: drafts that each batch has verified; its tokens but the last were accepted.
        gate: when set, every batch waits for one ``release()`` of it.
        failure: the stream ends with this error, of ``failure_reason``, behind ``fail_after``
            tokens.
        fails: ids of the requests that ``failure`` is for; empty: all.
        late: ids of the requests that begin when the others are done.
        chances: log-probability of every token, in order of submission; the last is repeated.
        requests, cancelled: what was submitted, and the ids that were cancelled.
        used: the adapters' names of ``requests``.
        adapters: what the router has heard of; ``there`` is what is loaded.
        asked: how often the router asked.
        measured: the answer of ``metrics()``.
        fault: what the next loading or unloading ends with; ``faults``: the next ones of a name.
        loading, sources: names and sources of all adapters to load, in order.
        opened: loading goes on when it is set.
        folders: local folders by source.
        lost_after: it is gone after so many more loadings; None: it stays.
    """

    def __init__(self, tokenizer: Tokenizer, reply: str = "hello world") -> None:
        self.tokenizer = tokenizer
        self.info = engine_info()
        self.measured = EngineMetrics(
            EngineLoad(
                queued=3,
                running=2,
                used_blocks=5,
                preemptions=1,
                reused_tokens=40,
                prompt_tokens=100,
                cached_blocks=7,
                used_state_slots=5,
                cached_states=6,
                steps=11,
                context_tokens=60,
                drafted_tokens=12,
                accepted_tokens=9,
                encoded_images=4,
                reused_images=8,
            )
        )
        self._ids = itertools.count(1)
        self.connected = True
        self.is_healthy = True
        self.replies: deque[list[int]] = deque()
        self.reply_with(reply)
        self.step = 1
        self.drafted = 0
        self.gate: asyncio.Semaphore | None = None
        self.failure: str | None = None
        self.failure_reason = FinishReason.ERROR
        self.fail_after = 0
        self.fails: set[int] = set()
        self.late: set[int] = set()
        self.chances = [-0.10000000149011612]
        self.pause = 0.0
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[int] = []
        self.used: list[str] = []
        self.adapters = self.there = Adapters()
        self.asked = 0
        self.fault: Exception | None = None
        self.faults: dict[str, list[Exception]] = {}
        self.loading: list[str] = []
        self.sources: list[str] = []
        self.opened = asyncio.Event()
        self.opened.set()
        self.folders: dict[str, str] = {}
        self.lost_after: int | None = None
        self.heard: list[Callable[[bool], None]] = []

    def on_found(self, heard: Callable[[bool], None]) -> None:
        self.heard.append(heard)

    def expect_loss(self) -> None:
        """As the real one's, whose log shows it."""

    def restart(self, *adapters: Adapter, another: bool = True, **limits: Any) -> None:
        """Come back as the same engine, or as another with only these adapters and other limits."""
        self.info = replace(self.info, **limits)
        if another:
            self.there = Adapters(self.there.max_loras, adapters)
        self.adapters = self.there
        for heard in self.heard:
            heard(another)
        self.connected = True

    def load_names(self, *names: str) -> None:
        """Have adapters loaded that the router has heard of."""
        loaded = tuple(Adapter(name, f"/adapters/{name}") for name in names)
        self.adapters = self.there = Adapters(4, loaded)

    def reply_with(self, *texts: str) -> list[list[int]]:
        """Script the next answers, each with the end token behind it. Their ids."""
        return self.play(*([*self.tokenizer.encode(text, False), END_ID] for text in texts))

    def play(self, *replies: Sequence[int]) -> list[list[int]]:
        """Script the next answers as ids."""
        self.replies = deque(list(reply) for reply in replies)
        return list(self.replies)

    async def healthy(self) -> bool:
        return self.is_healthy

    async def metrics(self) -> EngineMetrics:
        return self.measured

    async def list_adapters(self) -> Adapters:
        self.asked += 1
        if not self.connected:
            raise ShardError("the model server is gone")
        self.adapters = self.there
        return self.adapters

    async def load_adapter(self, name: str, source: str, in_place: bool = False) -> Adapters:
        self.loading.append(name)
        self.sources.append(source)
        await self.opened.wait()
        if self.lost_after is not None:
            self.connected = self.lost_after > 0
            self.lost_after = self.lost_after - 1 if self.connected else None
        if not self.connected:
            raise ShardError("the model server is gone")
        fault = self.faults[name].pop(0) if self.faults.get(name) else self.fault
        if fault is not None:
            raise fault
        source = self.folders.get(source, source)
        others = tuple(adapter for adapter in self.there.loaded if adapter.name != name)
        if len(others) < len(self.there.loaded) and not in_place:
            raise AdapterError(f"an adapter {name!r} is loaded already", "", AdapterFault.TAKEN)
        loaded = (*others, Adapter(name, source))
        self.adapters = self.there = Adapters(self.there.max_loras, loaded)
        return self.adapters

    async def unload_adapter(self, name: str) -> Adapters:
        if self.fault is not None:
            raise self.fault
        if name not in self.there.names:
            raise AdapterError(f"there is no adapter {name!r}", "", AdapterFault.UNKNOWN)
        loaded = tuple(adapter for adapter in self.there.loaded if adapter.name != name)
        self.adapters = self.there = Adapters(self.there.max_loras, loaded)
        return self.adapters

    def submit(
        self, request: GenerationRequest, adapter: str = "", session: str = ""
    ) -> FakeStream:
        if not self.connected:
            raise ShardError("the model server is gone")
        self.requests.append(request)
        self.used.append(adapter)
        reply = self.replies[0] if len(self.replies) == 1 else self.replies.popleft()
        chance = self.chances[min(len(self.requests), len(self.chances)) - 1]
        return FakeStream(self, request, reply, chance)

    def next_request_id(self) -> int:
        return next(self._ids)

    async def close(self) -> None:
        """As the real one's."""


class FakeStream:
    def __init__(
        self, engine: FakeEngine, request: GenerationRequest, reply: list[int], chance: float
    ) -> None:
        self._engine = engine
        self._request = request
        self._reply = reply[: request.max_new_tokens]
        self._chance = chance
        self._cancelled = asyncio.Event()

    def cancel(self) -> None:
        if not self._cancelled.is_set():
            self._cancelled.set()
            self._engine.cancelled.append(self._request.request_id)

    async def __aiter__(self) -> AsyncIterator[TokenBatch]:
        engine, request = self._engine, self._request
        if request.request_id in engine.late:
            for _ in range(1000):
                await asyncio.sleep(0)
        started = Started(request.request_id, queue_ns=2_000_000, cached_tokens=4)
        for place in range(0, len(self._reply), engine.step):
            if engine.gate is not None and not await self._released(engine.gate):
                return
            if engine.pause:
                await asyncio.sleep(engine.pause)
            if self._cancelled.is_set():
                return
            failing = not engine.fails or request.request_id in engine.fails
            if engine.failure is not None and failing and place >= engine.fail_after:
                reason = engine.failure_reason
                yield TokenBatch(finished=Finished(request.request_id, reason, engine.failure))
                return
            ids = self._reply[place : place + engine.step]
            batch = TokenBatch(token_ids=ids, logprobs=[self._chance] * len(ids))
            if engine.drafted:
                accepted, source = len(ids) - 1, "prediction" if request.prediction else "context"
                verified = VerifiedDrafts(request.request_id, engine.drafted, accepted, source)
                batch.drafts = (verified,)
            count = request.sampling.top_logprobs
            if count:
                batch.top_ids = [[index, *range(10, 10 + count)][:count] for index in ids]
                batch.top_logprobs = [[-0.1 * (n + 1) for n in range(count)] for _ in ids]
            if place == 0:
                batch.started = started
                for run in self._prompt_runs():
                    yield TokenBatch(prompt_logprobs=[run])
            if place + engine.step >= len(self._reply):
                ended = ids[-1] in request.stop_token_ids and not request.ignore_eos
                reason = FinishReason.EOS_TOKEN if ended else FinishReason.LENGTH
                batch.finished = Finished(request.request_id, reason)
            yield batch

    def _prompt_runs(self) -> list[PromptLogprobs]:
        """Two chunks: token i of the prompt has the log-probability -i."""
        top = self._request.prompt_logprobs
        length = len(self._request.prompt_ids)
        if top is None or length < 2:
            return []
        cut = 1 + length // 2
        return [
            PromptLogprobs(
                self._request.request_id,
                start,
                [-float(place) for place in range(start, end)],
                [list(range(10, 10 + top)) for _ in range(start, end)] if top else [],
                [[-0.5] * top for _ in range(start, end)] if top else [],
            )
            for start, end in ((1, cut), (cut, length))
            if start < end
        ]

    async def _released(self, gate: asyncio.Semaphore) -> bool:
        """Wait for the gate, but not beyond a cancel."""
        waits = {
            asyncio.ensure_future(gate.acquire()),
            asyncio.ensure_future(self._cancelled.wait()),
        }
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return not self._cancelled.is_set()

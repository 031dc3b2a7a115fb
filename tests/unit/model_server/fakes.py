"""An engine made of two queues, whose outputs the test provides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from queue import SimpleQueue

from tgi_cli.engine.core import Inbound
from tgi_cli.engine.messages import EngineInfo, GenerationRequest, StepOutputs
from tgi_cli.engine.metrics import EngineMetrics
from tgi_cli.sampling.params import SamplingParams

INFO = EngineInfo(
    model_id="org/model",
    revision="abc",
    model_type="llama",
    dtype="float32",
    device="cpu",
    vocab_size=100,
    eos_token_ids=(1, 2),
    max_input_tokens=20,
    max_total_tokens=32,
    max_batch_prefill_tokens=64,
    max_batch_total_tokens=1024,
    max_batch_size=8,
    block_size=16,
    weight_bytes=12345,
    load_seconds=1.5,
    grammar=True,
    speculate=3,
)


class ScriptedEngine:
    """The queues and counters that a server wants of an engine, moved by hand.

    Attributes:
        moves: whether there is progress each time that somebody looks.
    """

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Inbound] = SimpleQueue()
        self.outbox: SimpleQueue[StepOutputs | None] = SimpleQueue()
        self.moves = False
        self.live_requests = self.driven_requests = 0
        self.metrics = EngineMetrics()
        self._progress = 0

    @property
    def progress(self) -> int:
        self._progress += self.moves
        return self._progress

    @progress.setter
    def progress(self, value: int) -> None:
        self._progress = value

    async def taken(self) -> Inbound:
        """The next message in the inbox; waits for it in a thread."""
        return await asyncio.to_thread(self.inbox.get, True, 60)

    def put_tokens(self, *tokens: tuple[int, int], **more: object) -> None:
        """One step's outputs of (engine's request id, token id)."""
        self.outbox.put(
            StepOutputs(
                request_ids=[request_id for request_id, _ in tokens],
                token_ids=[token_id for _, token_id in tokens],
                logprobs=[-0.5] * len(tokens),
                top_ids=[[] for _ in tokens],
                top_logprobs=[[] for _ in tokens],
                **more,  # type: ignore[arg-type]
            )
        )


def request(request_id: int, **fields: object) -> GenerationRequest:
    """A valid request, but for what ``fields`` change."""
    values: dict[str, object] = {
        "prompt_ids": (3, 4, 5),
        "sampling": SamplingParams(seed=7),
        "max_new_tokens": 8,
        **fields,
    }
    return GenerationRequest(request_id=request_id, **values)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition; fails after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        await asyncio.sleep(0.01)

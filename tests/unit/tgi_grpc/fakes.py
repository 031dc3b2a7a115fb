"""A real engine, server and wire around a worker and a tokenizer that are a few lines each."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from tests.tools.grpc_reflection import ReflectionClient
from tests.unit.engine.fake_worker import FakeWorker, continuation
from tests.unit.engine.test_scheduler import limits
from tests.unit.model_server.fakes import INFO
from tgi_cli.engine.core import EngineCore
from tgi_cli.engine.messages import EngineInfo, Shutdown
from tgi_cli.engine.speculator import Speculator
from tgi_cli.model_server.grpc_server import EngineServer
from tgi_cli.model_server.grpc_service import ServedEngine
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.tgi_grpc.model_text import ModelText
from tgi_cli.tgi_grpc.mount import GenerateOptions, GenerateServices

V2, V3 = "generate.v2.TextGenerationService", "generate.v3.TextGenerationService"
VOCAB = 1000
BOS, EOS = 1, 2


def _numbers() -> Tokenizer:
    backend = Backend(WordLevel({f"<{i}>": i for i in range(VOCAB)}, unk_token="<0>"))
    backend.decoder = Fuse()
    return Tokenizer(backend)


class FakeModelText(ModelText):
    """A word is a number, the number is the id, and ``<id>`` is its text."""

    def __init__(self) -> None:
        super().__init__(_numbers(), (BOS, EOS))
        self.closed = False

    def encode(self, text: str, add_special_tokens: bool, truncate: int) -> list[int]:
        ids = [BOS] * add_special_tokens + [int(word) for word in text.split()]
        return ids[-truncate:] if truncate else ids

    def grammar(self, kind: str, source: str) -> str:
        if kind != "regex":
            raise ValueError("it is no regular expression")
        return source

    def close(self) -> None:
        self.closed = True


class Served:
    """A server with its engine, worker and text."""

    worker: FakeWorker
    text: FakeModelText

    def __init__(
        self, core: EngineCore, server: EngineServer, front: GenerateServices, path: Path
    ) -> None:
        self.core = core
        self.server = server
        self.front = front
        self.path = path

    def client(self, service: str = V3) -> ReflectionClient:
        return ReflectionClient(f"unix:{self.path}", service)

    @property
    def used_blocks(self) -> int:
        return self.core.metrics.load.used_blocks


@contextmanager
def served(
    depth: int = 0,
    worker: FakeWorker | None = None,
    grammars: Any = None,
    info: EngineInfo | None = None,
    speculator: Speculator | None = None,
    **bounds: Any,
) -> Iterator[Served]:
    """An engine of some limits behind a socket; nothing must be left in it at the end."""
    engine_limits = limits(**bounds)
    worker = worker or FakeWorker(engine_limits.block_size, VOCAB)
    drafts = speculator is not None
    core = EngineCore(worker, engine_limits, depth, grammars, speculator, external_drafts=drafts)
    engine_info = info or replace(
        INFO,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        max_input_tokens=engine_limits.max_total_tokens - 1,
        max_total_tokens=engine_limits.max_total_tokens,
        max_batch_prefill_tokens=engine_limits.max_batch_prefill_tokens,
        max_batch_total_tokens=engine_limits.num_blocks * engine_limits.block_size,
        block_size=engine_limits.block_size,
        grammar=grammars is not None,
        speculate=7,
    )
    loop = threading.Thread(target=core.run, daemon=True)
    text = FakeModelText()
    with tempfile.TemporaryDirectory(prefix="tgi-test-") as folder:
        path = Path(folder) / "engine.sock"
        server = EngineServer(core, engine_info, max_loras=engine_limits.max_loras)
        options = GenerateOptions(load_text=lambda _info: text, drafts=drafts)
        front = GenerateServices(
            ServedEngine(core.inbox, engine_info, server.adapters, path), options
        )
        server.services.append(front)
        server.start(path)
        loop.start()
        found = Served(core, server, front, path)
        found.worker, found.text = worker, text
        try:
            yield found
        finally:
            core.inbox.put(Shutdown())
            loop.join(timeout=60)
            server.stop()
            assert not loop.is_alive()
    assert core.metrics.load.used_blocks == 0, "blocks were lost"
    free_rows = core._scheduler.batch.resources.free_rows
    assert len(free_rows) == engine_limits.max_batch_size, "rows were lost"


def a_request(
    client: ReflectionClient, request_id: int, prompt: Sequence[int], new: int, **more: Any
) -> Any:
    """Greedy, without end tokens, with the special token in front."""
    stopping: dict[str, Any] = {"max_new_tokens": new, "ignore_eos_token": True}
    stopping |= more.pop("stopping", {})
    text = " ".join(map(str, prompt))
    if client.descriptor.full_name == V3:
        more = {"add_special_tokens": True} | more
    return client.message(
        "Request", id=request_id, inputs=text, stopping_parameters=stopping, **more
    )


def answer(prompt: Sequence[int], count: int, adapter_id: int = 0) -> list[int]:
    """The tokens that the fake model generates for such a request."""
    return continuation([BOS, *prompt], count, VOCAB, adapter_id)


class Heard:
    """What became of the requests of one client, by their ids.

    ``drafts`` are the most that a step verifies for a request.
    """

    def __init__(self, drafts: int = 0) -> None:
        self.drafts = drafts
        self.ids: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.ends: dict[int, Any] = {}

    def __call__(self, response: Any) -> Any:
        """Take in a Prefill's or a Decode's; returns it."""
        for generation in response.generations:
            tokens = generation.tokens
            count = len(tokens.ids)
            assert 1 <= count <= 1 + self.drafts
            assert len(tokens.logprobs) == len(tokens.texts) == len(tokens.is_special) == count
            self.ids.setdefault(generation.request_id, []).extend(tokens.ids)
            if generation.HasField("generated_text"):
                assert generation.request_id not in self.ends
                self.ends[generation.request_id] = generation.generated_text
        left = [g.request_id for g in response.generations if not g.HasField("generated_text")]
        if response.HasField("batch"):
            assert set(left) <= set(response.batch.request_ids)
            assert response.batch.size == len(response.batch.request_ids)
        else:
            assert not left
        assert response.total_ns >= response.forward_ns + response.decode_ns > 0
        return response

    def run_out(self, client: ReflectionClient, batch: Any) -> None:
        """Decode until nothing is left of a batch."""
        while batch.size:
            response = self(client.Decode(batches=[batch]))
            batch = response.batch

"""The state that all routes of a router share."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from tgi_cli.config.model_names import BASE_NAME
from tgi_cli.router.adapter_names import AdapterNames
from tgi_cli.router.config import IMAGE_PAYLOAD, TEXT_PAYLOAD, RouterConfig
from tgi_cli.router.engine_sleep import EngineSleep
from tgi_cli.router.generation.generation import Generation
from tgi_cli.router.generation.generator import Generator
from tgi_cli.router.generation.sampling_defaults import SamplingDefaults
from tgi_cli.router.http.admission import ConcurrencyLimiter
from tgi_cli.router.http.bodies import BodyMemory
from tgi_cli.router.http.misspellings import MisspellingLog
from tgi_cli.router.observability.metrics import Metrics
from tgi_cli.router.observability.tracing import Tracing
from tgi_cli.router.response_store import ResponseStore
from tgi_cli.rpc.interface import EngineClient
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.workers import TextWorkers
from tgi_cli.version import __version__
from tgi_cli.vision.prompts import ImageReader


def leads(generations: Sequence[Generation]) -> list[Generation]:
    """The first sample of each prompt."""
    return list({generation.lead.index: generation.lead for generation in generations}.values())


def prompt_characters(generations: Sequence[Generation]) -> int:
    """The total length of the prompts that were given as text."""
    prompts = [lead.spec.prompt for lead in leads(generations)]
    return sum(len(prompt) for prompt in prompts if not isinstance(prompt, tuple))


@dataclass(frozen=True, slots=True)
class RouterState:
    """One router's parts, created by :func:`tgi_cli.router.app.create_app`.

    ``images`` is None if the model takes none. ``started`` is the Unix time of their creation.
    """

    config: RouterConfig
    client: EngineClient
    text: TextBundle
    workers: TextWorkers
    metrics: Metrics
    admission: ConcurrencyLimiter
    generator: Generator
    adapters: AdapterNames
    defaults: SamplingDefaults
    responses: ResponseStore
    tracing: Tracing | None = None
    images: ImageReader | None = None
    started: float = field(default_factory=time.time)
    misspellings: MisspellingLog = field(default_factory=MisspellingLog)
    bodies: BodyMemory = field(init=False)

    def __post_init__(self) -> None:
        most = self.payload_limit * self.config.max_concurrent_requests
        object.__setattr__(self, "bodies", BodyMemory(most))

    @property
    def sleep(self) -> EngineSleep:
        """Whether the engine sleeps."""
        return self.generator.sleep

    @property
    def payload_limit(self) -> int:
        """Bytes of a request's body."""
        if self.config.payload_limit is not None:
            return self.config.payload_limit
        return TEXT_PAYLOAD if self.images is None else IMAGE_PAYLOAD

    def model_name(self, requested: str | None) -> str:
        """The name of the model in an answer.

        Without ``--served-model-name``, it is that of the request; TGI's clients send "tgi" for
        any model.
        """
        config = self.config
        if not requested or requested == BASE_NAME or requested in config.served_model_name:
            return config.served_names[0]
        return requested

    @property
    def fingerprint(self) -> str:
        """OpenAI's ``system_fingerprint``: version and build, as TGI's."""
        return f"{__version__}-{os.environ.get('DOCKER_LABEL') or 'native'}"

    @property
    def compute_type(self) -> str:
        """The ``x-compute-type`` header, which gateways use for billing."""
        return os.environ.get("COMPUTE_TYPE") or f"1-{self.client.info.device}"

    def stream_headers(self, characters: int) -> dict[str, str]:
        """TGI's headers of a stream whose prompts have this length."""
        return {"x-compute-type": self.compute_type, "x-compute-characters": str(characters)}

    def timing_headers(self, generations: Sequence[Generation]) -> dict[str, str]:
        """TGI's headers of a complete answer: sums in milliseconds, the compute time in seconds."""

        def total(values: Sequence[float]) -> str:
            return str(int(sum(values) * 1e3))

        timings = [generation.timings for generation in generations]
        tokens = [generation.generated_tokens for generation in generations]
        headers = self.stream_headers(prompt_characters(generations))
        if len(generations) == 1:
            headers["x-compute-time"] = repr(timings[0].total)
        return headers | {
            "x-total-time": total([timing.total for timing in timings]),
            "x-validation-time": total([timing.validation for timing in timings]),
            "x-queue-time": total([timing.queue for timing in timings]),
            "x-inference-time": total([timing.inference for timing in timings]),
            "x-time-per-token": total(
                [
                    timing.inference / max(count, 1)
                    for timing, count in zip(timings, tokens, strict=True)
                ]
            ),
            "x-prompt-tokens": str(sum(lead.prompt_tokens for lead in leads(generations))),
            "x-generated-tokens": str(sum(tokens)),
        }

    async def close(self) -> None:
        """Stop the worker threads and processes, and send the last traces."""
        self.sleep.close()
        self.workers.close()
        self.adapters.dynamic.close()
        if self.generator.grammars is not None:
            self.generator.grammars.close()
        if self.text.chat_template is not None:
            self.text.chat_template.close()
        if self.images is not None:
            self.images.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


def state_of(request: Request) -> RouterState:
    """The state of the request's application."""
    state: RouterState = request.app.state.router
    return state

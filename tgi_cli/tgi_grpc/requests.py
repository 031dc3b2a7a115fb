"""From a request as TGI's router writes it to one of the engine.

Zero stands for "not said" where it means nothing else, as proto3 cannot tell the two apart:
for a temperature, a top_p, a typical_p and a repetition penalty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tgi_cli.engine.messages import EngineInfo, GenerationRequest
from tgi_cli.engine.validation import validate_length
from tgi_cli.model_server.adapters import AdapterRegistry, unknown
from tgi_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    from tgi_cli.tgi_grpc.model_text import ModelText

_GRAMMARS = {1: "json", 2: "regex"}
"""By GrammarType."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a request may ask for, in tokens, and what a step may compute of prompts."""

    max_input_tokens: int
    max_total_tokens: int
    max_prefill_tokens: int

    @classmethod
    def of(cls, info: EngineInfo) -> Bounds:
        """The engine's own."""
        return cls(
            max_input_tokens=info.max_input_tokens,
            max_total_tokens=info.max_total_tokens,
            max_prefill_tokens=info.max_batch_prefill_tokens,
        )


@dataclass(frozen=True, slots=True)
class Watermark:
    """The parameters of requests that ask for one (Kirchenbauer et al. 2023)."""

    gamma: float = 0.5
    delta: float = 2.0


class RequestReader:
    """Reads requests of either version of the services for one engine.

    Args:
        info: of the engine.
        model_text: Gives the text side of its model.
        adapters: that requests may name.
        watermark: of requests that ask for one.
    """

    def __init__(
        self,
        info: EngineInfo,
        model_text: Callable[[], ModelText],
        adapters: AdapterRegistry,
        watermark: Watermark,
    ) -> None:
        self.model_text = model_text
        self._info = info
        self._adapters = adapters
        self._watermark = watermark

    def read(self, request: Any, engine_id: int, bounds: Bounds) -> GenerationRequest:
        """The engine's request, under the engine's id.

        Raises:
            ValueError: it can never run, with the cause.
            TgiError: its text cannot be read at all.
        """
        fields = request.DESCRIPTOR.fields_by_name
        text = _text(request) if "input_chunks" in fields else request.inputs
        special = request.add_special_tokens if "add_special_tokens" in fields else True
        stopping = request.stopping_parameters
        prompt = self.model_text().encode(text, special, request.truncate)
        validate_length(len(prompt), stopping.max_new_tokens, bounds)
        if max(prompt) >= self._info.vocab_size:
            raise ValueError(f"the tokenizer gives ids beyond the vocabulary ({max(prompt)})")
        if request.top_n_tokens > self._info.vocab_size:
            raise ValueError(
                f"`top_n_tokens` is more than the vocabulary has ({self._info.vocab_size})"
            )
        adapter = request.adapter_id if "adapter_id" in fields else ""
        adapter_id = self._adapters.id_of(adapter)
        if adapter_id is None:
            raise ValueError(unknown(adapter, self._adapters.now.names))
        return GenerationRequest(
            request_id=engine_id,
            prompt_ids=tuple(prompt),
            sampling=self._sampling(request.parameters, request.top_n_tokens),
            max_new_tokens=stopping.max_new_tokens,
            stop_token_ids=frozenset(self._info.eos_token_ids),
            ignore_eos=stopping.ignore_eos_token,
            adapter_id=adapter_id,
            grammar=self._grammar(request.parameters),
            prompt_logprobs=0 if request.prefill_logprobs else None,
        )

    def _sampling(self, said: Any, top_n_tokens: int) -> SamplingParams:
        temperature = said.temperature or 1.0
        top_p = said.top_p or 1.0
        typical_p = said.typical_p or 1.0
        drawn = (
            said.do_sample
            or temperature != 1.0
            or said.top_k > 0
            or top_p != 1.0
            or typical_p != 1.0
        )
        return SamplingParams(
            temperature=temperature if drawn else 0.0,
            top_k=said.top_k,
            top_p=top_p,
            typical_p=typical_p,
            repetition_penalty=said.repetition_penalty or 1.0,
            relative_frequency_penalty=said.frequency_penalty,
            seed=said.seed,
            top_logprobs=top_n_tokens,
            watermark=said.watermark,
            watermark_gamma=self._watermark.gamma,
            watermark_delta=self._watermark.delta,
        )

    def _grammar(self, said: Any) -> str | None:
        if not said.grammar_type:
            return None
        kind = _GRAMMARS.get(said.grammar_type)
        if kind is None:
            raise ValueError(f"there is no grammar type {said.grammar_type}")
        if not self._info.grammar:
            raise ValueError("grammars are not supported")
        try:
            return self.model_text().grammar(kind, said.grammar)
        except ValueError as error:
            raise ValueError(f"its grammar is not valid: {error}") from error


def _text(request: Any) -> str:
    """The prompt of a request of version 3."""
    parts = []
    for chunk in request.input_chunks.chunks:
        if chunk.WhichOneof("chunk") != "text":
            raise ValueError("it has an image, and the model takes text only")
        parts.append(chunk.text)
    return "".join(parts) if parts else str(request.inputs)

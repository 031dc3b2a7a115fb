"""Translates requests of TGI's router to the engine's.

A zero temperature, top_p, typical_p or repetition penalty means the default: proto3 does not
distinguish zero from a missing value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tgi_cli.config.settings import default
from tgi_cli.engine.messages import EngineInfo, GenerationRequest
from tgi_cli.engine.validation import validate_length
from tgi_cli.model_server.adapters import AdapterRegistry
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.text.images import ImagePart, markdown_images
from tgi_cli.vision.prompts import ImagePrompt

if TYPE_CHECKING:
    from tgi_cli.tgi_grpc.model_text import ModelText

_GRAMMARS = {1: "json", 2: "regex"}
"""Names of TGI's GrammarType."""


@dataclass(frozen=True, slots=True)
class Watermark:
    """The parameters of requests that ask for one (Kirchenbauer et al. 2023)."""

    gamma: float = default("watermark_gamma")
    delta: float = default("watermark_delta")


class RequestReader:
    """Reads requests of either version of the services for one engine.

    Args:
        info: The engine's effective settings.
        model_text: Returns the text side of its model.
        adapters: Adapters that requests may name.
        watermark: Parameters for requests that ask for a watermark.
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

    def read(self, request: Any, engine_id: int, limits: EngineInfo) -> GenerationRequest:
        """Return the request under the engine's id.

        Raises:
            ValueError: The request is invalid, with the cause.
            TgiError: Text cannot be tokenized, or grammars cannot be compiled.
        """
        fields = request.DESCRIPTOR.fields_by_name
        pieces = self._pieces(request, "input_chunks" in fields)
        special = request.add_special_tokens if "add_special_tokens" in fields else True
        stopping = request.stopping_parameters
        prompt = self._encode(pieces, special, request.truncate)
        validate_length(len(prompt.ids), stopping.max_new_tokens, limits)
        highest = prompt.highest_id
        if highest >= self._info.vocab_size:
            raise ValueError(f"the tokenizer gives ids beyond the vocabulary ({highest})")
        if request.top_n_tokens > self._info.vocab_size:
            raise ValueError(
                f"`top_n_tokens` is more than the vocabulary has ({self._info.vocab_size})"
            )
        adapter = request.adapter_id if "adapter_id" in fields else ""
        return GenerationRequest(
            request_id=engine_id,
            prompt_ids=tuple(prompt.ids),
            images=prompt.images,
            sampling=self._sampling(request.parameters, request.top_n_tokens),
            max_new_tokens=stopping.max_new_tokens,
            stop_token_ids=frozenset(self._info.eos_token_ids),
            ignore_eos=stopping.ignore_eos_token,
            adapter_id=self._adapters.id_of(adapter),
            grammar=self._grammar(request.parameters),
            prompt_logprobs=0 if request.prefill_logprobs else None,
        )

    def _pieces(self, request: Any, has_chunks: bool) -> list[str | ImagePart]:
        """The prompt of a request, with its images."""
        if has_chunks and request.input_chunks.chunks:
            return [
                ImagePart(chunk.image.data, media_type=chunk.image.mimetype)
                if chunk.WhichOneof("chunk") == "image"
                else chunk.text
                for chunk in request.input_chunks.chunks
            ]
        inputs: str = request.inputs
        if "![](" not in inputs or not self.model_text().vision.expected:
            return [inputs]
        return [
            ImagePart(piece) if index % 2 else piece
            for index, piece in enumerate(markdown_images(inputs))
        ]

    def _encode(
        self, pieces: Sequence[str | ImagePart], add_special_tokens: bool, truncate: int
    ) -> ImagePrompt:
        text = self.model_text()
        if any(isinstance(piece, ImagePart) for piece in pieces):
            return text.encode_with_images(pieces, add_special_tokens, truncate)
        joined = "".join(piece for piece in pieces if isinstance(piece, str))
        return ImagePrompt(text.encode(joined, add_special_tokens, truncate), ())

    def _sampling(self, parameters: Any, top_n_tokens: int) -> SamplingParams:
        temperature = parameters.temperature or 1.0
        top_p = parameters.top_p or 1.0
        typical_p = parameters.typical_p or 1.0
        changed = (temperature, top_p, typical_p) != (1.0, 1.0, 1.0)
        drawn = parameters.do_sample or parameters.top_k > 0 or changed
        return SamplingParams(
            temperature=temperature if drawn else 0.0,
            top_k=parameters.top_k,
            top_p=top_p,
            typical_p=typical_p,
            repetition_penalty=parameters.repetition_penalty or 1.0,
            relative_frequency_penalty=parameters.frequency_penalty,
            seed=parameters.seed,
            top_logprobs=top_n_tokens,
            watermark=parameters.watermark,
            watermark_gamma=self._watermark.gamma,
            watermark_delta=self._watermark.delta,
        )

    def _grammar(self, parameters: Any) -> str | None:
        if not parameters.grammar_type:
            return None
        kind = _GRAMMARS.get(parameters.grammar_type)
        if kind is None:
            raise ValueError(f"there is no grammar type {parameters.grammar_type}")
        if not self._info.grammar:
            raise ValueError("grammars are not supported")
        try:
            return self.model_text().grammar(kind, parameters.grammar)
        except ValueError as error:
            raise ValueError(f"its grammar is not valid: {error}") from error

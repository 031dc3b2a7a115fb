"""A model in this process: generate, chat, stream and beam search."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Unpack

from tgi_cli.config import ServeConfig
from tgi_cli.errors import ConfigError
from tgi_cli.llm.beam import BeamHypothesis, BeamOptions, EarlyStopping, search
from tgi_cli.llm.collector import Collector, completions_of, run
from tgi_cli.llm.engine import InProcessEngine, RequestGroup
from tgi_cli.llm.images import ModelImages, marked_text
from tgi_cli.llm.load import (
    find_adapter,
    find_adapters,
    locate,
    read_speculative_config,
    start_engine,
    with_drafter,
)
from tgi_cli.llm.options import (
    GenerationKeywords,
    GenerationOptions,
    OnePrompt,
    Prompts,
    adapter_names,
    per_prompt,
    read_grammar,
    read_prompts,
    requests_of,
)
from tgi_cli.llm.outputs import Completion, GenerationError
from tgi_cli.llm.settings import EngineSettings, check_settings
from tgi_cli.llm.stream import Stream
from tgi_cli.llm.thinking import ThinkingBudgets
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.chat_template import ChatTemplateError
from tgi_cli.text.conversation import adapt
from tgi_cli.text.images import ImageMarks
from tgi_cli.text.stop import StopStrings
from tgi_cli.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, loaded and warmed up, with its own engine in this process.

    Thread-safe: the requests of several threads share batches. As a context manager, it frees the
    model at the end.

    Args:
        model: Id on the hub, or folder. Default: the bundled miniature model. Medusa heads and MLP
            speculators stand for the model that they are for.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Allow the model's folder to run its own code.
        lora_adapters: Map from names to folders or hub ids, or the values of ``--lora-adapters``
            (``id``, ``id@revision``, ``name=path``) as a list or in one string.
        speculative_config: vLLM's object, or its JSON: see ``--speculative-config``.
        on_stats: Called at every step with its statistics, a JSON object with the fields of
            TensorRT-LLM's batch manager (:class:`tgi_cli.engine.metrics.StepStats`). Runs on the
            engine's thread, so keep it short. If it raises, the error is logged and it is not
            called again.
        settings: See :class:`tgi_cli.llm.settings.EngineSettings`.

    Attributes:
        info: The model and its limits (:class:`tgi_cli.engine.messages.EngineInfo`).

    Raises:
        HubError: The model is unavailable.
        ModelError: The model cannot be run.
        OutOfMemoryError: The model does not fit into memory.
        ShardError: Another process of the model cannot be started, or has ended.
        ConfigError: Settings contradict each other or the model; they have the names of the flags
            of ``tgi serve``.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        lora_adapters: Mapping[str, str | PathLike[str]] | Sequence[str] | str = (),
        speculative_config: Mapping[str, Any] | str | None = None,
        on_stats: Callable[[str], None] | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        settings = check_settings(settings)
        local, heads = locate(model, revision, trust_remote_code)
        settings.setdefault("max_prefill_delay", 0)  # whole answers are awaited, for the most part
        serve = ServeConfig(
            model_id=local.model_id,
            revision=local.revision or None,
            trust_remote_code=trust_remote_code,
            lora_adapters=find_adapters(lora_adapters, local.model_id),
            speculative_config=read_speculative_config(speculative_config),
            **settings,
        )
        serve = with_drafter(serve, heads)
        self._text = TextBundle.load(local.path, trust_remote_code)
        self._thinking = ThinkingBudgets(local.path, trust_remote_code)
        self._engine, self.info = start_engine(serve, local.path, on_stats)
        self._images = ModelImages(local.path, self._text, self.info)
        self._close = weakref.finalize(self, _close, self._engine, self._images)

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to token ids and back."""
        return self._text.tokenizer

    def close(self) -> None:
        """End the engine; calls that wait raise EngineDeadError. May be called twice."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ------------------------------------------------------------------ adapters

    @property
    def adapters(self) -> list[str]:
        """Names of the loaded LoRA adapters."""
        return self._engine.adapters.now.names

    def load_adapter(self, name: str, path: str | PathLike[str], *, in_place: bool = False) -> None:
        """Load a LoRA adapter, for requests with ``adapter=name``.

        Args:
            name: Name of the adapter, different from the model's and from those in use.
            path: Folder, or ``id`` or ``id@revision`` on the hub.
            in_place: Replace the adapter with this name.

        Raises:
            AdapterError: The name is in use, ``max_loras`` adapters are loaded, or it does not fit.
            ConfigError: The name is invalid.
            HubError: The adapter is unavailable.
            ModelError: The folder is not an adapter.
            EngineDeadError: The engine's loop has ended.
        """
        self._engine.load_adapter(name, lambda: find_adapter(path), in_place)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter once the requests that use it have ended. Raises AdapterError."""
        self._engine.adapters.unload(name)

    # ------------------------------------------------------------------ many prompts

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> list[Completion]:
        """Continue prompts, all of them batched together.

        Ctrl-C cancels the live requests. Nothing is submitted unless everything is valid.

        Args:
            prompts: A text, a list of token ids, ``{"prompt": text, "images": [...]}``, or a list
                of these. An image is a PIL image, the bytes of a file, a path or a ``data:`` URL;
                the text has the model's placeholder for each, or none, which puts them in front.
            sampling_params: Sampling parameters, for all prompts or one for each. Default: greedy.
                The text for a seed does not depend on the batch.
            progress: Show a progress bar on stderr. Default: if it is a terminal.
            options: See :class:`tgi_cli.llm.options.GenerationOptions`.

        Returns:
            ``n`` completions for each prompt, in the order of the prompts; with ``best_of``, the
            best first.

        Raises:
            ValueError: A prompt or an option is invalid.
            GenerationError: Requests failed; the error has all completions.
            EngineDeadError: The engine's loop has ended.
        """
        parsed = GenerationOptions(**options)
        collectors = self._collectors(prompts, sampling_params, parsed)
        run(self._engine, collectors, progress)
        completions = completions_of(collectors, parsed)
        if any(completion.finish_reason == "error" for completion in completions):
            raise GenerationError.of(completions)
        return completions

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> list[Completion]:
        """Answer conversations through the model's chat template; see :meth:`generate`.

        Args:
            messages: A list of ``{"role": ..., "content": ...}``, or a list of such lists. If the
                last message is the assistant's, it is continued. A content is a text, or a list
                of parts: ``{"type": "text", "text": ...}`` and ``{"type": "image", "image": ...}``,
                with images as in :meth:`generate`, or OpenAI's ``image_url``.

        Raises:
            ConfigError: The model has no chat template.
            ValueError: The template refuses a conversation.
        """
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Messages] = [messages] if single else messages  # type: ignore
        texts: list[OnePrompt] = [self._render(each) for each in conversations]
        options["add_special_tokens"] = False  # the template contains them
        return self.generate(texts, sampling_params, progress=progress, **options)

    # ------------------------------------------------------------------ one, as it comes

    def stream(
        self,
        prompt: OnePrompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> Stream:
        """Continue one prompt; iterate over the result for its pieces as they arrive.

        Args:
            prompt: A text, token ids, or ``{"prompt", "images"}`` as of :meth:`generate`.
            sampling_params: Sampling parameters. Default: greedy.
            options: See :class:`tgi_cli.llm.options.GenerationOptions`; ``n`` and ``best_of`` must
                be 1.

        Raises:
            ValueError: The prompt or an option is invalid.
            EngineDeadError: The engine's loop has ended.
        """
        parsed = GenerationOptions(**options)
        if parsed.samples != 1:
            raise ValueError("a stream is one continuation: n and best_of must be 1")
        (collector,) = self._collectors(
            prompt if isinstance(prompt, str) else [prompt], sampling_params, parsed
        )
        return Stream(RequestGroup(self._engine), collector, self)

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> Stream:
        """Answer one conversation; see :meth:`chat` and :meth:`stream`."""
        options["add_special_tokens"] = False
        return self.stream(self._render(messages), sampling_params, **options)

    def cancel(self, request_id: int) -> None:
        """End a request at the next step; ignored if it is not live.

        Its completion has the text so far and the finish reason ``cancelled``. The id is
        :attr:`Stream.request_id`; logits processors get it, too.
        """
        self._engine.cancel(request_id)

    # ------------------------------------------------------------------ beam search

    def beam_search(
        self,
        prompts: Prompts,
        beam_width: int = 4,
        max_new_tokens: int = 16,
        *,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        add_special_tokens: bool = True,
        adapter: str | None = None,
        progress: bool | None = None,
    ) -> list[list[BeamHypothesis]]:
        """Find the likeliest continuations of prompts, as transformers' beam search does.

        Slow without ``prefix_caching``: every step then computes whole prompts again. Further
        arguments are those of :class:`tgi_cli.llm.options.GenerationOptions`.

        Args:
            prompts: A text, a list of token ids, or a list of either.
            beam_width: Hypotheses per step, at most 8; 1 is greedy.
            max_new_tokens: Most generated tokens of each hypothesis.
            length_penalty: Above 0 favours long hypotheses, below 0 short ones.
            early_stopping: When to end: True, when ``beam_width`` hypotheses have ended; False,
                when none is expected to improve; ``"never"``, when none can improve.
            progress: Show a progress bar on stderr. Default: if it is a terminal.

        Returns:
            ``beam_width`` hypotheses for each prompt, best first.

        Raises:
            ValueError: A prompt or an option is invalid.
            TgiError: A beam failed.
            EngineDeadError: The engine's loop has ended.
        """
        own_stops = () if ignore_eos else self.info.eos_token_ids
        options = BeamOptions(
            width=beam_width,
            max_new_tokens=max_new_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            stop_token_ids=frozenset((*own_stops, *stop_token_ids)),
        )
        read = read_prompts(prompts, self.tokenizer, add_special_tokens, self.info, self._images)
        adapter_id = self._engine.adapter_id(adapter)
        return search(self._engine, read, options, self.info, self.tokenizer, progress, adapter_id)

    # ------------------------------------------------------------------ within

    def _render(self, messages: Messages) -> OnePrompt:
        template = self._text.chat_template
        if template is None:
            raise ConfigError(
                f"{self.info.model_id} has no chat template", "use generate() with a prompt"
            )
        marks = ImageMarks()
        texts: Sequence[Mapping[str, Any]] = [
            {**each, "content": marked_text(each.get("content"), marks)} for each in messages
        ]
        in_parts = bool(marks.images) and self._images.in_parts
        if marks.images and not in_parts:
            texts = marks.replaced(texts, self._images.reader.image_format.text)
        try:
            text = template.render(
                adapt(texts, template.traits(False)), image_mark=marks.mark if in_parts else None
            )
        except ChatTemplateError as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error
        if not marks.images:
            return text
        found = text.count(self._images.reader.image_format.placeholder)
        if found != len(marks.images):
            raise ValueError(
                f"the chat template writes {found} placeholders for {len(marks.images)} images"
            )
        return {"prompt": text, "images": marks.images}

    def _collectors(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        options: GenerationOptions,
    ) -> list[Collector]:
        """One collector per continuation, not yet submitted; those of a prompt are adjacent."""
        tokenizer = self.tokenizer
        special = options.add_special_tokens
        read = read_prompts(prompts, tokenizer, special, self.info, self._images)
        sampling = per_prompt(sampling_params, len(read), self.info)
        names = adapter_names(options.adapter, len(read))
        ids = [self._engine.adapter_id(name) for name in names]
        grammar = read_grammar(options.grammar, tokenizer, self.info.eos_token_ids)
        stops = StopStrings(options.stops)
        return [
            Collector(
                request,
                prompt,
                index,
                stops,
                tokenizer,
                self._hidden_ids,
                self.info.decoder_start_ids,
            )
            for prompt, params, adapter_id in zip(read, sampling, ids, strict=True)
            for index, request in enumerate(
                requests_of(
                    prompt,
                    params,
                    options,
                    self.info,
                    self._engine.request_ids,
                    adapter_id,
                    grammar,
                    self._thinking.of(prompt, options.thinking_token_budget),
                )
            )
        ]

    @property
    def _hidden_ids(self) -> frozenset[int]:
        """Tokens that add nothing to the text."""
        return self.tokenizer.special_ids | frozenset(self.info.eos_token_ids)


def _close(engine: InProcessEngine, images: ModelImages) -> None:
    engine.close()
    images.close()

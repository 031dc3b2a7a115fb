"""A model in this process: generate, chat, stream, beam search."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Unpack

from tgi_cli.config import ServeConfig
from tgi_cli.config.settings import default
from tgi_cli.errors import ConfigError
from tgi_cli.llm.beam import BeamHypothesis, BeamOptions, EarlyStopping, search
from tgi_cli.llm.collector import Collector, completions_of, run
from tgi_cli.llm.engine import RequestGroup
from tgi_cli.llm.errors import GenerationError
from tgi_cli.llm.load import find_adapter, find_adapters, locate, start_engine
from tgi_cli.llm.options import (
    GenerationKeywords,
    GenerationOptions,
    Prompts,
    adapter_names,
    per_prompt,
    read_grammar,
    read_prompts,
    requests_of,
)
from tgi_cli.llm.outputs import Completion
from tgi_cli.llm.stream import Stream
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.chat_template import ChatTemplateError
from tgi_cli.text.stop import StopStrings
from tgi_cli.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, loaded and warmed up, with an engine of its own in this process.

    Every method may be called from several threads at once; their requests share the batch. A
    context manager: leaving it frees the model.

    Args:
        model: an id on the hub or a folder; None: the bundled miniature.
        revision: branch, tag or commit on the hub.
        dtype: ``float32``, ``bfloat16``, ``float16``, or None for what suits the device.
        trust_remote_code: let the model's folder run code of its own.
        max_input_tokens, max_total_tokens: of one request, the prompt and all; None: as long as
            the model and the memory allow.
        max_batch_prefill_tokens: prompt tokens computed in one step.
        max_batch_total_tokens: tokens that the KV cache holds; None: what fits.
        max_batch_size: requests that run at once.
        batching: ``fused``, ``inflight`` or ``static``; see
            :class:`tgi_cli.engine.config.Batching`.
        capacity_policy: ``max_utilization`` or ``guaranteed_no_evict``; see
            :class:`tgi_cli.engine.config.CapacityPolicy`.
        waiting_served_ratio, max_waiting_tokens: TGI's dials of ``inflight``; see
            :class:`tgi_cli.engine.config.SchedulerConfig`.
        prefix_caching: compute equal beginnings of prompts once.
        kv_cache_dtype: ``auto`` (as the weights), ``fp8_e4m3fn`` or ``fp8_e5m2``.
        quantize: how plain weights are quantized as they are loaded: ``int8``, ``fp8``,
            ``bitsandbytes-nf4``...; see ``--quantize``.
        quantize_head: bring the output head into integers of 8 bits.
        num_shard: processes that share the model, this one the first: a GPU each, or on a CPU
            its cores together.
        lora_adapters: a map from names to folders or hub ids, or what ``--lora-adapters`` takes
            (``id``, ``id@revision``, ``name=path``), as a list or in one string.
        max_loras: that share a batch; None: 4 where adapters are named, else none can be loaded.
        max_cpu_loras, max_lora_rank: as the flags.
        on_stats: called at every step with its statistics, a JSON object with the fields of
            TensorRT-LLM's batch manager (:class:`tgi_cli.engine.metrics.StepStats`); on
            the engine's thread, so keep it short. If it raises, that is logged and it is not
            called again.

    Attributes:
        info: the model and the limits that hold (:class:`tgi_cli.engine.messages.EngineInfo`).

    Raises:
        HubError: the model cannot be had.
        ModelError: it cannot be run.
        OutOfMemoryError: it does not fit.
        ShardError: another process of the model cannot be started, or ended.
        ConfigError: arguments that contradict each other or the model, named as the flags of
            ``tgi serve``.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        revision: str | None = None,
        dtype: str | None = None,
        trust_remote_code: bool = False,
        max_input_tokens: int | None = None,
        max_total_tokens: int | None = None,
        max_batch_prefill_tokens: int | None = None,
        max_batch_total_tokens: int | None = None,
        max_batch_size: int | None = None,
        batching: str = default("batching"),
        capacity_policy: str = default("capacity_policy"),
        waiting_served_ratio: float | None = None,
        max_waiting_tokens: int | None = None,
        prefix_caching: bool = default("prefix_caching"),
        kv_cache_dtype: str = default("kv_cache_dtype"),
        quantize: str | None = None,
        quantize_head: bool = False,
        num_shard: int | None = None,
        lora_adapters: Mapping[str, str | PathLike[str]] | Sequence[str] | str = (),
        max_loras: int | None = None,
        max_cpu_loras: int | None = None,
        max_lora_rank: int | None = None,
        on_stats: Callable[[str], None] | None = None,
    ) -> None:
        local = locate(model, revision, trust_remote_code)
        serve = ServeConfig(
            model_id=local.model_id,
            revision=local.revision or None,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            max_input_tokens=max_input_tokens,
            max_total_tokens=max_total_tokens,
            max_batch_prefill_tokens=max_batch_prefill_tokens,
            max_batch_total_tokens=max_batch_total_tokens,
            max_batch_size=max_batch_size,
            batching=batching,
            capacity_policy=capacity_policy,
            waiting_served_ratio=waiting_served_ratio,
            max_waiting_tokens=max_waiting_tokens,
            prefix_caching=prefix_caching,
            kv_cache_dtype=kv_cache_dtype,
            quantize=quantize,
            quantize_head=quantize_head,
            num_shard=num_shard,
            lora_adapters=find_adapters(lora_adapters, local.model_id),
            max_loras=max_loras,
            max_cpu_loras=max_cpu_loras,
            max_lora_rank=max_lora_rank,
        )
        self._text = TextBundle.load(local.path, trust_remote_code)
        self._engine, self.info = start_engine(serve, local.path, on_stats)
        self._close = weakref.finalize(self, self._engine.close)

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to token ids and back."""
        return self._text.tokenizer

    def close(self) -> None:
        """End the engine; calls that wait raise EngineDeadError. May be called twice."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ adapters

    @property
    def adapters(self) -> list[str]:
        """Names of the LoRA adapters that requests may name."""
        return self._engine.adapters.now.names

    def load_adapter(self, name: str, path: str | PathLike[str], *, in_place: bool = False) -> None:
        """Load a LoRA adapter; requests may name it from then on (``adapter=name``).

        Args:
            name: neither the model's nor one that is taken.
            path: its folder, or ``id`` or ``id@revision`` on the hub.
            in_place: take the place of the one that has the name.

        Raises:
            AdapterError: the name is taken, there is no room (``max_loras``), it does not fit.
            ConfigError: no adapter may have that name.
            HubError, ModelError: it cannot be had, or is none.
            EngineDeadError: the engine's loop has ended.
        """
        self._engine.load_adapter(name, lambda: find_adapter(path), in_place)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; what runs with it runs to its end. Raises AdapterError."""
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

        Ctrl-C cancels what is live. Nothing is submitted unless everything can be.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: how tokens are chosen, one for all prompts or one each; None is
                greedy. A seed gives the same text whatever else is in the batch.
            progress: show a bar on stderr; None: if that is a terminal.
            options: see :class:`tgi_cli.llm.options.GenerationOptions`.

        Returns:
            In the order of the prompts, n for each, one after another (with ``best_of`` the best
            first).

        Raises:
            ValueError: a prompt or an option that cannot be.
            GenerationError: requests failed; it holds the completions of all.
            EngineDeadError: the engine's loop has ended.
        """
        wishes = GenerationOptions(**options)
        collectors = self._collectors(prompts, sampling_params, wishes)
        run(self._engine, collectors, progress)
        completions = completions_of(collectors, wishes)
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
        """Answer one conversation, or several, through the model's chat template.

        Args:
            messages: a list of ``{"role": ..., "content": ...}``, or a list of such lists. A last
                message of the assistant's is continued.
            sampling_params, progress, options: as for :meth:`generate`.

        Raises:
            ConfigError: the model has no chat template.
            ValueError: the template refuses the conversation; and all of :meth:`generate`.
        """
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Messages] = [messages] if single else messages  # type: ignore
        texts = [self._render(conversation) for conversation in conversations]
        options["add_special_tokens"] = False  # the template has written them
        return self.generate(texts, sampling_params, progress=progress, **options)

    # ------------------------------------------------------------------ one, as it comes

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> Stream:
        """Continue one prompt; iterate over the result for its pieces as they come.

        Args:
            prompt: a text or token ids.
            sampling_params: as for :meth:`generate`.
            options: the same; ``n`` and ``best_of`` are 1.

        Raises:
            ValueError: a prompt or an option that cannot be.
            EngineDeadError: the engine's loop has ended.
        """
        wishes = GenerationOptions(**options)
        if wishes.samples != 1:
            raise ValueError("a stream is one continuation: n and best_of must be 1")
        (collector,) = self._collectors(
            prompt if isinstance(prompt, str) else [prompt], sampling_params, wishes
        )
        return Stream(RequestGroup(self._engine), collector, self)

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> Stream:
        """Answer one conversation, as :meth:`chat` and :meth:`stream` do."""
        options["add_special_tokens"] = False
        return self.stream(self._render(messages), sampling_params, **options)

    def cancel(self, request_id: int) -> None:
        """End a request at the next step, from any thread; one that is not live is ignored.

        Who waits for it gets what was generated, with the finish reason ``cancelled``. Ids are
        known from :attr:`Stream.request_id` and to logits processors.
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
        """The likeliest continuations of each prompt, as transformers' beam search finds them.

        Wants ``prefix_caching``: without it, every step computes whole prompts again.

        Args:
            prompts: as for :meth:`generate`.
            beam_width: hypotheses that are kept at every step, at most 8; 1 is greedy.
            max_new_tokens: of each.
            length_penalty: above 0 favours long hypotheses, below 0 short ones.
            early_stopping: True: end when ``beam_width`` hypotheses have ended; False: when none
                is expected to become better; ``"never"``: when none can become better.
            stop_token_ids, ignore_eos, add_special_tokens, adapter: as in
                :class:`tgi_cli.llm.options.GenerationOptions`.
            progress: as for :meth:`generate`.

        Returns:
            For each prompt its hypotheses, best first, ``beam_width`` of them.

        Raises:
            ValueError: a prompt or an option that cannot be.
            TgiError: a beam failed.
            EngineDeadError: the engine's loop has ended.
        """
        own_stops = () if ignore_eos else self.info.eos_token_ids
        options = BeamOptions(
            width=beam_width,
            max_new_tokens=max_new_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            stop_token_ids=frozenset((*own_stops, *stop_token_ids)),
        )
        read = read_prompts(prompts, self.tokenizer, add_special_tokens, self.info)
        adapter_id = self._engine.adapter_id(adapter)
        return search(self._engine, read, options, self.info, self.tokenizer, progress, adapter_id)

    # ------------------------------------------------------------------ within

    def _render(self, messages: Messages) -> str:
        template = self._text.chat_template
        if template is None:
            raise ConfigError(
                f"{self.info.model_id} has no chat template", "use generate() with a prompt"
            )
        try:
            return template.render(messages)
        except ChatTemplateError as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error

    def _collectors(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        options: GenerationOptions,
    ) -> list[Collector]:
        """One per continuation, none submitted; those of a prompt beside each other."""
        tokenizer = self.tokenizer
        read = read_prompts(prompts, tokenizer, options.add_special_tokens, self.info)
        sampling = per_prompt(sampling_params, len(read), self.info)
        names = adapter_names(options.adapter, len(read))
        ids = [self._engine.adapter_id(name) for name in names]
        grammar = read_grammar(options.grammar, tokenizer, self.info.eos_token_ids)
        stops = StopStrings(options.stops)
        return [
            Collector(request, prompt, index, stops, tokenizer, self._hidden_ids)
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
                )
            )
        ]

    @property
    def _hidden_ids(self) -> frozenset[int]:
        """Ids that add nothing to a text."""
        return self.tokenizer.special_ids | frozenset(self.info.eos_token_ids)

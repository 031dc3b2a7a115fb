"""Parameters that other servers honour and that would change the answer, but that are refused here.

Each is a field of every /v1 body, so that decoding finds it; a body that honours one declares it
again. Thus every parameter of another server is either in a schema or in this table, except those
that do not change the answer (``user``, ``cache_prompt``, ``service_tier`` ...).
"""

from __future__ import annotations

from functools import cache
from inspect import get_annotations
from typing import TYPE_CHECKING, Any

import msgspec

from tgi_cli.router.bounds import Json
from tgi_cli.router.http import errors

_INSTEAD = {
    "use `max_output_tokens`": (
        "max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict",
    ),
    "use `max_tokens`": ("max_output_tokens",),
    "use `logprobs`": ("top_logprobs", "details", "n_probs"),
    'use `include: ["message.output_text.logprobs"]`': ("logprobs",),
    "use `top_logprobs`": ("top_n_tokens",),
    "use `echo` with `logprobs` on /v1/completions": ("prompt_logprobs", "decoder_input_details"),
    "use `stop`": ("stop_strings", "stop_sequences"),
    "use `include_stop_str_in_output`": ("no_stop_trim",),
    "use `n`": ("num_return_sequences",),
    "use `text.format`": ("response_format",),
    "use `model` or `adapter_id`": ("lora", "lora_path"),
    "use `chat_template_kwargs`": ("thinking", "enable_thinking"),
    "use /v1/chat/completions": (
        "tools", "reasoning", "thinking_token_budget", "thinking_budget_tokens",
    ),
    "use `thinking_token_budget`": ("thinking_budget",),
    "other than text": ("modalities",),
    "one response at a time": ("n",),
    "other than -1, the whole context,": ("repeat_last_n",),
    "": (
        # OpenAI, some of it in one API only
        "audio", "web_search_options", "best_of", "suffix", "echo", "context_management",
        "functions", "function_call",
        # vLLM
        "use_beam_search", "length_penalty", "early_stopping", "logprob_token_ids",
        "logits_processors", "prompt_embeds", "return_token_ids", "documents",
        "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "mm_processor_kwargs",
        "media_io_kwargs", "repetition_detection", "chat_template",
        # transformers
        "num_beams", "no_repeat_ngram_size", "penalty_alpha", "guidance_scale",
        "epsilon_cutoff", "eta_cutoff",
        # TGI
        "return_full_text", "full_text",
        # llama.cpp
        "post_sampling_probs", "mirostat", "samplers", "dry_multiplier", "xtc_probability",
        "dynatemp_range", "top_n_sigma", "adaptive_target", "id_slot", "reasoning_format",
        "return_progress", "response_fields",
        # SGLang
        "stop_regex", "custom_logit_processor", "custom_params", "session_params",
        "return_hidden_states", "separate_reasoning",
    ),
}  # fmt: skip
"""Refused names by what to do instead."""

REFUSED = {name: advice for advice, names in _INSTEAD.items() for name in names}

_EMPTY: tuple[Any, ...] = (None, False, "", [], {})
"""Values that request nothing; 0 is equal to False."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    **dict.fromkeys(
        ("n", "best_of", "length_penalty", "num_beams", "num_return_sequences", "guidance_scale"),
        (1,),
    ),
    **dict.fromkeys(("top_n_sigma", "adaptive_target", "repeat_last_n", "id_slot"), (-1,)),
    "separate_reasoning": (True,),
    "function_call": ("none", "auto"),
    "reasoning_format": ("auto", "deepseek", "parsed"),
}
"""Other values without effect: they disable a feature, or are the default behavior."""
_MEANINGFUL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("separate_reasoning", "enable_thinking"), (False,)),
    **dict.fromkeys(("thinking_budget", "thinking_token_budget", "thinking_budget_tokens"), (0,)),
    **dict.fromkeys(("repeat_last_n", "adaptive_target", "guidance_scale"), (0,)),
    "web_search_options": ({},),
    **dict.fromkeys((name for name in REFUSED if name.startswith("max_")), (0,)),
}
"""Empty values that do request something."""

if TYPE_CHECKING:

    class RefusedParameters(msgspec.Struct, kw_only=True):
        """All fields of :data:`REFUSED`, of any type."""
else:
    RefusedParameters = msgspec.defstruct(
        "RefusedParameters",
        [(name, Json, None) for name in REFUSED],
        kw_only=True,
        module=__name__,
        namespace={"__doc__": "All names of REFUSED, of any type."},
    )


@cache
def refused_names(kind: type[RefusedParameters]) -> tuple[str, ...]:
    """The names that bodies of this type refuse, as it does not declare them itself."""
    above = kind.__mro__[: kind.__mro__.index(RefusedParameters)]
    own = {name for each in above for name in get_annotations(each)}
    return tuple(name for name in REFUSED if name not in own)


def refuse(body: RefusedParameters) -> None:
    """Raise ApiError if the body requests something by a refused name."""
    for name in refused_names(type(body)):
        value = getattr(body, name)
        if value is None or (value in _EMPTY and value not in _MEANINGFUL.get(name, ())):
            continue
        if value in _NEUTRAL.get(name, ()):
            continue
        advice = REFUSED[name]
        what = f"`{name}`"
        if advice:
            what += f" ({advice})" if advice.startswith("use ") else f" {advice}"
        some = advice.startswith("other than")
        error = errors.unsupported(
            name, what, "unsupported_value" if some else "unsupported_parameter"
        )
        error.keep_names = True
        raise error

"""Parameters that other servers act on, that would change the answer, and that this one refuses.

Each is a field of every /v1 body, so that decoding finds it; a body that honours one declares it
anew. Whatever another server acts on is thus honoured by a schema or refused by this table. What
changes no answer (``user``, ``cache_prompt``, ``service_tier`` ...) is in neither.
"""

from __future__ import annotations

from functools import cache
from inspect import get_annotations
from typing import TYPE_CHECKING, Any

import msgspec

from tgi_cli.router.bounds import Json
from tgi_cli.router.http import errors

_TEMPLATE = "use `chat_template_kwargs`"
_LOGPROBS = "use `logprobs`"
_STOP = "use `stop`"
_OUTPUT = "use `max_output_tokens`"
_FORMAT = "use `text.format`"

REFUSED: dict[str, str] = {
    # OpenAI, and what one of its APIs has and another has not
    "modalities": "other than text",
    "audio": "",
    "web_search_options": "",
    "n": "one response at a time",
    "best_of": "",
    "suffix": "",
    "echo": "",
    "logprobs": 'use `include: ["message.output_text.logprobs"]`',
    "top_logprobs": _LOGPROBS,
    "max_tokens": _OUTPUT,
    "max_completion_tokens": _OUTPUT,
    "max_output_tokens": "use `max_tokens`",
    "response_format": _FORMAT,
    "tools": "use /v1/chat/completions",
    "context_management": "",
    # vLLM
    "use_beam_search": "",
    "length_penalty": "",
    "early_stopping": "",
    "logprob_token_ids": "",
    "logits_processors": "",
    "prompt_logprobs": "use `echo` with `logprobs` on /v1/completions",
    "prompt_embeds": "",
    "return_token_ids": "",
    "documents": "",
    "kv_transfer_params": "",
    "ec_transfer_params": "",
    "vllm_xargs": "",
    "mm_processor_kwargs": "",
    "media_io_kwargs": "",
    "thinking_token_budget": "",
    "repetition_detection": "",
    # transformers
    "num_beams": "",
    "num_return_sequences": "use `n`",
    "no_repeat_ngram_size": "",
    "penalty_alpha": "",
    "guidance_scale": "",
    "epsilon_cutoff": "",
    "eta_cutoff": "",
    "stop_strings": _STOP,
    # TGI
    "details": _LOGPROBS,
    "decoder_input_details": "use `echo` with `logprobs` on /v1/completions",
    "return_full_text": "",
    "full_text": "",
    "stop_sequences": _STOP,
    "max_new_tokens": _OUTPUT,
    "top_n_tokens": "use `top_logprobs`",
    # llama.cpp
    "n_predict": _OUTPUT,
    "n_probs": _LOGPROBS,
    "post_sampling_probs": "",
    "mirostat": "",
    "samplers": "",
    "dry_multiplier": "",
    "xtc_probability": "",
    "dynatemp_range": "",
    "top_n_sigma": "",
    "adaptive_target": "",
    "repeat_last_n": "other than -1, the whole context,",
    "id_slot": "",
    "lora": "use `model` or `adapter_id`",
    "reasoning_format": "",
    "return_progress": "",
    "response_fields": "",
    # SGLang
    "stop_regex": "",
    "no_stop_trim": "use `include_stop_str_in_output`",
    "lora_path": "use `model` or `adapter_id`",
    "custom_logit_processor": "",
    "custom_params": "",
    "session_params": "",
    "return_hidden_states": "",
    "separate_reasoning": "",
    # hosted models
    "thinking": _TEMPLATE,
    "enable_thinking": _TEMPLATE,
    "thinking_budget": "",
    "reasoning": "use `reasoning_effort`",
}
"""Each name, and what to do instead."""

_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
"""0 is equal to False."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "n": (1,),
    "best_of": (1,),
    "length_penalty": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "guidance_scale": (1,),
    "top_n_sigma": (-1,),
    "adaptive_target": (-1,),
    "repeat_last_n": (-1,),
    "id_slot": (-1,),
    "separate_reasoning": (True,),
    "reasoning_format": ("auto", "deepseek", "parsed"),
}
"""What else says nothing: the value that switches it off, or what is done anyway."""
_MEANT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("separate_reasoning", "enable_thinking"), (False,)),
    **dict.fromkeys(("thinking_budget", "thinking_token_budget"), (0,)),
    **dict.fromkeys((name for name in REFUSED if name.startswith("max_")), (0,)),
}
"""Asks for something although it looks like nothing."""

if TYPE_CHECKING:

    class RefusedParameters(msgspec.Struct, kw_only=True):
        """All names of :data:`REFUSED`, as whatever they are."""
else:
    RefusedParameters = msgspec.defstruct(
        "RefusedParameters",
        [(name, Json, None) for name in REFUSED],
        kw_only=True,
        module=__name__,
        namespace={"__doc__": "All names of REFUSED, as whatever they are."},
    )


@cache
def refused_names(kind: type[RefusedParameters]) -> tuple[str, ...]:
    """Names that bodies of this type refuse: those that it does not declare itself."""
    above = kind.__mro__[: kind.__mro__.index(RefusedParameters)]
    own = {name for each in above for name in get_annotations(each)}
    return tuple(name for name in REFUSED if name not in own)


def refuse(body: RefusedParameters) -> None:
    """Raise ApiError if the body asks for something by one of the names that it refuses."""
    for name in refused_names(type(body)):
        value = getattr(body, name)
        if value is None or (value in _NOTHING and value not in _MEANT.get(name, ())):
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

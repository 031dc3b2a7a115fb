"""Flags and variables of TGI's commands that have no effect here, and what happens instead.

They are accepted, so that existing command lines work, and each logs one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tgi_cli.config.settings.setting import ROUTER, SERVE, Setting, panel
from tgi_cli.config.settings.values import SWITCH, one_of, parse_bool, text, whole

_HTTP = (SERVE, ROUTER)

INHERITED_SETTINGS = panel(
    "Accepted for compatibility with TGI, without effect",
    _HTTP,
    prometheus_port=Setting(
        whole(0, 65535),
        "Port of metrics. They are on the HTTP port, under /metrics.",
        9000,
        note="metrics are on the HTTP port, under /metrics; no other port is opened",
    ),
    usage_stats=Setting(
        one_of("MODE", "on", "off", "no-stack"),
        "Usage statistics for TGI's authors. Nothing is ever sent to anybody.",
        "on",
        note="nothing is ever sent to anybody",
    ),
    enable_prefill_logprobs=Setting(
        SWITCH,
        "Enable log probabilities of prompts. They are always available.",
        note="prompt log probabilities are always available to requests (decoder_input_details)",
    ),
    ngrok=Setting(SWITCH, "Open a tunnel through ngrok. Rejected: run ngrok beside the server."),
    ngrok_authtoken=Setting(
        text("TOKEN"),
        "For --ngrok.",
        secret=True,
        note="no tunnel is opened, the token is not used",
    ),
    ngrok_edge=Setting(text("NAME"), "For --ngrok.", note="no tunnel is opened"),
)

_NO_EXLLAMA = "there are no exllama kernels; --attention and --quantize select kernels"
_KEY = "API_KEY (--api-key) is the key that clients must send"
_ROCM = "there are no ROCm kernels"
_MARGIN = "activation memory is measured at startup; --cuda-memory-fraction reserves GPU memory"

_VARIABLES: Mapping[str, str] = {
    "LOG_FORMAT": "--json-output (JSON_OUTPUT) selects JSON logs",
    "USE_FLASH_ATTENTION": "--attention (ATTENTION) selects the attention backend",
    "ROCM_USE_FLASH_ATTN_V2_TRITON": _ROCM,
    "ROCM_USE_SKINNY_GEMM": _ROCM,
    "ROCM_USE_CUSTOM_PAGED_ATTN": _ROCM,
    "TGI_WIGGLE_ROOM": _MARGIN,
    "XPU_MEMORY_FRACTION": "Intel GPUs are not supported",
    "EXLLAMA_VERSION": _NO_EXLLAMA,
    "DISABLE_EXLLAMA": _NO_EXLLAMA,
    "HF_HUB_ENABLE_HF_TRANSFER": "hf_transfer, which cannot resume, is not used; "
    "HF_XET_HIGH_PERFORMANCE=1 enables parallel transfers",
    "HF_HUB_USER_AGENT_ORIGIN": "no origin is sent to the hub",
    "VLLM_API_KEY": _KEY,
    "LLAMA_API_KEY": _KEY,
}
"""TGI's variables without a flag, and other servers' for keys, and what happens instead."""


def variable_notes(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The variables that are set and have no effect, each with what happens instead."""
    for name, note in _VARIABLES.items():
        if environment.get(name):
            yield name, note
    chunking = environment.get("PREFILL_CHUNKING")
    if chunking and not _is_true(chunking):
        yield "PREFILL_CHUNKING", "--batching inflight disables chunked prefill"
    if environment.get("DEBUG") == "1":
        yield "DEBUG", "shards are never simulated; --logger-level debug logs more"


def _is_true(word: str) -> bool:
    try:
        return parse_bool(word)
    except ValueError:
        return True

"""What TGI's commands took and this package has no use for, and what happens instead.

Such a flag is accepted, so that old command lines work, and answered with one line in the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tgi_cli.config.settings.setting import ELSEWHERE, ROUTER, SERVE, SERVER, Setting
from tgi_cli.config.settings.values import SWITCH, one_of, text, truth, whole

_FRONT = (SERVE, ROUTER)

INHERITED_SETTINGS = (
    Setting(
        "speculate",
        whole(0),
        None,
        "Tokens to guess ahead of the model. Nothing is guessed: the model computes each.",
        ELSEWHERE,
        (SERVE, SERVER),
        note="nothing is speculated, the model computes every token",
    ),
    Setting(
        "prometheus_port",
        whole(0, 65535),
        9000,
        "A port of metrics. They are on the HTTP port, under /metrics.",
        ELSEWHERE,
        _FRONT,
        note="metrics are on the HTTP port, under /metrics; no other port is opened",
    ),
    Setting(
        "master_addr",
        text("ADDRESS"),
        "localhost",
        "Where shards meet. They meet in a private folder of this machine.",
        ELSEWHERE,
        (SERVE, SERVER),
        note="shards meet in a private folder of this machine, not at an address",
    ),
    Setting(
        "master_port",
        whole(0, 65535),
        29500,
        "The port of that. None is opened.",
        ELSEWHERE,
        (SERVE, SERVER),
        note="shards meet in a private folder of this machine, no port is opened",
    ),
    Setting(
        "usage_stats",
        one_of("WHETHER", "on", "off", "no-stack"),
        "on",
        "What to report to TGI's authors. Nothing is ever sent to anybody.",
        ELSEWHERE,
        _FRONT,
        note="nothing is ever sent to anybody",
    ),
    Setting(
        "enable_prefill_logprobs",
        SWITCH,
        False,
        "Allow log probabilities of prompts. Every request may ask for them.",
        ELSEWHERE,
        _FRONT,
        note="requests may ask for their prompts' log probabilities without it "
        "(decoder_input_details)",
    ),
    Setting(
        "max_image_fetch_size",
        whole(0),
        1 << 30,
        "Bytes of an image that may be fetched. No image is: models here read text.",
        ELSEWHERE,
        _FRONT,
        note="no image is ever fetched, models here read text",
    ),
    Setting(
        "ngrok",
        SWITCH,
        False,
        "Open a tunnel through ngrok. Refused: run ngrok beside the server.",
        ELSEWHERE,
        _FRONT,
    ),
    Setting(
        "ngrok_authtoken",
        text("TOKEN"),
        None,
        "For --ngrok.",
        ELSEWHERE,
        _FRONT,
        secret=True,
        note="no tunnel is opened, the token is not used",
    ),
    Setting(
        "ngrok_edge",
        text("NAME"),
        None,
        "For --ngrok.",
        ELSEWHERE,
        _FRONT,
        note="no tunnel is opened",
    ),
)

_NO_EXLLAMA = "there are no exllama kernels here; --attention and --quantize say what computes"
_ROCM = "there are no kernels for ROCm here that could be chosen between"
_MARGIN = "what a step needs is measured, not guessed; --cuda-memory-fraction leaves room on a GPU"

_VARIABLES: Mapping[str, str] = {
    "LOG_FORMAT": "--json-output (JSON_OUTPUT) makes the log JSON",
    "USE_FLASH_ATTENTION": "--attention (ATTENTION) says what computes attention",
    "ROCM_USE_FLASH_ATTN_V2_TRITON": _ROCM,
    "ROCM_USE_SKINNY_GEMM": _ROCM,
    "ROCM_USE_CUSTOM_PAGED_ATTN": _ROCM,
    "TGI_WIGGLE_ROOM": _MARGIN,
    "XPU_MEMORY_FRACTION": "there are no Intel GPUs here",
    "EXLLAMA_VERSION": _NO_EXLLAMA,
    "DISABLE_EXLLAMA": _NO_EXLLAMA,
    "HF_HUB_ENABLE_HF_TRANSFER": "files are fetched without hf_transfer, which cannot resume; "
    "HF_XET_HIGH_PERFORMANCE=1 prefers parallel transfers",
    "HF_HUB_USER_AGENT_ORIGIN": "the hub is not told where requests come from",
}
"""Variables without a flag that TGI reads, and what happens instead."""


def variable_notes(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables of TGI that are set and have no effect, each with what happens instead."""
    for name, note in _VARIABLES.items():
        if environment.get(name):
            yield name, note
    chunking = environment.get("PREFILL_CHUNKING")
    if chunking and not _true(chunking):
        yield "PREFILL_CHUNKING", "--batching inflight computes prompts whole"
    if environment.get("DEBUG") == "1":
        yield "DEBUG", "shards are never pretended; --logger-level debug logs more"


def _true(word: str) -> bool:
    try:
        return truth(word)
    except ValueError:
        return True

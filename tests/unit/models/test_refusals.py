"""What cannot be run is refused by name, with the reason, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from tests.parity.cases import SMALL
from tgi_cli.config import BLOCK_SIZE
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.models import model_facts, read_config
from tgi_cli.models.hf.attention import AttentionContext, _record
from tgi_cli.models.hf.masks import Unsupported, WindowMask, _describe
from tgi_cli.models.hf.token_mixing import TokenMixingDetector

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # Encoders, and other senses than text.
    "WhisperForConditionalGeneration": ({}, "not among transformers' encoder-decoder models"),
    "LlamaForSequenceClassification": (SMALL, "is not a causal language model"),
    # Attention of another kind.
    "BertLMHeadModel": ({}, "attention that is not causal"),
    "OlmoeForCausalLM": (SMALL | {"sliding_window": 8}, "a sliding window of 8 that its mask"),
    # Attention that goes past the interface, or biases of its own.
    "BltForCausalLM": ({}, "cuts bytes into patches"),
    "DogeForCausalLM": (SMALL | {"is_moe": True}, "routes a token to experts by the other tokens"),
}


@pytest.mark.tgi_pain(1)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    values, reason = REFUSED[name]
    kind: Any = getattr(transformers, name).config_class
    config = kind(**values)
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as caught:
        model_facts(read_config(tmp_path))
    assert name in caught.value.cause
    assert reason in caught.value.cause
    assert "\n" not in caught.value.cause


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OddForCausalLM"]}))
    with pytest.raises(UnsupportedModelError, match="OddForCausalLM is not known") as caught:
        model_facts(read_config(tmp_path))
    assert "newer transformers" in caught.value.remedy


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        (causal_mask_function, None),
        (sliding_window_causal_mask_function(1), 1),
        (sliding_window_causal_mask_function(4096), 4096),
        (sliding_window_causal_mask_function(1 << 20), None),  # longer than any context asked
    ],
)
def test_windows_are_read_off_masks(mask: Callable[..., Any], window: int | None) -> None:
    assert _describe(mask_function=mask) == WindowMask(window)


@pytest.mark.parametrize("size", [2, 24, 8192, 10_000])
def test_chunks_are_read_off_masks(size: int) -> None:
    mask = chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64))
    assert _describe(mask_function=mask) == WindowMask(None, size)


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: (k <= q) & (k >= (q + 5) // 24 * 24 - 5),
        lambda b, h, q, k: k >= 0,
        lambda b, h, q, k: k <= q + 1,
        lambda b, h, q, k: (k <= q) & (k % 2 == 0),
        lambda b, h, q, k: (k <= q) & ((k < 4) | (k > q - 64)),
        lambda b, h, q, k: (k <= q) & (k > q // 2),
        and_masks(causal_mask_function, lambda b, h, q, k: k != 7),
        lambda b, h, q, k: torch.zeros(3, dtype=torch.bool)[k],
    ],
    ids=["shifted", "all", "one ahead", "every other", "sinks", "half", "a hole", "by content"],
)
def test_other_masks_are_refused(mask: Callable[..., Any]) -> None:
    with pytest.raises(Unsupported, match="mask"):
        _describe(mask_function=mask)


def _call(module: nn.Module | None = None, **changed: Any) -> AttentionContext:
    context, module = AttentionContext(), module or nn.Module()
    module.tgi_attention = context  # type: ignore[assignment]
    arguments: dict[str, Any] = {
        "query": torch.zeros(1, 4, 7, 16, device="meta"),
        "key": torch.zeros(1, 2, 7, 16, device="meta"),
        "value": torch.zeros(1, 2, 7, 16, device="meta"),
        "attention_mask": WindowMask(BLOCK_SIZE),
        "sliding_window": BLOCK_SIZE,
        "dropout": 0.0,
    }
    _record(module, **(arguments | changed))
    return context


def test_the_arguments_of_attention_are_recorded() -> None:
    (spec,) = _call().specs
    assert (spec.num_kv_heads, spec.head_dim, spec.window) == (2, 16, BLOCK_SIZE)


def _not_causal() -> nn.Module:
    module = nn.Module()
    module.is_causal = False  # type: ignore[assignment]
    return module


def _meta(*shape: int) -> Tensor:
    return torch.zeros(*shape, device="meta")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"module": _not_causal(), "attention_mask": None, "sliding_window": None},
            "not causal",
        ),
        ({"is_causal": False}, "not causal"),
        ({"attention_mask": _meta(1, 1, 7, 7)}, "mask or bias of its own"),
        ({"attention_mask": WindowMask(None)}, "sliding window of 16 that its mask"),
        ({"key": _meta(1, 2, 9, 16), "value": _meta(1, 2, 9, 16)}, "something else"),
        ({"key": _meta(1, 3, 7, 16), "value": _meta(1, 3, 7, 16)}, "4 heads for 3"),
        ({"position_bias": _meta(4)}, "modifies attention by position_bias"),
        ({"scaling": _meta(1)}, "learned scale"),
    ],
)
def test_layers_with_unsupported_attention_are_refused(
    changed: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Unsupported, match=reason):
        _call(**changed)


T = 73


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda x: x[:, 1:], "shifts tokens"),
        (lambda x: nn.functional.pad(x, (0, 0, 3, 0)), "shifts tokens"),
        (lambda x: x.roll(1, 1), "along tokens"),
        (lambda x: x.cumsum(1), "along tokens"),
        (lambda x: x.flip(1), "along tokens"),
        (lambda x: x.softmax(1), "along tokens"),
        (lambda x: x.topk(3, dim=1), "along tokens"),
        (lambda x: x.transpose(1, 2).sort(), "along tokens"),
        (lambda x: x @ x.transpose(1, 2), "pairs of tokens"),
        (lambda x: x.transpose(1, 2) @ x, "sums up tokens"),
        (lambda x: torch.einsum("btd,bte->bde", x, x), "sums up tokens"),
    ],
)
def test_models_that_mix_tokens_outside_of_attention_are_refused(
    compute: Callable[[Tensor], Any], reason: str
) -> None:
    with pytest.raises(Unsupported, match=reason), TokenMixingDetector(T):
        compute(_meta(1, T, 16))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: nn.functional.linear(x, _meta(4, 16)),
        lambda x: nn.functional.layer_norm(x, (16,)),
        lambda x: x.softmax(-1),
        lambda x: x.view(1, T, 4, 4).transpose(1, 2).contiguous(),
        lambda x: x[0].topk(2, dim=-1),
        lambda x: x[0].sort(),
        lambda x: torch.cat([x[..., 8:], x[..., :8]], -1),
        lambda x: _meta(1, 8, 1) @ _meta(1, 1, T),
        lambda x: x.repeat_interleave(2, dim=1),
    ],
)
def test_operations_within_tokens_are_allowed(compute: Callable[[Tensor], Any]) -> None:
    with TokenMixingDetector(T):
        compute(_meta(1, T, 16))

"""How activations are quantized, which depends on the checkpoint and on the device's kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tgi_cli.config import DeviceFacts, ModelFacts, ServeConfig, resolve
from tgi_cli.errors import ConfigError

MODEL = ModelFacts(
    architecture="LlamaForCausalLM",
    model_type="llama",
    dtype="bfloat16",
    vocab_size=1000,
    max_position_embeddings=2048,
    eos_token_ids=(2,),
    kv_bytes_per_token=1024,
)
GGUF = replace(MODEL, quantization="gguf", integer_blocks=True)
CPU = DeviceFacts(kind="cpu", name="cpu", total_memory=8 << 30, native_bfloat16=True)


def rounds(model: ModelFacts, *, asked: bool | None, dtype: str | None, kernels: bool) -> bool:
    serve = ServeConfig(model_id="m", dtype=dtype, quantize_activations=asked)
    config = resolve(serve, model, CPU, Path("/m"), multiplies_bytes=kernels)
    return config.quantize_activations


@pytest.mark.parametrize(
    ("model", "dtype", "kernels", "expected"),
    [
        (GGUF, None, True, True),
        (GGUF, "bfloat16", True, True),
        (GGUF, "float32", True, False),
        (GGUF, "float16", True, False),
        (GGUF, None, False, False),
        (replace(GGUF, integer_blocks=False), None, True, False),
        (replace(MODEL, quantization="gptq"), None, True, False),
        (MODEL, None, True, False),
    ],
)
def test_activations_are_rounded_by_default_for_integers_of_gguf_files(
    model: ModelFacts, dtype: str | None, kernels: bool, expected: bool
) -> None:
    assert rounds(model, asked=None, dtype=dtype, kernels=kernels) is expected


@pytest.mark.parametrize("model", [GGUF, MODEL])
@pytest.mark.parametrize("kernels", [False, True])
def test_what_the_user_sets_is_kept(model: ModelFacts, kernels: bool) -> None:
    """The worker refuses what the device cannot do."""
    assert rounds(model, asked=True, dtype="float32", kernels=kernels) is True
    assert rounds(model, asked=False, dtype=None, kernels=kernels) is False


def test_files_without_integers_are_refused() -> None:
    model = replace(GGUF, integer_blocks=False)
    with pytest.raises(ConfigError, match="--quantize-activations: the file has no weights in"):
        rounds(model, asked=True, dtype=None, kernels=True)

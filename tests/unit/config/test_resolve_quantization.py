"""How activations are quantized, which depends on the weights and on the device's kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tgi_cli.config import DeviceFacts, ModelFacts, ServeConfig, resolve
from tgi_cli.config.schema import DecoderFacts
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
GPTQ = replace(MODEL, quantization="gptq", integer_weights=True)
FP8 = replace(MODEL, quantization="fp8")
SEQ2SEQ = replace(
    MODEL, architecture="T5ForConditionalGeneration", decoder=DecoderFacts(start_id=0)
)
CPU = DeviceFacts(kind="cpu", name="cpu", total_memory=8 << 30, native_bfloat16=True)
OLD_CPU = replace(CPU, native_bfloat16=False)


def rounds(
    model: ModelFacts,
    asked: bool | None = None,
    *,
    kernels: bool = True,
    device: DeviceFacts = CPU,
    **settings: Any,
) -> bool:
    serve = ServeConfig(model_id="m", quantize_activations=asked, **settings)
    config = resolve(serve, model, device, Path("/m"), multiplies_bytes=kernels)
    return config.quantize_activations


@pytest.mark.parametrize(
    ("model", "settings", "expected"),
    [
        (GPTQ, {}, True),
        (replace(GPTQ, quantization="compressed-tensors"), {}, True),
        (replace(GPTQ, quantization="gguf"), {}, True),
        (GPTQ, {"quantize": "gptq"}, True),
        (FP8, {}, False),
        (replace(FP8, quantization="gguf"), {}, False),
        (replace(FP8, quantization="mxfp4"), {}, False),
        (MODEL, {}, False),
        (MODEL, {"quantize": "int8"}, True),
        (MODEL, {"quantize": "eetq"}, True),
        (MODEL, {"quantize": "bitsandbytes"}, True),
        (MODEL, {"quantize": "bitsandbytes-nf4"}, False),
        (MODEL, {"quantize": "bitsandbytes-fp4"}, False),
        (MODEL, {"quantize": "fp8"}, False),
        (SEQ2SEQ, {"quantize": "int8"}, True),
        (MODEL, {"quantize_head": True}, True),
        (MODEL, {"quantize_head_bits": 8}, True),
        (MODEL, {"quantize_head_bits": 4}, False),
        (MODEL, {"quantize_head": True, "quantize_head_bits": 4}, False),
        (MODEL, {"quantize": "fp8", "quantize_head": True}, True),
        (FP8, {"quantize_head": True}, True),
        (GPTQ, {"quantize_head_bits": 4}, True),
        (GPTQ, {"num_shard": 2}, True),
        (GPTQ, {"pipeline_parallel_size": 2}, True),
    ],
)
def test_activations_are_rounded_by_default_where_some_weights_are_integers(
    model: ModelFacts, settings: dict[str, Any], expected: bool
) -> None:
    assert rounds(model, **settings) is expected
    assert rounds(model, kernels=False, **settings) is False
    assert rounds(model, False, **settings) is False


@pytest.mark.parametrize(
    ("dtype", "device", "expected"),
    [
        ("bfloat16", OLD_CPU, True),
        ("float32", CPU, False),
        ("float16", CPU, False),
        (None, OLD_CPU, False),
        (None, replace(OLD_CPU, kernels=True), True),
    ],
)
def test_activations_keep_their_bits_in_other_dtypes(
    dtype: str | None, device: DeviceFacts, expected: bool
) -> None:
    """The default without native bfloat16 and without kernels is float32."""
    assert rounds(GPTQ, dtype=dtype, device=device) is expected
    assert rounds(MODEL, dtype=dtype, device=device, quantize="int8") is expected


@pytest.mark.parametrize("kernels", [False, True])
def test_what_the_user_sets_is_kept(kernels: bool) -> None:
    """The worker refuses what the device cannot do."""
    for model, quantize in ((GPTQ, None), (MODEL, "int8")):
        asked = rounds(model, True, kernels=kernels, dtype="float32", quantize=quantize)
        assert asked is True
        assert rounds(model, False, kernels=kernels, quantize=quantize) is False


def test_models_without_integers_are_refused() -> None:
    words = "--quantize-activations: the model has no weights in integers"
    with pytest.raises(ConfigError, match=words) as plain:
        rounds(MODEL, True)
    assert "--quantize int8" in plain.value.remedy
    for model in (FP8, replace(FP8, quantization="gguf")):
        with pytest.raises(ConfigError, match=words) as quantized:
            rounds(model, True)
        assert "--quantize int8" not in quantized.value.remedy

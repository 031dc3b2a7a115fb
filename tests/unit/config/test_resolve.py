"""Resolving the user's settings into a fully specified engine."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest

from tgi_cli.config import (
    BLOCK_SIZE,
    DEFAULT_CPU_PREFILL_TOKENS,
    DecoderFacts,
    DeviceFacts,
    EngineConfig,
    ModelFacts,
    ServeConfig,
    resolve,
)
from tgi_cli.config.settings.engine import (
    BATCHINGS,
    CAPACITY_POLICIES,
    DEFAULT_CPU_PREFILL_DELAY,
)
from tgi_cli.config.settings.model import ON_THE_FLY
from tgi_cli.engine.config import Batching, CapacityPolicy, SchedulerConfig
from tgi_cli.errors import ConfigError, ExitCode, UnsupportedModelError

MODEL = ModelFacts(
    architecture="LlamaForCausalLM",
    model_type="llama",
    dtype="bfloat16",
    vocab_size=1000,
    max_position_embeddings=2048,
    eos_token_ids=(2,),
    kv_bytes_per_token=1024,
)
CPU = DeviceFacts(kind="cpu", name="cpu", total_memory=8 << 30, native_bfloat16=True)
OLD_CPU = replace(CPU, native_bfloat16=False)
CUDA = DeviceFacts(kind="cuda", name="gpu", total_memory=80 << 30, native_bfloat16=True)


def resolved(model: ModelFacts = MODEL, device: DeviceFacts = CPU, **said: Any) -> EngineConfig:
    return resolve(ServeConfig(model_id="m", **said), model, device, Path("/m"))


def test_unset_limits_follow_the_model() -> None:
    config = resolved()
    assert config.max_total_tokens == 2048
    assert config.max_input_tokens == 2047
    assert config.max_batch_size == 128
    assert config.max_batch_total_tokens is None, "found at warm-up"


def test_both_configurations_are_frozen() -> None:
    config = resolved()
    with pytest.raises(FrozenInstanceError):
        config.max_total_tokens = 1  # type: ignore[misc]
    assert all(field.default is not None or field.init for field in fields(EngineConfig))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"max_total_tokens": 100}, (99, 100)),
        ({"max_input_tokens": 50}, (50, 2048)),
        ({"max_input_tokens": 50, "max_total_tokens": 60}, (50, 60)),
        ({"max_batch_total_tokens": 512}, (511, 512)),
        ({"max_batch_total_tokens": 4096}, (2047, 2048)),
    ],
)
def test_explicit_limits_are_used(said: dict[str, int], expected: tuple[int, int]) -> None:
    config = resolved(**said)
    assert (config.max_input_tokens, config.max_total_tokens) == expected


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"max_total_tokens": 4096}, "context of 2048"),
        ({"max_total_tokens": 1}, "--max-total-tokens: 1 is not at least 2"),
        ({"max_batch_total_tokens": 1}, "--max-batch-total-tokens: 1 is not at least 2"),
        ({"max_input_tokens": 100, "max_total_tokens": 100}, "must be less than"),
        ({"max_input_tokens": 2048}, "must be less than"),
        ({"max_batch_total_tokens": 100, "max_total_tokens": 200}, "cannot hold one request"),
        ({"max_batch_prefill_tokens": 600, "max_batch_total_tokens": 512}, "at most"),
        ({"max_batch_size": 0}, "--max-batch-size: 0 is not at least 1"),
        ({"max_concurrent_requests": -1}, "--max-concurrent-requests: -1 is not at least 1"),
        ({"dtype": "int3"}, "--dtype: 'int3' is not one of 'auto'"),
        ({"batching": "eager"}, "--batching: 'eager' is not one of 'fused', 'inflight'"),
        ({"capacity_policy": "hope"}, "--capacity-policy: 'hope' is not one of"),
        ({"waiting_served_ratio": -0.1}, "--waiting-served-ratio: -0.1 is not at least 0"),
        ({"waiting_served_ratio": float("nan")}, "--waiting-served-ratio: nan is not at least 0"),
        ({"max_waiting_tokens": -1}, "--max-waiting-tokens: -1 is not at least 0"),
        ({"max_queued_requests": 0}, "--max-queued-requests: 0 is not at least 1"),
        ({"max_queued_tokens": -5}, "--max-queued-tokens: -5 is not at least 1"),
        (
            {"batching": "inflight", "max_input_tokens": 200, "max_batch_prefill_tokens": 100},
            "--max-batch-prefill-tokens must be >= --max-input-tokens. Given: 100 and 200",
        ),
        ({"kv_cache_dtype": "int4"}, "--kv-cache-dtype: 'int4' is not one of"),
        ({"quantize_head_bits": 5}, "--quantize-head-bits: '5' is not one of 4, 8"),
    ],
)
def test_invalid_settings_are_reported_as_flags(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        resolved(**said)
    assert caught.value.exit_code is ExitCode.USAGE


def test_a_context_without_room_for_an_answer_is_the_models_fault() -> None:
    with pytest.raises(UnsupportedModelError, match="context is 1 token") as error:
        resolved(replace(MODEL, max_position_embeddings=1))
    assert "max_position_embeddings" in error.value.remedy


@pytest.mark.parametrize("asked", [None, *ON_THE_FLY])
def test_quantize_applies_to_unquantized_weights(asked: str | None) -> None:
    assert resolved(quantize=asked).quantize == asked
    assert not resolved(quantize=asked).quantize_head
    assert resolved(quantize=asked, quantize_head=True).quantize_head


@pytest.mark.parametrize(
    ("said", "bits"),
    [
        ({}, None),
        ({"quantize_head": True}, 8),
        ({"quantize_head_bits": 4}, 4),
        ({"quantize_head": True, "quantize_head_bits": 4}, 4),
        ({"quantize_head_bits": 8}, 8),
    ],
)
def test_the_head_has_as_many_bits_as_are_asked_for(said: dict[str, Any], bits: int | None) -> None:
    assert resolved(**said).head_bits == bits


@pytest.mark.parametrize(
    ("asked", "found", "device"),
    [
        (None, "gptq", CPU),
        ("gptq", "gptq", CPU),
        ("bitsandbytes-nf4", "bitsandbytes-nf4", CPU),
        ("fp8", "fp8", CUDA),
        ("marlin", "gptq", CUDA),
        ("marlin", "awq", CUDA),
    ],
)
def test_a_flag_may_confirm_the_checkpoints_format(
    asked: str | None, found: str, device: DeviceFacts
) -> None:
    assert resolved(replace(MODEL, quantization=found), device, quantize=asked).quantize is None


@pytest.mark.parametrize(
    ("asked", "found", "words"),
    [
        ("int3", None, "--quantize: 'int3' is not one of"),
        ("gptq", None, "--quantize gptq contradicts the checkpoint, which has unquantized weights"),
        ("int8", "gptq", "--quantize int8 contradicts .* is quantized with gptq"),
        ("awq", "gptq", "--quantize awq contradicts .* is quantized with gptq"),
        ("marlin", "gptq", "--quantize marlin names kernels of CUDA"),
    ],
)
def test_a_flag_that_contradicts_the_checkpoint_is_rejected(
    asked: str, found: str | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(replace(MODEL, quantization=found), quantize=asked)


def test_exl2_is_rejected_with_the_reason() -> None:
    with pytest.raises(UnsupportedModelError, match="exl2 mixes widths"):
        resolved(quantize="exl2")


def test_an_unknown_word_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(batching="eager")
    assert caught.value.cause == ("--batching: 'eager' is not one of 'fused', 'inflight', 'static'")


@pytest.mark.parametrize(
    ("said", "device", "on_disk", "expected"),
    [
        (None, CPU, "float16", "bfloat16"),
        (None, CPU, "float32", "bfloat16"),
        (None, OLD_CPU, "bfloat16", "float32"),
        (None, replace(OLD_CPU, kernels=True), "float16", "bfloat16"),
        ("auto", replace(OLD_CPU, kernels=True), "float32", "bfloat16"),
        ("float32", replace(OLD_CPU, kernels=True), "bfloat16", "float32"),
        ("bfloat16", OLD_CPU, "float32", "bfloat16"),
        (None, CUDA, "float16", "float16"),
        (None, CUDA, "float32", "bfloat16"),
        ("float32", CUDA, "bfloat16", "float32"),
        ("half", CPU, "bfloat16", "float16"),
        ("auto", CUDA, "bfloat16", "bfloat16"),
    ],
)
def test_the_dtype_follows_the_flag_then_the_device(
    said: str | None, device: DeviceFacts, on_disk: str, expected: str
) -> None:
    config = resolved(replace(MODEL, dtype=on_disk), device, dtype=said)
    assert config.dtype == expected


@pytest.mark.parametrize("kernels", [False, True])
def test_products_of_torch_are_in_bfloat16_only_where_the_processor_multiplies_it(
    kernels: bool,
) -> None:
    model = replace(MODEL, torch_products=True)
    device = replace(OLD_CPU, kernels=kernels)
    assert resolved(model, device).dtype == "float32"
    assert resolved(model, device, dtype="bfloat16").dtype == "bfloat16"
    assert resolved(model, replace(device, native_bfloat16=True)).dtype == "bfloat16"
    assert resolved(replace(model, dtype="float16"), CUDA).dtype == "float16"


def test_the_engines_policies_have_the_flags_names() -> None:
    assert set(Batching) == set(BATCHINGS)
    assert set(CapacityPolicy) == set(CAPACITY_POLICIES)


def test_every_scheduling_setting_reaches_the_scheduler() -> None:
    said = {
        "batching": "inflight",
        "capacity_policy": "guaranteed_no_evict",
        "waiting_served_ratio": 0.0,
        "max_waiting_tokens": 0,
        "max_queued_requests": 7,
        "max_queued_tokens": 900,
        "max_prefill_delay": 30,
        "max_total_tokens": 100,
        "max_batch_prefill_tokens": 200,
        "max_batch_size": 3,
        "prefix_caching": False,
    }
    limits = SchedulerConfig.of(resolved(**said), 50)
    assert {name: getattr(limits, name) for name in said} == said
    assert limits.num_blocks == 50


def test_unset_scheduling_settings_have_tgis_defaults() -> None:
    limits = SchedulerConfig.of(resolved(), 50)
    assert limits == SchedulerConfig(
        max_total_tokens=2048,
        max_batch_prefill_tokens=DEFAULT_CPU_PREFILL_TOKENS,
        max_prefill_delay=DEFAULT_CPU_PREFILL_DELAY,
        max_batch_size=128,
        block_size=BLOCK_SIZE,
        num_blocks=50,
    )
    assert (limits.waiting_served_ratio, limits.max_waiting_tokens) == (0.3, 20)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, (2047, 2047)),
        ({"max_input_tokens": 100}, (100, DEFAULT_CPU_PREFILL_TOKENS)),
        ({"max_input_tokens": 900}, (900, 900)),
        ({"max_batch_prefill_tokens": 300}, (300, 300)),
        ({"max_batch_prefill_tokens": 4000}, (2047, 4000)),
        ({"max_input_tokens": 300, "max_batch_prefill_tokens": 300}, (300, 300)),
    ],
)
def test_inflight_steps_hold_the_longest_prompt(
    said: dict[str, int], expected: tuple[int, int]
) -> None:
    config = resolved(batching="inflight", **said)
    assert (config.max_input_tokens, config.max_batch_prefill_tokens) == expected
    assert config.max_total_tokens == 2048
    for other in ("fused", "static"):
        chunked = resolved(batching=other, max_input_tokens=900, max_batch_prefill_tokens=300)
        assert (chunked.max_input_tokens, chunked.max_batch_prefill_tokens) == (900, 300)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kv_cache_has_the_data_type_of_the_weights(dtype: str) -> None:
    assert resolved(dtype=dtype).kv_cache_dtype == dtype


@pytest.mark.parametrize(
    ("said", "largest", "slots", "rank"),
    [
        ({}, 0, 0, 64),
        ({"max_loras": 2}, 0, 2, 64),
        ({"lora_adapters": ("a=/a",)}, 8, 4, 16),
        ({"lora_adapters": ("a=/a",)}, 48, 4, 48),
        ({"lora_adapters": ("a=/a",), "max_loras": 1, "max_lora_rank": 128}, 48, 1, 128),
    ],
)
def test_adapter_slots_follow_the_named_adapters(
    said: dict[str, Any], largest: int, slots: int, rank: int
) -> None:
    config = resolve(ServeConfig(model_id="m", **said), MODEL, CPU, Path("/m"), largest)
    assert (config.max_loras, config.max_lora_rank, config.max_cpu_loras) == (slots, rank, 32)
    limits = SchedulerConfig.of(config, 10)
    assert (limits.max_loras, limits.max_cpu_loras) == (slots, 32)


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({"lora_adapters": ("a=/a",), "max_loras": 0}, "--max-loras: 0 is not at least 1"),
        ({"max_loras": -1}, "--max-loras: -1 is not at least 1"),
        ({"max_cpu_loras": 0}, "--max-cpu-loras: 0 is not at least 1"),
        ({"max_lora_rank": 0}, "--max-lora-rank: 0 is not at least 1"),
        ({"lora_adapters": ("a=/a",), "max_lora_rank": 4}, "less than the rank 8"),
    ],
)
def test_invalid_adapter_slots_are_rejected(said: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        resolve(ServeConfig(model_id="m", **said), MODEL, CPU, Path("/m"), 8)


@pytest.mark.parametrize(("asked", "sizes"), [(None, None), ((0,), ()), ((8, 1), (8, 1)), ((), ())])
def test_sizes_of_cuda_graphs_are_resolved(
    asked: tuple[int, ...] | None, sizes: tuple[int, ...] | None
) -> None:
    assert resolved(cuda_graphs=asked).cuda_graphs == sizes


def test_sizes_of_cuda_graphs_are_positive() -> None:
    with pytest.raises(ConfigError, match="--cuda-graphs: -1 is not at least 0"):
        resolved(cuda_graphs=(4, -1))


@pytest.mark.parametrize(
    ("device", "asked", "backend"),
    [
        (CPU, "auto", None),
        (CPU, "paged", None),
        (CPU, "native", "native"),
        (CPU, "cpu", "cpu"),
        (CPU, "torch", "torch"),
        (CUDA, "flashdecoding", None),
        (CUDA, "triton", "triton"),
        (CUDA, "flashinfer", "flashinfer"),
        (CUDA, "torch", "torch"),
    ],
)
def test_attention_resolves_to_a_backend(
    device: DeviceFacts, asked: str, backend: str | None
) -> None:
    assert resolved(device=device, attention=asked).attention == backend


@pytest.mark.parametrize(("device", "asked"), [(CPU, "triton"), (CUDA, "native")])
def test_an_attention_backend_for_another_device_is_rejected(
    device: DeviceFacts, asked: str
) -> None:
    with pytest.raises(ConfigError, match=f"--attention {asked} is not for {device.kind}"):
        resolved(device=device, attention=asked)


def test_prompts_in_chunks_need_kernels_on_cuda() -> None:
    assert resolved().state_prefill == "recurrent"
    assert resolved(device=CUDA, state_prefill="chunked").state_prefill == "chunked"
    with pytest.raises(ConfigError, match="--state-prefill chunked is not for cpu"):
        resolved(state_prefill="chunked")
    with pytest.raises(ConfigError, match="--disable-custom-kernels"):
        resolved(device=CUDA, state_prefill="chunked", disable_custom_kernels=True)
    with pytest.raises(ConfigError, match="float32"):
        resolved(device=CUDA, state_prefill="chunked", dtype="float32")
    with pytest.raises(ConfigError, match="--state-prefill"):
        resolved(device=CUDA, state_prefill="fast")


def test_disabled_kernels_cannot_be_requested() -> None:
    assert resolved(disable_custom_kernels=True).attention is None
    with pytest.raises(ConfigError, match="--attention native is a kernel"):
        resolved(disable_custom_kernels=True, attention="native")


def test_the_memory_fraction_is_validated(caplog: pytest.LogCaptureFixture) -> None:
    assert resolved(device=CUDA, cuda_memory_fraction=0.5).cuda_memory_fraction == 0.5
    assert not caplog.records
    with caplog.at_level("WARNING", logger="tgi_cli"):
        resolved(device=CPU, cuda_memory_fraction=0.5)
    assert "--cuda-memory-fraction is for GPUs" in caplog.text
    with pytest.raises(ConfigError, match=r"--cuda-memory-fraction: 0\.0 is not above 0"):
        resolved(device=CUDA, cuda_memory_fraction=0.0)


def test_rope_scaling_excludes_cross_check() -> None:
    with pytest.raises(ConfigError, match=r"--cross-check .* without --rope-scaling"):
        resolved(cross_check=True, rope_factor=2.0)


def test_sparse_attention_is_served_as_far_as_it_is_dense(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sparse = replace(MODEL, dense_positions=512)
    assert resolved(sparse).max_total_tokens == 512
    assert "more than 512 tokens" in caplog.text
    assert resolved(sparse, max_total_tokens=300).max_total_tokens == 300
    assert resolved(replace(MODEL, dense_positions=4096)).max_total_tokens == 2048
    with pytest.raises(UnsupportedModelError, match="more than 512 tokens") as error:
        resolved(sparse, max_total_tokens=513)
    assert "--max-total-tokens 512" in error.value.remedy


def test_drafts_are_verified_on_a_cpu_unless_the_user_says_otherwise() -> None:
    assert resolved().speculate == 7
    assert resolved(device=CUDA).speculate == 0
    for device in (CPU, CUDA):
        assert resolved(device=device, speculate=3).speculate == 3
        assert resolved(device=device, speculate=0).speculate == 0
    assert "speculate" in resolved(speculate=3).explicit_limits
    assert "speculate" not in resolved().explicit_limits


SEQ2SEQ = replace(
    MODEL,
    architecture="BartForConditionalGeneration",
    max_position_embeddings=96,
    decoder=DecoderFacts(start_id=2, max_input_tokens=64, max_tokens=32),
)


def test_an_encoder_decoder_model_computes_prompts_whole_and_reuses_none() -> None:
    config = resolved(SEQ2SEQ, max_batch_prefill_tokens=None)
    assert (config.max_total_tokens, config.max_input_tokens) == (96, 64)
    assert config.max_sequence_tokens == 97
    assert config.max_batch_prefill_tokens >= 64
    assert not config.prefix_caching
    assert config.attention == "torch"
    assert config.speculate == 0, "a decoder takes one token at a time"
    long = replace(SEQ2SEQ, max_position_embeddings=1 << 14, decoder=DecoderFacts(start_id=2))
    assert resolved(long, max_total_tokens=9000).max_batch_prefill_tokens >= 8999
    usual = replace(long, decoder=DecoderFacts(start_id=2, usual_total_tokens=1024))
    assert resolved(usual).max_total_tokens == 1024
    assert resolved(usual, max_total_tokens=5000).max_total_tokens == 5000


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"lora_adapters": ("a=/a",)}, "--lora-adapters"),
        ({"max_loras": 1}, "--max-loras"),
        ({"max_prefill_delay": 50}, "--max-prefill-delay"),
        ({"num_shard": 2}, "--num-shard"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"sharded": True}, "--sharded"),
        ({"cross_check": True}, "--cross-check"),
        ({"attention": "cpu"}, "--attention cpu"),
        ({"shard_uds_path": Path("/tmp/s")}, "--shard-uds-path"),
        ({"speculate": 2}, "--speculate"),
        ({"speculative_config": "{}"}, "--speculative-config"),
        ({"max_input_tokens": 65}, "--max-input-tokens 65 is more than the encoder's 64"),
        ({"max_input_tokens": 60, "max_batch_prefill_tokens": 50}, "of an encoder-decoder model"),
    ],
)
def test_what_encoder_decoder_models_are_not_served_with_is_named(
    said: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        resolved(SEQ2SEQ, **said)


def test_quantized_encoder_decoder_checkpoints_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="gptq"):
        resolved(replace(SEQ2SEQ, quantization="gptq"))


def test_blocks_are_offloaded_from_gpus_alone() -> None:
    size = 1 << 30
    assert resolved(device=CUDA, kv_offloading_size=size).kv_offloading_size == size
    for device, said, words in (
        (CPU, {}, "is for GPUs"),
        (CUDA, {"prefix_caching": False}, "--no-prefix-caching"),
        (CUDA, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
    ):
        with pytest.raises(ConfigError, match=words):
            resolved(device=device, kv_offloading_size=size, **said)


@pytest.mark.parametrize(
    ("model", "device", "said", "words"),
    [
        (MODEL, CUDA, {}, "is for CPUs"),
        (MODEL, CPU, {"num_shard": 2}, "needs one shard"),
        (replace(MODEL, decoder=DecoderFacts(start_id=0)), CPU, {}, "encoder-decoder"),
        (MODEL, CPU, {"prefix_caching": False}, "--no-prefix-caching"),
        (MODEL, CPU, {"kv_cache_dir_size": 10}, "is not a size"),
    ],
)
def test_blocks_are_kept_on_a_disk_where_they_can_be_copied(
    model: ModelFacts, device: DeviceFacts, said: dict[str, Any], words: str
) -> None:
    folder = Path("/kv")
    assert resolved(kv_cache_dir=folder, kv_cache_dir_size=1 << 30).kv_cache_dir == folder
    with pytest.raises(ConfigError, match=words):
        resolved(model, device, kv_cache_dir=folder, **said)

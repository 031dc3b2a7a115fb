"""Contradictions among settings, found before a process starts or a model is read."""

from __future__ import annotations

from tgi_cli.config.nodes import check_nodes
from tgi_cli.config.pipeline import check_pipeline
from tgi_cli.config.schema import ServeConfig
from tgi_cli.errors import ConfigError, UnsupportedModelError


def check_settings(serve: ServeConfig) -> None:
    """Validate what depends on neither model nor device.

    Raises:
        ConfigError: settings that contradict each other, named as flags.
        UnsupportedModelError: a quantization format that is not supported.
    """
    _check_limits(serve)
    _check_sharding(serve)
    _check_kernels(serve)
    check_pipeline(serve)
    check_nodes(serve)
    for flag, value in (
        ("--kv-cache-dir", serve.kv_cache_dir),
        ("--kv-offloading-size", serve.kv_offloading_size),
    ):
        if value is not None and not serve.prefix_caching:
            raise ConfigError(
                f"{flag} keeps prefixes, which --no-prefix-caching does not use",
                "leave one of them off",
            )
    if serve.kv_cache_dir_size is not None and serve.kv_cache_dir is None:
        raise ConfigError("--kv-cache-dir-size needs a folder", "add --kv-cache-dir")
    if serve.replicas > 1 and serve.shard_uds_path is not None:
        raise ConfigError(
            "TGI's clients of --shard-uds-path drive one model server, and --replicas starts "
            f"{serve.replicas}",
            "leave one of the two off",
        )
    if serve.cross_check and serve.rope is not None:
        raise ConfigError(
            "--cross-check compares with transformers' unmodified model, without --rope-scaling",
            "leave one of them off",
        )
    if serve.cross_check and serve.load_format == "dummy":
        raise ConfigError(
            "--load-format dummy has no weights that --cross-check could compare",
            "give one of the two",
        )
    if serve.cross_check and serve.load_format == "stream":
        raise ConfigError(
            "--load-format stream keeps no files for transformers, which --cross-check needs",
            "leave one of them off",
        )
    if serve.quantize == "exl2":
        raise UnsupportedModelError(
            "exl2 mixes widths within a matrix, for exllamav2's kernels, which are CUDA only",
            "serve a checkpoint quantized with gptq, awq or compressed-tensors",
        )


def check_cache(total: int, cache: int | None) -> None:
    """Check that the KV cache of ``cache`` tokens can hold a request of ``total`` tokens.

    Raises:
        ConfigError: it cannot.
    """
    if cache is not None and cache < total:
        raise ConfigError(
            f"--max-batch-total-tokens {cache} cannot hold one request of "
            f"--max-total-tokens {total}",
            "raise the former or lower the latter",
        )


def check_input(max_input: int, total: int) -> None:
    """Check that a prompt of ``max_input`` tokens leaves room for a token of its answer.

    Raises:
        ConfigError: it does not.
    """
    if max_input >= total:
        raise ConfigError(
            f"--max-input-tokens {max_input} must be less than --max-total-tokens {total}",
            "raise the latter or lower the former",
        )


def _check_limits(serve: ServeConfig) -> None:
    total, cache = serve.max_total_tokens, serve.max_batch_total_tokens
    longest, prefill = serve.max_input_tokens, serve.max_batch_prefill_tokens
    if total is not None:
        check_cache(total, cache)
        if longest is not None:
            check_input(longest, total)
    elif longest is not None and cache is not None and longest >= cache:
        raise ConfigError(
            f"--max-batch-total-tokens {cache} cannot hold a prompt of --max-input-tokens "
            f"{longest} and a token of its answer",
            "raise the former or lower the latter",
        )
    if prefill is None:
        return
    if cache is not None and prefill > cache:
        raise ConfigError(
            f"--max-batch-prefill-tokens {prefill} must be at most "
            f"--max-batch-total-tokens {cache}",
            "raise the latter or lower the former",
        )
    if serve.batching == "inflight" and longest is not None and prefill < longest:
        raise ConfigError(
            "with --batching inflight, --max-batch-prefill-tokens must be >= --max-input-tokens. "
            f"Given: {prefill} and {longest}",
            "raise the former, lower the latter, or leave one of them unset",
        )


def _check_sharding(serve: ServeConfig) -> None:
    shards, sharded = serve.num_shard, serve.sharded
    if sharded is False and shards is not None and shards > 1:
        raise ConfigError(
            f"--num-shard {shards} and --no-sharded contradict each other", "leave one off"
        )
    if sharded and shards == 1:
        raise ConfigError("--sharded and --num-shard 1 contradict each other", "leave one off")


def _check_kernels(serve: ServeConfig) -> None:
    if not serve.disable_custom_kernels:
        return
    if serve.state_prefill == "chunked":
        raise ConfigError(
            "--state-prefill chunked is computed by kernels, and --disable-custom-kernels "
            "disables those",
            "leave one of them off",
        )
    if serve.attention in ("native", "triton"):
        raise ConfigError(
            f"--attention {serve.attention} is a kernel, and --disable-custom-kernels disables "
            "those",
            "leave one of them off",
        )

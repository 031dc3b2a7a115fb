"""config.json of architectures with layer norms, from the keys of GGUF files."""

from __future__ import annotations

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.gguf.config_parts import Config, llama_shape
from tgi_cli.gguf.keys import ArchitectureKeys


def starcoder2(keys: ArchitectureKeys) -> Config:
    """StarCoder 2."""
    return llama_shape(keys) | {
        "model_type": "starcoder2",
        "norm_epsilon": keys.real("attention.layer_norm_epsilon"),
        "use_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": keys.whole("attention.sliding_window", 0, 0) or None,
    }


def gpt2(keys: ArchitectureKeys) -> Config:
    """GPT-2 and GPT-BigCode, whose keys and values have one head."""
    config = {
        "n_embd": keys.whole("embedding_length"),
        "n_head": keys.num_heads,
        "n_layer": keys.num_layers,
        "n_positions": keys.whole("context_length"),
        "n_inner": keys.whole("feed_forward_length"),
        "layer_norm_epsilon": keys.real("attention.layer_norm_epsilon"),
    }
    if keys.architecture == "gpt2":
        return config | {"model_type": "gpt2", "activation_function": "gelu_new"}
    if keys.num_kv_heads != 1:
        raise UnsupportedModelError(
            f"{keys.file.path}: {keys.architecture} with {keys.num_kv_heads} key-value heads is "
            "not supported",
            "serve the model's safetensors",
        )
    return config | {
        "model_type": "gpt_bigcode",
        "activation_function": "gelu_pytorch_tanh",
        "multi_query": True,
    }


def gpt_neox(keys: ArchitectureKeys) -> Config:
    """GPT-NeoX."""
    return {
        "model_type": "gpt_neox",
        "hidden_size": keys.whole("embedding_length"),
        "intermediate_size": keys.whole("feed_forward_length"),
        "num_hidden_layers": keys.num_layers,
        "num_attention_heads": keys.num_heads,
        "max_position_embeddings": keys.whole("context_length"),
        "layer_norm_eps": keys.real("attention.layer_norm_epsilon"),
        "rotary_pct": keys.whole("rope.dimension_count", keys.head_dim) / keys.head_dim,
        "rotary_emb_base": keys.real("rope.freq_base", 10000.0),
        "attention_bias": keys.has_tensor("blk.0.attn_qkv.bias"),
        "use_parallel_residual": keys.flag("use_parallel_residual", True),
        "hidden_act": "gelu",
    }


def falcon(keys: ArchitectureKeys) -> Config:
    """Falcon; with two norms the larger ones."""
    two_norms = keys.has_tensor("blk.0.attn_norm_2.weight")
    return {
        "model_type": "falcon",
        "hidden_size": keys.whole("embedding_length"),
        "ffn_hidden_size": keys.whole("feed_forward_length"),
        "num_hidden_layers": keys.num_layers,
        "num_attention_heads": keys.num_heads,
        "num_kv_heads": keys.num_kv_heads,
        "new_decoder_architecture": two_norms,
        "multi_query": keys.num_kv_heads == 1,
        "parallel_attn": True,
        "bias": keys.has_tensor("blk.0.attn_qkv.bias"),
        "alibi": False,
        "max_position_embeddings": keys.whole("context_length"),
        "layer_norm_epsilon": keys.real("attention.layer_norm_epsilon"),
        "rope_theta": keys.real("rope.freq_base", 10000.0),
    }

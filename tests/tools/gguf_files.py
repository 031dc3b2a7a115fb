"""Writes miniature checkpoints as GGUF files, with the gguf package of llama.cpp.

What the package cannot quantize gets random blocks: any bytes are a block, and what they stand for
is the package's word. Names are the package's, too; orders of rows are worked out here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.tools import gguf_late_families, gguf_transformers_families
from tests.tools.gguf_late_families import Part, put
from tgi_cli.gguf.model_config import model_config
from tgi_cli.gguf.reader import read_gguf

ARCHITECTURES = {
    **gguf_late_families.ARCHITECTURES,
    **gguf_transformers_families.ARCHITECTURES,
    "bamba": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "falcon": gguf.MODEL_ARCH.FALCON,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "gpt_bigcode": gguf.MODEL_ARCH.STARCODER,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "llama4_text": gguf.MODEL_ARCH.LLAMA4,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
}
"""By ``model_type``."""

_PERMUTED = (
    *("llama", "mixtral", "granite", "granitemoe", "granitemoehybrid", "bamba", "smollm3"),
    *gguf_transformers_families.PERMUTED,
)
_GEMMAS = (
    *("gemma", "gemma2", "gemma3_text"),
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
)
"""Whose norms are stored as one more than the weight."""
_PLAIN = (
    *("ffn_gate_inp", "shortconv.conv", "position_embd", "attn_sinks", "exp_probs_b", ".bias"),
    *("ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm"),
)
"""Parts of names of tensors that are kept in float32."""

_HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Offsets of a block's scale, and of the scale of its minima, in float16."""

_MIDDLES = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""Scales of minima for which values are around 0."""

Kinds = Callable[[str], str]
"""The type of a matrix, by its name in the file."""


def write_gguf(
    plain: Path,
    out: Path,
    kinds: str | Kinds = "Q8_0",
    twin: Path | None = None,
    seed: int = 0,
    arch: str | None = None,
) -> Path:
    """Write the checkpoint in the folder ``plain`` as a GGUF file in the folder ``out``.

    Beside it is the config.json that its keys make. ``twin`` gets a checkpoint in float32 of what
    the file's tensors stand for. ``arch`` names another architecture with the same tensors.
    """
    raw = json.loads((plain / "config.json").read_text())
    tensors = {name: each.float().numpy() for name, each in _load(plain).items()}
    out.mkdir(parents=True, exist_ok=True)
    file = out / "model.gguf"
    kind = (lambda name: kinds) if isinstance(kinds, str) else kinds
    arch = arch or gguf_late_families.WRITTEN_AS.get(raw["model_type"])
    arch = arch or gguf.MODEL_ARCH_NAMES[ARCHITECTURES[raw["model_type"]]]
    writer = gguf.GGUFWriter(file, arch)
    if raw["model_type"] in gguf_late_families.ARCHITECTURES:
        gguf_late_families.add_keys(writer, raw)
    else:
        _add_keys(writer, raw, tensors)
    rng = np.random.default_rng(seed)
    stands_for: dict[str, np.ndarray] = {}
    for name, parts in _renamed(raw, tensors).items():
        chosen = "F32" if any(each in name for each in _PLAIN) else kind(name)
        stored, values = [], []
        for part in parts:
            numbers = part.apply(tensors[part.name])
            elements, _ = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[chosen]]
            fits = numbers.ndim > 1 and numbers.shape[-1] % elements == 0
            given = chosen if fits else "F32"
            data, meant = quantized(numbers, given, rng)
            stored.append(data)
            values.append(meant)
            put(stands_for, part, meant, tensors[part.name].shape)
        whole = np.stack(stored) if len(parts) > 1 or parts[0].stacked else stored[0]
        plain_type = given in ("F32", "F16")
        writer.add_tensor(
            name, whole, raw_dtype=None if plain_type else GGMLQuantizationType[given]
        )
    factors = gguf_late_families.rope_tensors(raw) or _rope_tensors(raw, plain)
    for name, numbers in factors.items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (out / "config.json").write_text(json.dumps(model_config(read_gguf(file))))
    if twin is not None:
        twin.mkdir(parents=True)
        for each in plain.iterdir():
            if each.suffix != ".safetensors":
                shutil.copy(each, twin / each.name)
        save_file(
            {name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in stands_for.items()},
            twin / "model.safetensors",
            metadata={"format": "pt"},
        )
    return out


def quantized(
    numbers: np.ndarray, kind: str, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A matrix as a type's bytes, and what they stand for in float32."""
    if kind == "F32":
        return numbers.astype(np.float32), numbers.astype(np.float32)
    if kind == "F16":
        half = numbers.astype(np.float16)
        return half, half.astype(np.float32)
    number = GGMLQuantizationType[kind]
    data = random_blocks(numbers, kind, rng) if kind in _HALVES else gguf.quantize(numbers, number)
    return data, gguf.dequantize(data, number)


def random_blocks(numbers: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    """Random blocks of a matrix of the same shape and about the same deviation."""
    number = GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[number]
    rows, columns = numbers.shape
    blocks = rng.integers(0, 256, (rows, columns // elements, size), dtype=np.uint8)

    def put(offset: int, values: np.ndarray) -> None:
        halves = np.ascontiguousarray(values.astype(np.float16)[..., None]).view(np.uint8)
        blocks[..., offset : offset + 2] = halves

    ones = np.ones(blocks.shape[:2])
    for offset, factor in zip(_HALVES[kind], (1.0, _MIDDLES.get(kind, 0.0)), strict=False):
        put(offset, ones * factor)
    scale = numbers.std() / gguf.dequantize(blocks.reshape(rows, -1), number).std()
    for offset, factor in zip(_HALVES[kind], (1.0, _MIDDLES.get(kind, 0.0)), strict=False):
        put(offset, scale * factor * rng.uniform(0.8, 1.2, blocks.shape[:2]))
    return blocks.reshape(rows, -1)


def _load(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def _in_numerical_order(name: str) -> list[tuple[int, str]]:
    """Sorts experts by number, as they are stacked."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _renamed(raw: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, list[Part]]:
    """The file's tensors, with the parts that each is stacked of."""
    kind = raw["model_type"]
    count = gguf_late_families.num_layers(raw)
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], count)
    found: dict[str, list[Part]] = {}
    for name in sorted(tensors, key=_in_numerical_order):
        tensor = tensors[name]
        own = gguf_late_families.parts_of(raw, name, tensor)
        own = own or gguf_transformers_families.parts_of(raw, name, tensor)
        for theirs, part in own or _parts(raw, name, tensor):
            known = theirs.startswith("blk.")
            new = theirs if known else names.get_name(theirs, try_suffixes=(".weight", ".bias"))
            assert new is not None, (name, theirs)
            found.setdefault(new, []).append(part)
    return found


def _parts(raw: Mapping[str, Any], name: str, tensor: np.ndarray) -> list[tuple[str, Part]]:
    """What becomes of a tensor: names as the package knows them, and parts."""
    kind = raw["model_type"]
    if kind == "gpt_oss" and ".experts." in name:
        return _parts_of_gpt_oss(name, tensor)
    if kind == "llama4_text" and ".experts." in name:
        return _parts_of_llama4(name, tensor)
    if kind in ("granitemoe", "granitemoehybrid", "bamba") and (
        "_linear" in name or ".mamba." in name
    ):
        return _parts_of_granite(raw, name, tensor)
    if ".experts." in name:
        before, _, rest = name.partition(".experts.")
        _, _, module = rest.partition(".")
        stack = f"{before}.experts.{module}"
        if kind in ("mixtral", "lfm2_moe", "minimax_m2"):
            stack = stack.replace("model.layers", "layers")
            stack = stack.replace("block_sparse_moe", "feed_forward")
        return [(stack, Part(name, stacked=True))]
    if name.endswith("sinks"):
        return [(f"{name}.weight", Part(name))]
    if name.endswith("expert_bias"):
        return [(f"{name}.bias", Part(name))]
    order = None
    if kind in _PERMUTED and ("q_proj" in name or "k_proj" in name):
        heads = raw["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        places = np.arange(len(tensor)).reshape(heads, 2, -1)
        order = places.swapaxes(1, 2).reshape(-1)
    elif kind == "gpt_neox" and "query_key_value" in name:
        places = np.arange(len(tensor)).reshape(raw["num_attention_heads"], 3, -1)
        order = places.swapaxes(0, 1).reshape(-1)
    elif kind == "falcon" and "query_key_value" in name:
        heads = raw["num_attention_heads"]
        groups = raw["num_kv_heads"] if raw["new_decoder_architecture"] else 1
        places = np.arange(len(tensor)).reshape(groups, heads // groups + 2, -1)
        parts = places[:, :-2], places[:, -2], places[:, -1]
        order = np.concatenate([each.reshape(-1) for each in parts])
    transposed = kind == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    shift = 1.0 if kind in _GEMMAS and name.endswith("norm.weight") else 0.0
    if kind == "qwen3_next" and ".linear_attn." in name:
        return _parts_of_qwen3_next(raw, name, tensor)
    if ".linear_attn." in name:
        return [_part_of_linear_attention(raw, name, tensor)]
    return [(name, Part(name, order, transposed, shift))]


def _part_of_linear_attention(
    raw: Mapping[str, Any], name: str, tensor: np.ndarray
) -> tuple[str, Part]:
    """Value heads in turns of their key heads: those of a key head are together before."""
    keys, values = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    before = 2 * keys * raw["linear_key_head_dim"]

    def in_turns(places: np.ndarray) -> np.ndarray:
        return places.reshape(keys, values // keys, -1).swapaxes(0, 1).reshape(-1)

    module = name.partition(".linear_attn.")[2]
    if module == "norm.weight":
        return name, Part(name)
    if module == "out_proj.weight":
        return name, Part(name, columns=in_turns(np.arange(tensor.shape[1])))
    places = np.arange(len(tensor))
    if module in ("in_proj_qkv.weight", "conv1d.weight"):
        return name, Part(name, np.concatenate([places[:before], in_turns(places[before:])]))
    if module == "A_log":
        return name, Part(name, in_turns(places), logarithm=True)
    theirs = name.replace("dt_bias", "dt_proj.bias")
    return theirs, Part(name, in_turns(places))


def _parts_of_gpt_oss(name: str, tensor: np.ndarray) -> list[tuple[str, Part]]:
    """Experts of one tensor, gates and ups in turns, weights as [in, out]."""
    bias = name.endswith("_bias")
    base = name.removesuffix("_bias")
    suffix = ".bias" if bias else ".weight"
    halves = {base: slice(None)}
    if "gate_up" in base:
        halves = {
            base.replace("gate_up", "gate"): slice(0, None, 2),
            base.replace("gate_up", "up"): slice(1, None, 2),
        }
    found = []
    for new, rows in halves.items():
        for expert in range(len(tensor)):
            pick = (expert, rows) if bias else (expert, slice(None), rows)
            part = Part(name, transposed=not bias, stacked=True, pick=pick)
            found.append((new + suffix, part))
    return found


def _parts_of_qwen3_next(
    raw: Mapping[str, Any], name: str, tensor: np.ndarray
) -> list[tuple[str, Part]]:
    """Queries, keys and values of all heads in one tensor, gates in another."""
    module = name.partition(".linear_attn.")[2]
    if module == "A_log":
        return [(name, Part(name, logarithm=True))]
    if module != "in_proj_qkvz.weight":
        return [(name.replace("dt_bias", "dt_proj.bias"), Part(name))]
    keys, values = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    wide = values // keys * raw["linear_value_head_dim"]
    places = np.arange(len(tensor)).reshape(keys, -1)
    sizes = (raw["linear_key_head_dim"], raw["linear_key_head_dim"], wide, wide)
    *mixed, gates = np.split(places, np.cumsum(sizes)[:-1], axis=1)
    together = np.concatenate([part.reshape(-1) for part in mixed])
    return [
        (name.replace("qkvz", "qkv"), Part(name, pick=together)),
        (name.replace("qkvz", "z"), Part(name, pick=gates.reshape(-1))),
    ]


def _parts_of_llama4(name: str, tensor: np.ndarray) -> list[tuple[str, Part]]:
    """Experts of one tensor, gates before ups, weights as [in, out]."""
    half = tensor.shape[2] // 2
    halves = {name: slice(None)}
    if "gate_up" in name:
        halves = {
            name.replace("gate_up", "gate"): slice(0, half),
            name.replace("gate_up", "up"): slice(half, None),
        }
    return [
        (f"{new}.weight", Part(name, transposed=True, stacked=True, pick=(e, slice(None), rows)))
        for new, rows in halves.items()
        for e in range(len(tensor))
    ]


def _parts_of_granite(
    raw: Mapping[str, Any], name: str, tensor: np.ndarray
) -> list[tuple[str, Part]]:
    """Gates apart from ups, of experts and of what they share; vectors as matrices."""
    layer, _, module = name.partition(".mamba.")
    if module:
        theirs = name.replace("dt_bias", "dt_proj.bias")
        columns = {"A_log": 1, "D": 1, "norm.weight": len(tensor) // raw["mamba_n_groups"]}
        return [(theirs, Part(name, logarithm=module == "A_log", width=columns.get(module, 0)))]
    layer = name.partition(".block_sparse_moe.")[0].partition(".shared_mlp.")[0]
    shared = "shared_mlp" in name
    module = "mlp.experts" if not shared else "mlp.shared_expert"
    module = module if raw["num_local_experts"] else "mlp"
    parts = {"down_proj": slice(None)}
    if "input_linear" in name:
        half = tensor.shape[-2] // 2
        parts = {"gate_proj": slice(0, half), "up_proj": slice(half, None)}
    if shared:
        return [(f"{layer}.{module}.{x}.weight", Part(name, pick=r)) for x, r in parts.items()]
    return [
        (f"{layer}.{module}.{x}.weight", Part(name, stacked=True, pick=(e, rows)))
        for x, rows in parts.items()
        for e in range(len(tensor))
    ]


def _rope_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    rope = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
    return rope.get("full_attention", rope)


def _rope_tensors(raw: Mapping[str, Any], plain: Path) -> dict[str, np.ndarray]:
    """Factors of frequencies, which files have as tensors."""
    from transformers import AutoConfig

    rope = _rope_of(raw)
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "llama3":
        config = AutoConfig.from_pretrained(plain)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        dims = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        plainly = 1.0 / rope["rope_theta"] ** (torch.arange(0, dims, 2) / dims)
        return {"rope_freqs.weight": (plainly / scaled).numpy()}
    if kind == "longrope":
        return {
            f"rope_factors_{length}.weight": np.array(rope[f"{length}_factor"], np.float32)
            for length in ("long", "short")
        }
    return {}


def _add_keys(
    writer: gguf.GGUFWriter, raw: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> None:
    def first(*names: str) -> Any:
        return next((raw[name] for name in names if raw.get(name) is not None), None)

    kind = raw["model_type"]
    hidden = first("hidden_size", "n_embd")
    heads = first("num_attention_heads", "n_head")
    layers = first("num_hidden_layers", "n_layer")
    writer.add_block_count(layers)
    writer.add_embedding_length(hidden)
    writer.add_head_count(heads)
    width = first("ffn_hidden_size", "intermediate_size", "n_inner") or 4 * hidden
    if kind == "llama4_text":
        width = raw["intermediate_size_mlp"]
        writer.add_expert_feed_forward_length(raw["intermediate_size"])
        writer.add_interleave_moe_layer_step(raw["interleave_moe_layer_step"])
    elif kind == "granitemoehybrid" and not raw["num_local_experts"]:
        width = raw["shared_intermediate_size"]
    for name, tensor in tensors.items():
        if name.endswith("feed_forward.w1.weight"):  # LFM 2's is not as config.json has it
            width = len(tensor)
    writer.add_feed_forward_length(width)
    context = first("max_position_embeddings", "n_positions") or 2048
    writer.add_context_length(context)
    kv_heads = first("num_key_value_heads") or heads
    if kind == "gpt_bigcode":
        kv_heads = 1
    elif kind == "falcon":
        kv_heads = raw["num_kv_heads"] if raw["new_decoder_architecture"] else 1
    types = raw.get("layer_types") or []
    if kind == "bamba":
        types = ["mamba"] * layers
        for layer in raw["attn_layer_indices"]:
            types[layer] = "attention"
    if kind in ("granitemoehybrid", "bamba"):
        writer.add_ssm_conv_kernel(raw["mamba_d_conv"])
        writer.add_ssm_state_size(raw["mamba_d_state"])
        writer.add_ssm_group_count(raw["mamba_n_groups"])
        writer.add_ssm_time_step_rank(raw["mamba_n_heads"])
        writer.add_ssm_inner_size(raw["mamba_n_heads"] * raw["mamba_d_head"])
        writer.add_rope_scaling_finetuned(raw.get("position_embedding_type", "rope") == "rope")
        kv_heads = [kv_heads if each in ("attention", "full_attention") else 0 for each in types]
        if raw.get("num_local_experts"):
            writer.add_expert_shared_feed_forward_length(raw["shared_intermediate_size"])
    if kind.startswith(("qwen3_5", "qwen3_next")):
        writer.add_ssm_conv_kernel(raw["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(raw["linear_key_head_dim"])
        writer.add_ssm_group_count(raw["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(raw["linear_num_value_heads"])
        inner = raw["linear_value_head_dim"] * raw["linear_num_value_heads"]
        writer.add_ssm_inner_size(inner)
        writer.add_array(
            f"{writer.arch}.attention.recurrent_layers", [e == "linear_attention" for e in types]
        )
    if kind in ("lfm2", "lfm2_moe"):
        writer.add_head_count_kv([kv_heads if each != "conv" else 0 for each in types])
        writer.add_shortconv_l_cache(raw["conv_L_cache"])
    else:
        writer.add_head_count_kv(kv_heads)
    if (eps := first("rms_norm_eps", "norm_eps")) is not None:
        writer.add_layer_norm_rms_eps(eps)
    if (eps := first("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")) is not None:
        writer.add_layer_norm_eps(eps)
    if head_dim := raw.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    head_dim = head_dim or hidden // heads
    rope = _rope_of(raw)
    if (theta := rope.get("rope_theta", raw.get("rope_theta"))) is not None:
        writer.add_rope_freq_base(theta)
    local = (raw.get("rope_parameters") or {}).get("sliding_attention", {}).get("rope_theta")
    if local is not None:
        writer.add_key_value("gemma3.rope.freq_base_swa", local, gguf.GGUFValueType.FLOAT32)
    partial = rope.get("partial_rotary_factor", raw.get("rotary_pct", 1.0))
    partial = 0.5 if kind == "bamba" else partial
    writer.add_rope_dimension_count(int(head_dim * partial))
    if rope.get("rope_type") in ("linear", "yarn"):
        scaling = gguf.RopeScalingType
        linear = rope["rope_type"] == "linear"
        writer.add_rope_scaling_type(scaling.LINEAR if linear else scaling.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
    if original := rope.get(
        "original_max_position_embeddings", raw.get("original_max_position_embeddings")
    ):
        writer.add_rope_scaling_orig_ctx_len(original)
    for key, add in (
        ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
        ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
    ):
        if rope.get(key) is not None and rope.get("rope_type") == "yarn":
            add(rope[key])
    if window := raw.get("sliding_window"):
        writer.add_sliding_window(window)
    if kind in ("gemma3_text", "olmo3"):
        writer.add_sliding_window_pattern([each == "sliding_attention" for each in types])
    counts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if experts := first(*counts):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(first("num_experts_per_tok", "moe_k"))
        if (size := raw.get("moe_intermediate_size")) is not None:
            writer.add_expert_feed_forward_length(size)
        if (size := raw.get("shared_expert_intermediate_size")) is not None:
            writer.add_expert_shared_feed_forward_length(size)
        if kind == "lfm2_moe":
            writer.add_leading_dense_block_count(raw["num_dense_layers"])
    for key, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("use_parallel_residual", writer.add_parallel_residual),
    ):
        if raw.get(key) is not None:
            add(raw[key])
    if kind in gguf_transformers_families.ARCHITECTURES:
        gguf_transformers_families.add_keys(writer, raw)
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)

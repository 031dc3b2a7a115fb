"""MTP layers; transformers' model of one layer is the oracle of their decoder layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.parity.cases import DEEPSEEK, SMALL
from tests.tools.draft_heads import Weights, save
from tests.tools.paged_run import CPU, random_ids
from tests.unit.models.speculators.plain import PlainMTP
from tests.unit.models.speculators.steps import Entry, Steps, Target, states_of
from tgi_cli.errors import CheckpointError, UnsupportedModelError
from tgi_cli.models import read_config
from tgi_cli.models.speculators.base import Proposer
from tgi_cli.models.speculators.detect import own_layers
from tgi_cli.models.speculators.load import ProposerOptions, load_proposer

GLM: dict[str, Any] = {key: value for key, value in SMALL.items() if key != "pad_token_id"} | {
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5
    },
}  # fmt: skip
DEEPSEEK_NAMES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
MIMO_NAMES = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")


def hf_layer(model: Any, output_norm: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """transformers' decoder layer, as :class:`PlainMTP` takes it."""
    norm = model.model.norm
    norm.weight.data.copy_(output_norm)

    def block(x: Tensor) -> tuple[Tensor, Tensor]:
        before: list[Tensor] = []
        hook = norm.register_forward_pre_hook(lambda _, given: before.append(given[0][0]))
        output = model.model(inputs_embeds=x[None], use_cache=False)
        hook.remove()
        final: Tensor = output.last_hidden_state[0]
        return final, before[0]

    return block


def one_layer(kind: str, values: dict[str, Any]) -> Any:
    """transformers' model with a single layer."""
    torch.manual_seed(3)
    config = getattr(transformers, kind)(**values)
    kinds: Any = transformers.AutoModelForCausalLM
    model = kinds.from_config(config, attn_implementation="eager")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("bias", "layernorm.weight", "norm.weight")):
            tensor.data.add_(torch.randn(tensor.shape) * 0.2)
        elif tensor.ndim > 1:
            tensor.data.normal_(0.0, tensor.shape[-1] ** -0.5)
    return model.eval()


def make(
    path: Path,
    kind: str,
    values: dict[str, Any],
    alone: dict[str, Any],
    names: tuple[str, str, str, str],
    layer: str,
    **stated: Any,
) -> tuple[Path, Any]:
    """Write what a target's checkpoint has of its MTP layer; returns transformers' layer."""
    model = one_layer(kind, values | alone)
    model.save_pretrained(path)
    stored = load_file(path / "model.safetensors")
    weights = Weights(1)
    for name in (names[0], names[1], names[3]):
        weights.vector(f"{layer}.{name}.weight", 64)
    weights.matrix(f"{layer}.{names[2]}.weight", 64, 128)
    tensors = weights.tensors | {
        name.replace("model.layers.0", layer): tensor
        for name, tensor in stored.items()
        if name.startswith("model.layers.0.")
    }
    config = json.loads((path / "config.json").read_text()) | values | stated
    for key in ("layer_types", "mlp_layer_types"):  # of one layer
        config.pop(key, None)
    # As in a target's checkpoint: the tables are there, and further tensors.
    tensors["model.embed_tokens.weight"] = torch.zeros(256, 64)
    return save(path, config, tensors, "model.safetensors"), model


def load(path: Path, context: int = 128) -> tuple[Proposer, Target]:
    target = Target(64)
    speculator = own_layers(read_config(path))
    assert speculator.method == "mtp"
    options = ProposerOptions(torch.float32, CPU, 3, context, 4, 3, 64, 256)
    return load_proposer(speculator, target, options), target


def check(path: Path, model: Any, names: tuple[str, str, str, str], layer: str, mimo: bool) -> None:
    proposer, target = load(path)
    tensors = {
        name.removeprefix(f"{layer}."): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    block = hf_layer(model, tensors[f"{names[3]}.weight"])
    tables, eps = (target.table, target.head), model.config.rms_norm_eps
    plain = PlainMTP(tensors, eps, names[:3], tables, block, mimo)
    assert proposer.needs == "final"
    steps, tokens = Steps(proposer, 64, 4), random_ids(60, 1)
    steps.add(0, tokens)
    steps.add(1, random_ids(60, 2))
    for entries in (
        (Entry(0, 9), Entry(1, 3)),
        (Entry(1, 4, 2), Entry(0, 3)),
        (Entry(0), Entry(1)),
    ):
        with torch.no_grad():
            for row, (ids, chances) in steps.step(*entries).items():
                text = steps.text(row)
                expected = plain.drafts(states_of(text[:-1], 64), text, 3)
                assert ids == expected[0]
                assert chances == pytest.approx(expected[1], rel=1e-3)


def deepseek(path: Path, **stated: Any) -> tuple[Path, Any]:
    values = {key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"}
    alone = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    return make(
        path,
        "DeepseekV3Config",
        values | {"num_hidden_layers": 3},
        alone,
        DEEPSEEK_NAMES,
        "model.layers.3",
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
        **stated,
    )


def test_deepseek_v3(tmp_path: Path) -> None:
    _, model = deepseek(tmp_path)
    check(tmp_path, model, DEEPSEEK_NAMES, "model.layers.3", mimo=False)


def test_glm_4_5(tmp_path: Path) -> None:
    alone = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    _, model = make(
        tmp_path,
        "Glm4MoeConfig",
        GLM | {"num_hidden_layers": 3},
        alone,
        DEEPSEEK_NAMES,
        "model.layers.3",
        first_k_dense_replace=1,
    )
    check(tmp_path, model, DEEPSEEK_NAMES, "model.layers.3", mimo=False)


def test_mimo(tmp_path: Path) -> None:
    values = SMALL | {"num_hidden_layers": 3}
    alone = {"num_hidden_layers": 1, "use_sliding_window": False}
    named = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    _, model = make(
        tmp_path, "Qwen2Config", values, alone, MIMO_NAMES, "model.mtp_layers.0", **named
    )
    check(tmp_path, model, MIMO_NAMES, "model.mtp_layers.0", mimo=True)


def test_copies_of_the_target_s_tables_are_not_read(tmp_path: Path) -> None:
    deepseek(tmp_path)
    before = load(tmp_path)[0].weight_bytes
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"model.layers.3.{name}.weight"] = torch.zeros(256, 64)
    save(tmp_path, json.loads((tmp_path / "config.json").read_text()), tensors, file.name)
    assert load(tmp_path)[0].weight_bytes == before


def test_a_layer_that_lacks_a_tensor(tmp_path: Path) -> None:
    deepseek(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.3.hnorm.weight"]
    save(tmp_path, json.loads((tmp_path / "config.json").read_text()), tensors, file.name)
    with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.3\.hnorm\.weight"):
        load(tmp_path)


def test_a_checkpoint_whose_layers_were_left_out(tmp_path: Path) -> None:
    """Quantized copies often lack them, though config.json states them."""
    deepseek(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if not n.startswith("model.layers.3.")}
    save(tmp_path, json.loads((tmp_path / "config.json").read_text()), tensors, file.name)
    with pytest.raises(UnsupportedModelError, match="they are not among its tensors"):
        own_layers(read_config(tmp_path))


def test_chosen_tokens_are_not_attended_to(tmp_path: Path) -> None:
    """V3.2's layers attend to a part of long texts, which is not done for drafts."""
    named = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
    deepseek(tmp_path, **named, index_topk=64, index_head_dim=32, index_n_heads=4)
    assert load(tmp_path, 64)[0].num_drafts == 3
    with pytest.raises(UnsupportedModelError, match="64 chosen tokens of 128"):
        load(tmp_path, 128)


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("Qwen3NextForCausalLM", "recurrent states, which cannot be taken back"),
        ("LlamaForCausalLM", "has none that are served"),
    ],
)
def test_architectures_without(tmp_path: Path, architecture: str, why: str) -> None:
    save(tmp_path, {"architectures": [architecture]}, {}, "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=why):
        own_layers(read_config(tmp_path))

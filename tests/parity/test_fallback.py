"""Models without a definition here compute and say what transformers alone does with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.cases import DEEPSEEK, LATENT, LONGROPE, SMALL, WINDOW, Case
from tests.parity.families import TOLERANCE, Oracle, check, make_checkpoint, random_ids
from tests.tools.paged_run import PagedRun, load
from tests.tools.thread_shards import on_shards, sharded_logits
from tgi_cli.device.distributed import Shard
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.models import load_model, read_config
from tgi_cli.models.hf.model import TransformersForCausalLM

MOE = SMALL | {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
GLM_MOE = MOE | {"n_routed_experts": 6, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}

CASES: dict[str, Case] = {
    # A parallel block, layer norms without mean, interleaved rotation, scaled logits.
    "Cohere": Case("CohereConfig", SMALL | {"logit_scale": 1.0}),
    # Windows in three layers of four; the fourth has no positions.
    "Cohere 2": Case(
        "Cohere2Config",
        SMALL | {"num_hidden_layers": 4, "sliding_window": WINDOW, "logit_scale": 1.0},
    ),
    # A part of each head is rotated; every projection and the head have biases.
    "Phi": Case("PhiConfig", SMALL | {"num_key_value_heads": 4}),
    "StableLM": Case("StableLmConfig", SMALL | {"use_qkv_bias": True, "qk_layernorm": True}),
    # Norms without weights, queries and keys cut off.
    "OLMo": Case("OlmoConfig", SMALL | {"clip_qkv": 1.5}),
    # A checkpoint of merged gate and up, sandwich norms.
    "GLM 4": Case("Glm4Config", SMALL | {"head_dim": 16}),
    "ERNIE 4.5": Case("Ernie4_5Config", SMALL | {"head_dim": 16, "use_bias": True}),
    "Exaone 4": Case(
        "Exaone4Config",
        SMALL | {"num_hidden_layers": 4, "sliding_window": WINDOW, "sliding_window_pattern": 4},
    ),
    # Learned positions, a decoder within the model.
    "OPT": Case(
        "OPTConfig", SMALL | {"ffn_dim": 96, "word_embed_proj_dim": 64}, embedding_std=0.03
    ),
    # Experts stored one by one, a router with a correction that is a buffer, a shared expert.
    "GLM 4.5 MoE": Case("Glm4MoeConfig", GLM_MOE | {"first_k_dense_replace": 1, "head_dim": 16}),
    "OLMoE": Case("OlmoeConfig", MOE | {"num_experts": 6}),
    "Arcee, long factors": Case(
        "ArceeConfig",
        SMALL
        | {"head_dim": 12, "rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
        shortest=17,
    ),
    "Arcee, short factors": Case(
        "ArceeConfig",
        SMALL
        | {"head_dim": 12, "rope_parameters": LONGROPE, "original_max_position_embeddings": 200},
    ),
    # Latent attention, whose latents are cached as they are.
    "MiniCPM 3": Case(
        "MiniCPM3Config", LATENT | {"dim_model_base": 48, "tie_word_embeddings": False}
    ),
    # Two attentions a layer, experts that return their input.
    "LongCat Flash": Case(
        "LongcatFlashConfig",
        {key: v for key, v in LATENT.items() if key not in ("intermediate_size",)}
        | {"num_hidden_layers": 4, "n_routed_experts": 6, "zero_expert_num": 2, "moe_topk": 3}
        | {"expert_ffn_hidden_size": 48, "ffn_hidden_size": 96}
        | {"head_dim": LATENT["qk_rope_head_dim"]},
    ),
    # An indexer, which chooses a part of most texts; two layers share its choice.
    "GLM 5": Case(
        "GlmMoeDsaConfig",
        DEEPSEEK
        | {"index_topk": 24, "index_head_dim": 16, "index_n_heads": 16}
        | {"indexer_types": ["full", "full", "shared", "shared"]},
    ),
    "Helium, dynamic": Case(
        "HeliumConfig",
        SMALL
        | {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
}

PLANLESS = ("StableLM", "OPT")
"""Those that transformers says nothing of how to share out."""


@pytest.mark.tgi_pain(1)
@pytest.mark.parametrize("name", [name for name in CASES if name not in PLANLESS])
def test_parity_with_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    result = check(case, make_checkpoint(case, tmp_path / "model"))
    assert result.max_logit_difference < TOLERANCE
    assert result.sharded_logit_difference is not None
    assert result.sharded_logit_difference < TOLERANCE
    assert 0.5 < result.logit_std < 5, "the tolerance is to mean something"
    assert result.identical == result.compared
    assert result.identical_samples == result.samples
    assert result.sharded_run
    assert result.preemptions > 0, "the pool is to be too small"
    assert result.reused > 0, "a second turn begins as the first ended"
    assert result.distinct > result.compared / 8, "a model that repeats itself shows little"


@pytest.mark.parametrize("name", PLANLESS)
def test_parity_on_one_shard_alone(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = make_checkpoint(case, tmp_path / "model")
    oracle, run = Oracle(path, case), PagedRun(load(path), torch.float32, None)
    texts = {str(seed): random_ids(120 - 30 * seed, seed) for seed in range(3)}
    got = [
        run.step({name: ids[start : start + 25] for name, ids in texts.items() if start < len(ids)})
        for start in range(0, 120, 25)
    ]
    for name, ids in texts.items():
        logits = torch.cat([step[name] for step in got if name in step])
        torch.testing.assert_close(logits, oracle.logits(ids), atol=TOLERANCE, rtol=0)
        last, tokens = int(logits[-1].argmax()), []
        for _ in range(20):
            tokens.append(last)
            last = int(run.step({name: [last]})[name].argmax())
        assert tokens == oracle.greedy(ids, tokens)
    with pytest.raises(UnsupportedModelError, match="no plan of tensor parallelism"):
        load_model(read_config(path), torch.float32, torch.device("cpu"), shard=Shard(0, 2))


def test_more_shards_than_key_value_heads(tmp_path: Path) -> None:
    case = CASES["ERNIE 4.5"]
    path = make_checkpoint(case, tmp_path / "model")
    ids = random_ids(50, seed=3)
    wanted = Oracle(path, case).logits(ids)
    for logits in sharded_logits(path, 4, [ids]):
        torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)


def test_a_shard_holds_its_share(tmp_path: Path) -> None:
    path = make_checkpoint(CASES["GLM 4.5 MoE"], tmp_path / "model")
    whole = load(path)

    def sizes(shard: Shard) -> tuple[int, int]:
        model = load_model(read_config(path), torch.float32, torch.device("cpu"), shard=shard)
        return model.weight_bytes, model.kv_specs[0].num_kv_heads

    for weight_bytes, kv_heads in on_shards(2, sizes):
        assert weight_bytes < 0.56 * whole.weight_bytes
        assert kv_heads == 1


@pytest.mark.parametrize("name", ["Cohere", "OLMoE", "GLM 4.5 MoE"])
def test_bfloat16_is_as_near_as_transformers_is_to_itself(name: str, tmp_path: Path) -> None:
    case, ids = CASES[name], random_ids(40, seed=4)
    path = make_checkpoint(case, tmp_path / "model")
    oracle = Oracle(path, case)
    exact = oracle.logits(ids)
    oracle.model.to(torch.bfloat16)
    rounded = oracle.logits(ids).float()
    model = load(path, torch.bfloat16)
    assert isinstance(model, TransformersForCausalLM)
    ours = PagedRun(model, torch.bfloat16, None).step({"a": ids})["a"]
    assert (ours - exact).abs().mean() < 1.3 * (rounded - exact).abs().mean()

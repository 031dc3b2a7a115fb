"""Experts are chosen as the models' own code chooses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mistral4.modeling_mistral4 import Mistral4TopkRouter

from tgi_cli.layers.routing import Routing, route

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}


def test_route_takes_the_best() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0], [0.0, 0.0, -5.0, 9.0]])
    weights, chosen = route(logits, Routing(2, normalize=False))
    assert chosen[0].tolist() == [1, 2]
    assert chosen[1, 0] == 3
    torch.testing.assert_close(weights, logits.softmax(-1).gather(1, chosen))
    for routing in (Routing(2), Routing(2, "topk_softmax", normalize=False)):
        weights, chosen = route(logits, routing)
        torch.testing.assert_close(weights, logits.gather(1, chosen).softmax(-1))
    assert route(logits.bfloat16(), Routing(2))[0].dtype == torch.float32


def by_expert(weights: Tensor, chosen: Tensor) -> Tensor:
    """[T, E]: the weight of every expert."""
    return torch.zeros(len(weights), SIZES["n_routed_experts"]).scatter_(1, chosen, weights)


@pytest.mark.parametrize("normalize", [False, True])
def test_deepseek_v3_chooses_by_corrected_sigmoids_of_the_best_groups(normalize: bool) -> None:
    config = transformers.DeepseekV3Config(**SIZES, norm_topk_prob=normalize)
    theirs = DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(theirs.weight)
    theirs.e_score_correction_bias.normal_()
    hidden = torch.randn(200, 16)
    logits, weights, chosen = theirs(hidden)
    routing = Routing(3, "sigmoid_topk", normalize, 4, 2, best_of_group=2, scaling=2.5)
    ours = route(logits, routing, theirs.e_score_correction_bias)
    torch.testing.assert_close(by_expert(*ours), by_expert(weights, chosen))
    uncorrected = by_expert(*route(logits, routing)) != 0
    assert not torch.equal(uncorrected, by_expert(weights, chosen) != 0), "it is to matter"


def test_deepseek_v2_chooses_of_the_groups_with_the_best_experts() -> None:
    config = transformers.DeepseekV2Config(**SIZES, topk_method="group_limited_greedy")
    theirs = DeepseekV2TopkRouter(config)
    torch.nn.init.normal_(theirs.weight)
    logits, weights, chosen = theirs(torch.randn(200, 16))
    ours = route(logits, Routing(3, "softmax_topk", False, 4, 2, scaling=2.5))
    torch.testing.assert_close(by_expert(*ours), by_expert(weights, chosen))


def test_mistral_4_chooses_of_the_groups_with_the_best_pairs() -> None:
    config = transformers.Mistral4Config(**SIZES, norm_topk_prob=True)
    theirs = Mistral4TopkRouter(config)
    torch.nn.init.normal_(theirs.weight)
    logits, weights, chosen = theirs(torch.randn(200, 16))
    ours = route(logits, Routing(3, "softmax_topk", True, 4, 2, best_of_group=2, scaling=2.5))
    torch.testing.assert_close(by_expert(*ours), by_expert(weights, chosen))


def test_a_tokens_weights_do_not_depend_on_the_tokens_beside_it() -> None:
    logits, correction = torch.randn(67, 12), torch.randn(12)
    routing = Routing(3, "sigmoid_topk", True, 4, 2, best_of_group=2, scaling=2.5)
    together, chosen = route(logits, routing, correction)
    for at in range(len(logits)):
        alone = route(logits[at : at + 1], routing, correction)
        assert torch.equal(alone[0][0], together[at])
        assert torch.equal(alone[1][0], chosen[at])

"""A model on several shards computes what it computes on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.checkpoints import make_llama
from tests.tools.paged_run import expected, load, random_ids
from tests.tools.thread_shards import on_shards, sharded_logits
from tgi_cli.device.distributed import Shard
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.layers import Build, LMHead
from tgi_cli.models import load_model, read_config
from tgi_cli.models.decoder import DecoderForCausalLM
from tgi_cli.quantization import Unquantized

CONFIGS: dict[str, dict[str, Any]] = {
    "heads shared out": {"num_key_value_heads": 4},
    "one key-value head on all": {"num_key_value_heads": 1},
    "biases and an untied head": {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "a vocabulary that does not divide": {"vocab_size": 257},
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name: str, size: int, tmp_path: Path) -> None:
    path = make_llama(tmp_path, **CONFIGS[name])
    ids = random_ids(60, seed=2)
    pieces = [ids[:30], ids[30:58], ids[58:59], ids[59:]]
    wanted = expected(path, ids)
    shards = sharded_logits(path, size, pieces)
    for logits in shards:
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
        assert torch.equal(logits, shards[0]), "all shards see the same logits"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["biases and an untied head", "a vocabulary that does not divide"])
def test_parts_of_the_logits_are_the_logits(name: str, size: int, tmp_path: Path) -> None:
    """To the last bit, with a scale and a bound as some families have."""
    heads = {"num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 96}
    path = make_llama(tmp_path, **CONFIGS[name] | heads)
    torch.manual_seed(1)
    hidden = torch.randn(7, read_config(path).raw["hidden_size"])

    @torch.inference_mode()
    def work(shard: Shard) -> tuple[torch.Tensor, torch.Tensor, range | None]:
        model = load_model(read_config(path), torch.float32, torch.device("cpu"), shard=shard)
        assert isinstance(model, DecoderForCausalLM)
        model.spec = replace(model.spec, logit_scale=0.5, logit_softcap=3.0)
        return model.logits(hidden), model.own_logits(hidden), model.own_vocabulary

    (whole, *_), *_ = found = on_shards(size, work)
    assert torch.equal(torch.cat([own for _, own, _ in found], dim=1), whole)
    vocabulary = [token for _, _, own in found for token in own or ()]
    assert vocabulary == list(range(whole.shape[1]))


def test_a_vocabulary_that_leaves_a_shard_nothing_is_not_divided() -> None:
    def own(rank: int, vocab_size: int) -> range | None:
        build = Build(torch.float32, Unquantized(), Shard(rank, 4))
        return LMHead(build, 8, vocab_size, None).own_vocabulary

    assert own(0, 9) is None, "of three tokens each, the last shard would have none"
    assert own(3, 9) is None
    assert own(3, 10) == range(9, 10)


def test_a_shard_holds_its_share(tmp_path: Path) -> None:
    path = make_llama(tmp_path, num_key_value_heads=4, tie_word_embeddings=False)
    whole = load(path)

    def sizes(shard: Shard) -> tuple[int, int]:
        model = load_model(read_config(path), torch.float32, torch.device("cpu"), shard=shard)
        return model.weight_bytes, model.kv_specs[0].num_kv_heads

    norms = sum(p.numel() * 4 for name, p in whole.named_parameters() if "norm" in name)
    for weight_bytes, kv_heads in on_shards(4, sizes):
        assert weight_bytes - norms == (whole.weight_bytes - norms) // 4
        assert kv_heads == 1


@pytest.mark.parametrize(
    ("overrides", "size", "says"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16}, 2, "9 heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 16}, 4, "6 heads"),
        ({"intermediate_size": 161}, 2, "161 heads or columns"),
    ],
)
def test_models_that_cannot_be_split_are_refused(
    overrides: dict[str, Any], size: int, says: str, tmp_path: Path
) -> None:
    path = make_llama(tmp_path, **overrides)
    shard = Shard(0, size)
    with pytest.raises(UnsupportedModelError, match=says) as caught:
        load_model(read_config(path), torch.float32, torch.device("cpu"), shard=shard)
    assert "--num-shard" in caught.value.remedy


def test_dummy_weights_are_one_model_on_any_number_of_shards(tmp_path: Path) -> None:
    path = make_llama(tmp_path, num_key_value_heads=4)
    (path / "model.safetensors").unlink()

    def table(shard: Shard) -> torch.Tensor:
        model = load_model(
            read_config(path), torch.float32, torch.device("cpu"), shard=shard, load_format="dummy"
        )
        return model.get_parameter("model.embed_tokens.weight")

    (whole,), halves = on_shards(1, table), on_shards(2, table)
    assert torch.equal(torch.cat(halves), whole)
    assert whole.std() > 0

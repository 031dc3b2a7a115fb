"""Plain LoRA adapters merged into their base, and everything else refused by name."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from tests.tools.hub_server import HubServer
from tests.unit.hub.conftest import CONFIG
from tgi_cli.errors import CheckpointError, ModelError, UnsupportedModelError
from tgi_cli.hub.merge_lora import LoraAdapter, merge
from tgi_cli.hub.resolve import resolve_model

Q, V, HEAD = "model.layers.0.q_proj", "model.layers.1.v_proj", "lm_head"


def base_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {Q: (6, 4), V: (3, 4), HEAD: (8, 4), "model.embed_tokens": (8, 4)}
    return {f"{name}.weight": torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def pairs(rank: int = 2) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    found = {}
    for module, out in ((Q, 6), (V, 3)):
        found[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, 4)
        found[f"base_model.model.{module}.lora_B.weight"] = torch.randn(out, rank)
    return found


def product(module: str) -> torch.Tensor:
    prefix = f"base_model.model.{module}"
    return pairs()[f"{prefix}.lora_B.weight"] @ pairs()[f"{prefix}.lora_A.weight"]


def adapter_config(**options: Any) -> bytes:
    plain = {
        "peft_type": "LORA",
        "base_model_name_or_path": "org/base",
        "r": 2,
        "lora_alpha": 8,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "modules_to_save": None,
    }
    return json.dumps(plain | options).encode()


class Case:
    """A base and an adapter in folders, to be merged into a third."""

    def __init__(self, root: Path) -> None:
        self.base, self.adapter, self.target = (root / name for name in ("b", "a", "t"))
        for folder in (self.base, self.adapter, self.target):
            folder.mkdir()
        (self.base / "config.json").write_bytes(CONFIG)
        self.weights(base_tensors())

    def weights(self, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, self.base / "model.safetensors")

    def merge(
        self, extra: dict[str, torch.Tensor] | None = None, **options: Any
    ) -> dict[str, torch.Tensor]:
        (self.adapter / "adapter_config.json").write_bytes(adapter_config(**options))
        save_file(pairs() | (extra or {}), self.adapter / "adapter_model.safetensors")
        merge(self.adapter, self.base, self.target)
        return load_file(self.target / "model.safetensors")


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


@pytest.mark.parametrize(
    ("options", "scale_q", "scale_v"),
    [
        ({}, 4.0, 4.0),
        ({"use_rslora": True}, 8 / math.sqrt(2), 8 / math.sqrt(2)),
        ({"alpha_pattern": {"layers.1.v_proj": 2}}, 4.0, 1.0),
        ({"alpha_pattern": {"q_proj": 1}}, 0.5, 4.0),
        ({"rank_pattern": {"q_proj": 16}}, 0.5, 4.0),
    ],
)
def test_the_scaled_product_is_added(
    case: Case, options: dict[str, Any], scale_q: float, scale_v: float
) -> None:
    merged = case.merge(**options)
    base = base_tensors()
    torch.testing.assert_close(merged[f"{Q}.weight"], base[f"{Q}.weight"] + scale_q * product(Q))
    torch.testing.assert_close(merged[f"{V}.weight"], base[f"{V}.weight"] + scale_v * product(V))
    assert torch.equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])


def test_transposed_weights(case: Case) -> None:
    base = {name: tensor.T.contiguous() for name, tensor in base_tensors().items()}
    case.weights(base)
    merged = case.merge(fan_in_fan_out=True)
    torch.testing.assert_close(merged[f"{Q}.weight"], base[f"{Q}.weight"] + 4 * product(Q).T)


def test_the_sum_is_taken_in_fp32_and_the_dtype_stays(case: Case) -> None:
    base = base_tensors(torch.bfloat16)
    case.weights(base)
    merged = case.merge()[f"{Q}.weight"]
    assert torch.equal(merged, (base[f"{Q}.weight"].float() + 4 * product(Q)).bfloat16())


def test_a_base_whose_names_lack_the_prefix(case: Case) -> None:
    case.weights({name.removeprefix("model."): t for name, t in base_tensors().items()})
    merged = case.merge()
    expected = base_tensors()[f"{Q}.weight"] + 4 * product(Q)
    torch.testing.assert_close(merged["layers.0.q_proj.weight"], expected)


@pytest.mark.parametrize("key", ["lm_head.weight", "lm_head.modules_to_save.weight"])
def test_whole_modules_replace_those_of_the_base(case: Case, key: str) -> None:
    head = torch.full((8, 4), 3.0)
    merged = case.merge({f"base_model.model.{key}": head}, modules_to_save=["lm_head"])
    assert torch.equal(merged["lm_head.weight"], head)


@pytest.mark.parametrize(
    ("options", "extra", "complaint"),
    [
        ({"peft_type": "IA3"}, {}, "IA3"),
        ({"use_dora": True}, {}, "DoRA"),
        ({"lora_bias": True}, {}, "bias"),
        ({"layer_replication": [[0, 2]]}, {}, "replication"),
        ({}, {f"{Q}.lora_magnitude_vector": (6,)}, "not plain LoRA"),
        ({}, {"model.embed_tokens.lora_embedding_A": (2, 8)}, "embeddings"),
        ({}, {"lm_head.weight": (9, 4)}, "by one of"),
    ],
)
def test_unsupported_adapters_are_refused_by_name(
    case: Case, options: dict[str, Any], extra: dict[str, tuple[int, ...]], complaint: str
) -> None:
    tensors = {f"base_model.model.{name}": torch.zeros(shape) for name, shape in extra.items()}
    with pytest.raises(UnsupportedModelError, match=complaint) as caught:
        case.merge(tensors, **options)
    assert "merge_and_unload" in caught.value.remedy


def test_adapters_that_do_not_fit(case: Case) -> None:
    with pytest.raises(CheckpointError, match="bias, which the base does not have"):
        case.merge({f"base_model.model.{Q}.bias": torch.zeros(6)}, bias="lora_only")
    lonely = {"base_model.model.lm_head.lora_A.weight": torch.zeros(2, 4)}
    with pytest.raises(CheckpointError, match="lm_head has only one"):
        case.merge(lonely)
    case.weights({name: tensor[:, :3].contiguous() for name, tensor in base_tensors().items()})
    with pytest.raises(CheckpointError, match=r"\(6, 4\).*\(6, 3\)"):
        case.merge()
    config = json.loads(CONFIG) | {"quantization_config": {"quant_method": "gptq"}}
    (case.base / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="quantized"):
        case.merge()


def test_a_tied_embedding_is_not_replaced(case: Case) -> None:
    config = json.loads(CONFIG) | {"tie_word_embeddings": True}
    (case.base / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="ties"):
        case.merge({"base_model.model.model.embed_tokens.weight": torch.zeros(8, 4)})


def test_a_pickled_adapter_is_converted(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(adapter_config())
    torch.save(pairs(), tmp_path / "adapter_model.bin")
    assert set(LoraAdapter.load(tmp_path).a) == {Q, V}


def test_an_adapter_is_downloaded(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    base = base_tensors()
    base_commit = hub.add(
        "org/base",
        {"config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors": save(base)},
        revisions={"v2"},
    )
    commit = hub.add(
        "org/lora",
        {
            "adapter_config.json": adapter_config(revision="v2"),
            "adapter_model.safetensors": save(pairs()),
            "chat_template.jinja": b"the adapter's",
            "optimizer.pt": b"never fetched",
        },
    )
    as_it_is = resolve_model("org/lora")
    assert (as_it_is.path / "adapter_model.safetensors").is_file()
    assert hub.fetched() == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
    }
    assert "org/base" in caplog.text

    merged = resolve_model("org/lora", merge_lora=True)
    assert merged.revision == commit
    assert (
        merged.path == tmp_path / "tgi-merged" / "org--lora" / f"{commit[:12]}-{base_commit[:12]}"
    )
    assert {path.name for path in merged.path.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors",
    }
    tensors = load_file(merged.path / "model.safetensors")
    torch.testing.assert_close(tensors[f"{Q}.weight"], base[f"{Q}.weight"] + 4 * product(Q))

    stamp = (merged.path / "model.safetensors").stat()
    assert resolve_model("org/lora", merge_lora=True) == merged
    assert (merged.path / "model.safetensors").stat() == stamp


def test_a_failed_merge_leaves_nothing(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/base", {"config.json": CONFIG, "model.safetensors": save(base_tensors())})
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_bytes(adapter_config(use_dora=True))
    save_file(pairs(), adapter / "adapter_model.safetensors")
    assert resolve_model(str(adapter)).path == adapter
    with pytest.raises(UnsupportedModelError, match="DoRA"):
        resolve_model(str(adapter), merge_lora=True)
    assert not [p for p in (tmp_path / "tgi-merged").rglob("*") if not p.name.endswith(".lock")][1:]
    (adapter / "adapter_config.json").write_bytes(adapter_config(base_model_name_or_path=None))
    with pytest.raises(ModelError, match="does not name its base"):
        resolve_model(str(adapter), merge_lora=True)

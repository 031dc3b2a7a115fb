from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.checkpoints import make_llama
from tgi_cli.config import ModelFacts
from tgi_cli.errors import CheckpointError, ModelError, UnsupportedModelError
from tgi_cli.models import model_facts, read_config


def test_facts_of_a_checkpoint(tmp_path: Path) -> None:
    make_llama(tmp_path, dtype=torch.bfloat16)
    assert model_facts(read_config(tmp_path)) == ModelFacts(
        architecture="LlamaForCausalLM",
        model_type="llama",
        dtype="bfloat16",
        vocab_size=256,
        max_position_embeddings=512,
        eos_token_ids=(2,),
        kv_bytes_per_token=2 * 3 * 2 * 16,
        num_heads=8,
        num_kv_heads=2,
    )


@pytest.mark.parametrize(
    ("model", "generation", "wanted"),
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (2, {"eos_token_id": [7, 8]}, (7, 8)),
        (2, {"eos_token_id": 7}, (7,)),
        (2, {"eos_token_id": None}, (2,)),
        (2, {}, (2,)),
        (None, None, ()),
    ],
)
def test_eos_ids_come_from_the_generation_config_first(
    model: Any, generation: dict[str, Any] | None, wanted: tuple[int, ...], tmp_path: Path
) -> None:
    make_llama(tmp_path, eos_token_id=model)
    file = tmp_path / "generation_config.json"
    file.unlink() if generation is None else file.write_text(json.dumps(generation))
    assert model_facts(read_config(tmp_path)).eos_token_ids == wanted


@pytest.mark.parametrize(
    ("key", "value"), [("dtype", None), ("dtype", "float8"), ("torch_dtype", 3)]
)
def test_the_dtype_is_read_from_the_weights_where_the_config_has_none(
    key: str, value: Any, tmp_path: Path
) -> None:
    make_llama(tmp_path, dtype=torch.float16)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"dtype": None, key: value}))
    assert model_facts(read_config(tmp_path)).dtype == "float16"
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no safetensors file"):
        model_facts(read_config(tmp_path))


def test_absent_keys_mean_what_they_mean_to_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    make_llama(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for key in ("max_position_embeddings", "num_key_value_heads", "head_dim", "rope_parameters"):
        del raw[key]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    facts = model_facts(read_config(tmp_path))
    theirs = LlamaConfig.from_pretrained(tmp_path)
    assert facts.max_position_embeddings == theirs.max_position_embeddings
    assert theirs.num_key_value_heads is not None
    assert theirs.head_dim is not None
    assert facts.kv_bytes_per_token == 2 * 3 * theirs.num_key_value_heads * theirs.head_dim


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("{", "config.json cannot be read"),
        ("[]", "is not a JSON object"),
        ("{}", "names no architecture"),
    ],
)
def test_an_unusable_config_is_an_error(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        read_config(tmp_path / "nowhere")


@pytest.mark.tgi_pain(12)
@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (
            {"architectures": ["OPTForCausalLM"]},
            UnsupportedModelError,
            "OPTForCausalLM .* is not what its model type 'llama' names",
        ),
        (
            {"quantization_config": {"quant_method": "aqlm"}},
            UnsupportedModelError,
            "quantized with aqlm",
        ),
        ({"hidden_act": "xielu"}, UnsupportedModelError, "activation 'xielu'"),
        ({"partial_rotary_factor": 0.2}, ModelError, "even head_dim, not 3"),
        ({"model_type": "mistral", "sliding_window": 0}, ModelError, "'sliding_window' is 0"),
        ({"model_type": "mistral", "sliding_window": "8"}, ModelError, "'sliding_window' is '8'"),
        (
            {"model_type": "mistral", "layer_types": ["full_attention"]},
            ModelError,
            "'layer_types' names 1 of 3 layers",
        ),
        (
            {"model_type": "mistral", "layer_types": ["chunked_attention"] * 3},
            UnsupportedModelError,
            "layer type 'chunked_attention' is not supported",
        ),
        ({"hidden_size": "64"}, ModelError, "'hidden_size' is '64', not int"),
        ({"hidden_size": True}, ModelError, "'hidden_size' is True, not int"),
        ({"hidden_size": None}, ModelError, "does not say 'hidden_size'"),
        ({"vocab_size": 0}, ModelError, "'vocab_size' is 0"),
        ({"num_key_value_heads": 3}, ModelError, "8 attention heads cannot share 3"),
        ({"head_dim": 15}, ModelError, "even head_dim"),
    ],
)
def test_unsupported_architectures_are_refused_by_name(
    overrides: dict[str, Any], error: type[ModelError], message: str, tmp_path: Path
) -> None:
    make_llama(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | overrides
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(error, match=message):
        model_facts(read_config(tmp_path))


@pytest.mark.parametrize("trusted", [True, False])
def test_code_without_a_language_model_is_refused_whether_trusted_or_not(
    trusted: bool, tmp_path: Path
) -> None:
    make_llama(tmp_path, architectures=["OwnForCausalLM"], auto_map={"AutoModel": "own.Own"})
    with pytest.raises(UnsupportedModelError, match=r"OwnForCausalLM is defined by code .* has no"):
        model_facts(read_config(tmp_path, trusted))


def test_code_beside_a_known_architecture_is_not_needed(tmp_path: Path) -> None:
    make_llama(tmp_path, auto_map={"AutoModel": "own.Own"})
    assert model_facts(read_config(tmp_path)).architecture == "LlamaForCausalLM"


def test_reading_a_config_imports_no_torch(tmp_path: Path) -> None:
    make_llama(tmp_path)
    code = (
        "import sys; from pathlib import Path; from tgi_cli.models import read_config, model_facts;"
        "model_facts(read_config(Path(sys.argv[1])));"
        "sys.exit(str([name for name in ('torch', 'transformers') if name in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.stderr.strip() == "[]"

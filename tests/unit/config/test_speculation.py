"""--speculate and vLLM's --speculative-config: what is honoured, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.config.test_resolve import CPU, CUDA, resolved
from tgi_cli.config.settings.file import read_file
from tgi_cli.config.speculation import DEFAULT_CPU_DRAFTS, SpeculativeConfig, speculative_model
from tgi_cli.errors import ConfigError

MTP = '{"method": "mtp"}'


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, SpeculativeConfig()),
        ({"method": "ngram"}, SpeculativeConfig("ngram", None)),
        ({"method": "suffix", "num_speculative_tokens": 5}, SpeculativeConfig("suffix", 5)),
        ({"model": "ngram", "num_speculative_tokens": 3}, SpeculativeConfig("ngram", 3)),
        ({"model": "[ngram]"}, SpeculativeConfig("ngram", None)),
        ({"model": "org/draft"}, SpeculativeConfig(model="org/draft")),
        (
            {"method": "eagle3", "model": "org/m", "num_speculative_tokens": 3, "revision": "r"},
            SpeculativeConfig("eagle3", 3, "org/m", "r"),
        ),
        ({"method": "mtp"}, SpeculativeConfig("mtp")),
        ({"method": "qwen3_next_mtp"}, SpeculativeConfig("mtp")),
        ({"method": "ngram", "model": None, "prompt_lookup_max": None}, SpeculativeConfig("ngram")),
    ],
)
def test_vllms_configurations_are_read(given: Any, expected: SpeculativeConfig) -> None:
    assert SpeculativeConfig.read(json.dumps(given)) == expected


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("", "is not JSON"),
        ("ngram", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "not a JSON object"),
        ('"ngram"', "not a JSON object"),
        ('{"method": "eagle"}', "method 'eagle' is not supported; one of: ngram"),
        ('{"method": "eagle3"}', "method eagle3 is not supported without a model"),
        ('{"method": "mtp", "model": "org/m"}', "model is not supported with the method mtp"),
        ('{"method": "ngram", "model": "org/m"}', "model is not supported with the method ngram"),
        ('{"model": 3}', "model 3 is not supported"),
        ('{"revision": "r"}', "revision 'r' is not supported without a model"),
        ('{"rejection_sample_method": "x"}', "rejection_sample_method is not supported: drafts"),
        ('{"method": 3}', "method 3 is not supported"),
        ('{"method": ["ngram"]}', "is not supported"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens: 0 is not a whole number"),
        ('{"num_speculative_tokens": true}', "num_speculative_tokens: True"),
        ('{"num_speculative_tokens": 2.5}', "num_speculative_tokens: 2.5"),
        ('{"num_speculative_tokens": 1e400}', "num_speculative_tokens: inf"),
        ('{"num_speculative_tokens": 4294967296}', "num_speculative_tokens: 4294967296"),
        (
            '{"method": "ngram", "prompt_lookup_max": 4}',
            "prompt_lookup_max is not supported: matches",
        ),
        (
            '{"suffix_decoding_max_tree_depth": 9}',
            "suffix_decoding_max_tree_depth is not supported",
        ),
        ('{"disable_by_batch_size": 9}', "disable_by_batch_size is not supported: the number"),
        ('{"draft_tensor_parallel_size": 2}', "draft_tensor_parallel_size is not supported"),
        ('{"marzipan": 1}', "marzipan is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(word: str, words: str) -> None:
    with pytest.raises(
        ValueError, match=r"not (JSON|a JSON object|supported|a whole number)"
    ) as caught:
        SpeculativeConfig.read(word)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("said", "drafts"),
    [
        ({}, DEFAULT_CPU_DRAFTS),
        ({"speculate": 0}, 0),
        ({"speculate": 3}, 3),
        ({"speculative_config": '{"method": "ngram"}'}, DEFAULT_CPU_DRAFTS),
        ({"speculative_config": '{"num_speculative_tokens": 4}'}, 4),
        ({"speculate": 4, "speculative_config": '{"num_speculative_tokens": 4}'}, 4),
        ({"speculate": 2, "speculative_config": '{"method": "ngram"}'}, 2),
        ({"speculate": 0, "speculative_config": '{"method": "ngram"}'}, 0),
    ],
)
def test_the_number_of_drafts(said: dict[str, Any], drafts: int) -> None:
    assert resolved(device=CPU, **said).speculate == drafts


def test_a_gpu_speculates_on_request_only() -> None:
    assert resolved(device=CUDA).speculate == 0
    assert resolved(device=CUDA, speculate=5).speculate == 5
    assert resolved(device=CUDA, speculative_config='{"method": "ngram"}').speculate > 0


def test_two_numbers_that_differ_are_an_error() -> None:
    both = {"speculate": 3, "speculative_config": '{"num_speculative_tokens": 4}'}
    with pytest.raises(ConfigError, match="--speculate 3 and num_speculative_tokens 4"):
        resolved(**both)


def test_drafts_come_from_recent_answers_unless_told_otherwise() -> None:
    assert resolved().drafts_from_answers
    assert resolved(speculative_config='{"method": "suffix"}').drafts_from_answers
    assert not resolved(speculative_config='{"method": "ngram"}').drafts_from_answers
    assert not resolved(prefix_caching=False).drafts_from_answers


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"speculate": -1}, "--speculate: -1 is not at least 0, nor auto"),
        ({"speculate": "many"}, "--speculate: 'many' is not a whole number, nor auto"),
        ({"speculative_config": "x"}, "--speculative-config: 'x' is not JSON"),
    ],
)
def test_invalid_values_are_reported_as_flags(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(**said)


def test_a_configuration_file_may_have_an_object(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("speculate: auto\nspeculative-config:\n  method: ngram\n")
    found = read_file(path, "serve")
    assert found == {"speculate": "auto", "speculative_config": '{"method": "ngram"}'}
    path.write_text("speculative-config: {method: eagle}\n")
    with pytest.raises(ConfigError, match="method 'eagle' is not supported"):
        read_file(path, "serve")


def test_weights_that_draft_are_named_by_either_setting() -> None:
    assert resolved().speculative_model is None
    assert resolved(speculative_model="/d").speculative_model == "/d"
    named = resolved(speculative_config='{"method": "eagle3", "model": "/d"}')
    assert (named.speculative_model, named.speculative_method) == ("/d", "eagle3")
    assert resolved(device=CUDA, speculative_model="/d").speculate == DEFAULT_CPU_DRAFTS
    assert resolved(speculative_model="/d", speculate=0).speculative_model is None


def test_two_names_of_weights_are_an_error() -> None:
    word = '{"model": "/d", "revision": "r"}'
    assert speculative_model(None, word) == ("/d", "r")
    assert speculative_model("/d", word) == ("/d", "r")
    assert speculative_model("/e", None) == ("/e", None)
    assert speculative_model(None, None) is None
    with pytest.raises(ValueError, match="--speculative-model /e and model /d"):
        speculative_model("/e", word)


def test_a_number_that_was_stated_is_a_limit_of_the_users() -> None:
    assert "speculate" in resolved(speculate=3).explicit_limits
    word = '{"num_speculative_tokens": 4}'
    assert "speculate" in resolved(speculative_config=word).explicit_limits
    assert "speculate" not in resolved(speculative_model="/d").explicit_limits


@pytest.mark.parametrize("said", [{"speculative_model": "/d"}, {"speculative_config": MTP}])
def test_weights_draft_for_several_shards_too(said: dict[str, Any]) -> None:
    config = resolved(num_shard=2, **said)
    assert config.num_shard == 2
    assert config.speculate == DEFAULT_CPU_DRAFTS
    assert (config.speculative_model or config.speculative_method) in ("/d", "mtp")

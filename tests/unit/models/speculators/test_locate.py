"""Draft heads are found by name, and the model that they are for by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.checkpoints import make_llama
from tests.tools.draft_heads import edit, make_medusa, make_mlp_speculator
from tests.tools.miniatures import write_byte_tokenizer
from tgi_cli import LLM, SamplingParams
from tgi_cli.cli.local_model import locate
from tgi_cli.config import ServeConfig
from tgi_cli.errors import ConfigError, HubError
from tgi_cli.models.speculators.locate import locate_base, locate_drafter
from tgi_cli.process.progress import ProgressReporter

PROGRESS = ProgressReporter(show_bar=False, log_interval=None)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_llama(tmp_path_factory.mktemp("base"))
    write_byte_tokenizer(path)
    return path


def heads_of(base: Path, path: Path) -> dict[str, Path]:
    """Heads that name their model."""
    made = {
        "medusa": make_medusa(path / "medusa", "tgi"),
        "mlp_speculator": make_mlp_speculator(path / "mlp"),
    }
    for folder in made.values():
        edit(folder, lambda config, _: config.update(base_model_name_or_path=str(base)))
    return made


def test_any_other_model_stands_for_itself(base: Path) -> None:
    assert locate_base(base, lambda path: path, lambda _: pytest.fail("sought")) == (base, None)


def test_a_command_finds_the_model_of_heads(base: Path, tmp_path: Path) -> None:
    for heads in heads_of(base, tmp_path).values():
        config, path = locate(ServeConfig(model_id=str(heads)))
        assert path == base
        assert config.model_id == str(base)
        assert config.speculative_model == str(heads)


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_the_python_api_finds_the_model_of_heads(
    base: Path, tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    heads = heads_of(base, tmp_path)[method]
    limits = {"dtype": "float32", "max_total_tokens": 64, "max_batch_total_tokens": 512}
    greedy = SamplingParams(temperature=0.0)
    with LLM(base, speculate=0, **limits) as llm:  # type: ignore[arg-type]
        (expected,) = llm.generate([[5, 6, 7]], greedy, max_new_tokens=20, ignore_eos=True)
    with caplog.at_level("INFO"), LLM(heads, **limits) as llm:  # type: ignore[arg-type]
        assert llm.info.model_id == str(base)
        (done,) = llm.generate([[5, 6, 7]], greedy, max_new_tokens=20, ignore_eos=True)
    assert done.token_ids == expected.token_ids
    assert f"drafts come from the {method} weights in {heads}" in caplog.text


def test_other_weights_come_before_those_that_the_model_is_named_by(
    base: Path, tmp_path: Path
) -> None:
    heads = heads_of(base, tmp_path)
    named = ServeConfig(model_id=str(base), speculative_model=str(heads["mlp_speculator"]))
    assert locate_drafter(named, PROGRESS, heads["medusa"]) == named
    alone = ServeConfig(model_id=str(base))
    assert locate_drafter(alone, PROGRESS) == alone
    assert locate_drafter(alone, PROGRESS, heads["medusa"]).speculative_model == str(
        heads["medusa"]
    )


def test_nothing_is_sought_where_nothing_is_drafted() -> None:
    config = ServeConfig(model_id="m", speculative_model="/nowhere", speculate=0)
    assert locate_drafter(config, PROGRESS) == config


def test_the_python_api_takes_vllms_object(base: Path, tmp_path: Path) -> None:
    heads = heads_of(base, tmp_path)["medusa"]
    limits = {"dtype": "float32", "max_total_tokens": 64, "max_batch_total_tokens": 512}
    given = {"method": "medusa", "model": str(heads), "num_speculative_tokens": 2}
    with LLM(base, speculative_config=given, **limits) as llm:  # type: ignore[arg-type]
        assert llm.info.speculate == 2
    wrong = {"method": "eagle3", "model": str(heads)}
    with pytest.raises(ConfigError, match="is of the method medusa"):
        LLM(base, speculative_config=wrong, **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"method": "eagle"}, "ngram", {"model": {1}}])
def test_what_vllms_object_cannot_say_is_an_error(given: object) -> None:
    with pytest.raises(ConfigError, match="--speculative-config"):
        LLM(speculative_config=given)  # type: ignore[arg-type]


def test_a_model_that_heads_name_and_that_is_not_there(base: Path, tmp_path: Path) -> None:
    heads = heads_of(base, tmp_path)["medusa"]
    edit(heads, lambda config, _: config.update(base_model_name_or_path=str(tmp_path / "gone")))
    with pytest.raises(HubError, match="there is no folder"):
        LLM(heads)

"""Adapters in the Python API: loaded at the start or later, one for all prompts or one each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tools.lora_adapters import make_adapter
from tests.unit.llm.conftest import LIMITS
from tgi_cli import LLM
from tgi_cli.errors import ConfigError, ModelNotFoundError
from tgi_cli.hub.merge_lora import merge
from tgi_cli.llm import EngineDeadError
from tgi_cli.rpc.interface import AdapterError, AdapterFault

PROMPTS = ["def read_json(path):", "The function returns", "import os"]
NEW = 8


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [make_adapter(checkpoint, root / str(seed), seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def llm(make_llm: Callable[..., LLM], folders: list[Path]) -> Iterator[LLM]:
    with make_llm(lora_adapters={"zero": folders[0], "one": str(folders[1])}, max_loras=2) as llm:
        yield llm


def ids(llm: LLM, adapter: str | list[str | None] | None) -> list[list[int]]:
    done = llm.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True, adapter=adapter)
    return [completion.token_ids for completion in done]


@pytest.fixture(scope="module")
def merged(
    checkpoint: Path, folders: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> list[list[int]]:
    """What a model says that the first adapter was merged into."""
    target = tmp_path_factory.mktemp("merged")
    merge(folders[0], checkpoint, target)
    with LLM(target, **LIMITS) as llm:
        return ids(llm, None)


def test_an_adapter_generates_the_text_of_the_merged_model(
    llm: LLM, merged: list[list[int]]
) -> None:
    assert llm.adapters == ["zero", "one"]
    base = ids(llm, None)
    assert ids(llm, "zero") == merged
    assert base != merged
    assert ids(llm, None) == base, "what is cached of an adapter serves it alone"


def test_each_prompt_of_a_call_may_have_its_own(llm: LLM) -> None:
    alone = [ids(llm, name)[place] for place, name in enumerate(["one", None, "zero"])]
    assert ids(llm, ["one", None, "zero"]) == alone
    with pytest.raises(ValueError, match="2 adapters for 3 prompts"):
        ids(llm, ["one", None])


def test_streams_chats_samples_and_beams_take_it_too(llm: LLM, merged: list[list[int]]) -> None:
    with llm.stream(PROMPTS[0], max_new_tokens=NEW, ignore_eos=True, adapter="zero") as stream:
        assert [i for piece in stream for i in piece.token_ids] == merged[0]
    samples = llm.generate(PROMPTS[0], n=2, max_new_tokens=NEW, ignore_eos=True, adapter="zero")
    assert [sample.token_ids for sample in samples] == [merged[0]] * 2
    (beams,) = llm.beam_search(PROMPTS[0], 1, NEW, ignore_eos=True, adapter="zero")
    assert beams[0].token_ids == merged[0]


def test_load_and_unload(llm: LLM, folders: list[Path]) -> None:
    with pytest.raises(ValueError, match="no adapter 'two'; there are: one, zero"):
        ids(llm, "two")
    llm.load_adapter("two", folders[2])
    two = ids(llm, "two")
    assert two != ids(llm, "one")
    with pytest.raises(AdapterError, match="loaded already") as caught:
        llm.load_adapter("two", folders[1])
    assert caught.value.fault is AdapterFault.TAKEN
    llm.load_adapter("two", folders[1], in_place=True)
    assert ids(llm, "two") == ids(llm, "one")
    llm.unload_adapter("two")
    with pytest.raises(ValueError, match="no adapter 'two'"):
        ids(llm, "two")
    with pytest.raises(AdapterError, match="no adapter 'two'"):
        llm.unload_adapter("two")
    with pytest.raises(ModelNotFoundError):
        llm.load_adapter("two", "./nowhere")
    with pytest.raises(ConfigError, match="base model"):
        llm.load_adapter(llm.info.model_id, folders[2])


def test_adapters_that_do_not_fit_are_refused_at_the_start(
    make_llm: Callable[..., LLM], checkpoint: Path, tmp_path: Path
) -> None:
    large = make_adapter(checkpoint, tmp_path / "large", rank=9)
    with pytest.raises(ConfigError, match="--max-lora-rank 8 is less than the rank 9"):
        make_llm(lora_adapters=f"a={large}", max_lora_rank=8)
    broken = make_adapter(checkpoint, tmp_path / "broken", modules=("q_proj",))
    config = (broken / "adapter_config.json").read_text()
    (broken / "adapter_config.json").write_text(
        config.replace('"use_dora": false', '"use_dora": true')
    )
    with pytest.raises(AdapterError, match=r"adapter 'a': .*DoRA"):
        make_llm(lora_adapters=[f"a={broken}"])


def test_loading_fails_without_a_free_slot_and_after_the_end(
    make_llm: Callable[..., LLM], folders: list[Path]
) -> None:
    with make_llm() as llm:
        with pytest.raises(AdapterError, match="adapters are off") as caught:
            llm.load_adapter("zero", folders[0])
        assert "max-loras" in caught.value.remedy
        with pytest.raises(ValueError, match="none is loaded"):
            ids(llm, "zero")
    with make_llm(max_loras=1) as llm:
        llm.load_adapter("zero", folders[0])
    with pytest.raises(EngineDeadError):
        llm.load_adapter("one", folders[1])

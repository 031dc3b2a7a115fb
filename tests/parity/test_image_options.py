"""What requests may have beside images works with them as with text: beams, grammars, adapters,
drafts and samples, on whole engines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.parity.test_image_prompts import (
    ARGUMENTS,
    CONTEXT,
    NEW,
    PROMPTS,
    checkpoint,
    generated,
    noise,
)
from tests.parity.test_processed_images import PROCESSORS
from tests.tools.image_models import IMAGE_MODELS, OracleProcessor
from tests.tools.lora_adapters import make_adapter
from tests.unit.llm.conftest import Statistics
from tgi_cli import LLM
from tgi_cli.engine.speculation.step_costs import StepCosts
from tgi_cli.engine.step import StepTime
from tgi_cli.hub.merge_lora import merge
from tgi_cli.sampling.params import SamplingParams

LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "max_total_tokens": CONTEXT - 1,
    "max_batch_total_tokens": 2048,
    "max_batch_prefill_tokens": 96,
}
NAMES = ("SmolVLM", "Qwen2.5-VL")
"""Positions on one axis, and on three."""

DECODER = ("o_proj",)
"""Layers that the decoders of both have, and neither tower."""


class Served:
    """A miniature with an engine, and transformers' side of it."""

    def __init__(self, name: str, folder: Path) -> None:
        kind = PROCESSORS[name][0]
        self.name = name
        self.folder = checkpoint(name, folder)
        self.stats = Statistics()
        self.llm = LLM(self.folder, on_stats=self.stats, **LIMITS)
        self._oracle = OracleProcessor(kind, self.folder, **ARGUMENTS.get(name, {}))
        self._placeholder = IMAGE_MODELS[kind].written

    def prompts(self) -> list[dict[str, Any]]:
        """With one and with two images."""
        return [
            {
                "prompt": prompt.replace("{}", self._placeholder),
                "images": [noise(seed) for seed in range(count)],
            }
            for prompt, count in PROMPTS.items()
        ]

    def wanted(self, prompt: dict[str, Any], **options: Any) -> list[list[int]]:
        given = prompt["prompt"], prompt["images"]
        return generated(self.name, self.folder, self._oracle, *given, **options)


@pytest.fixture(scope="module", params=NAMES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    found = Served(request.param, tmp_path_factory.mktemp("model"))
    with found.llm:
        yield found


def test_beams_are_those_of_transformers(served: Served) -> None:
    for prompt in served.prompts():
        (found,) = served.llm.beam_search(prompt, 3, NEW, ignore_eos=True)
        wanted = served.wanted(prompt, num_beams=3, num_return_sequences=3, early_stopping=False)
        assert [hypothesis.token_ids for hypothesis in found] == wanted


def test_a_grammar_chooses_what_transformers_would_among_its_tokens(served: Served) -> None:
    tokenizer = served.llm.tokenizer
    allowed = [token for letter in "ab" for token in tokenizer.encode(letter, False)]
    assert len(allowed) == 2
    for prompt in served.prompts():
        (answer,) = served.llm.generate(
            prompt,
            max_new_tokens=NEW + 5,
            grammar={"type": "regex", "value": f"[ab]{{{NEW}}}"},
        )
        (wanted,) = served.wanted(prompt, prefix_allowed_tokens_fn=lambda *_: allowed)
        assert answer.token_ids[:NEW] == wanted
        assert len(answer.text) == NEW


def test_drafts_leave_every_token_as_it_is(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where drafts cost nothing, and texts repeat themselves."""
    free = (StepTime(1, 1, 8, 1.0), StepTime(1, 64, 8, 1.0))
    monkeypatch.setattr("tgi_cli.worker.worker.time_steps", lambda *_: free)
    monkeypatch.setattr(StepCosts, "learn", lambda *_: None)
    repeating = SamplingParams(temperature=0.0, frequency_penalty=-0.5)
    answers, stats = [], Statistics()
    for speculate in (0, 7):
        with LLM(served.folder, speculate=speculate, on_stats=stats, **LIMITS) as llm:
            found = llm.generate(served.prompts(), repeating, max_new_tokens=80, ignore_eos=True)
        answers.append([each.token_ids for each in found])
    assert sum(step["Draft Tokens"] for step in stats) > 0
    assert answers[0] == answers[1]


def test_samples_are_those_of_their_seeds_and_share_the_prompt(served: Served) -> None:
    prompt = served.prompts()[1]
    params = SamplingParams(temperature=1.0, seed=5)
    options: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}
    three = served.llm.generate([prompt], params, n=3, **options)
    before = len(served.stats)
    again = served.llm.generate([prompt], params, n=3, **options)
    assert [each.token_ids for each in again] == [each.token_ids for each in three]
    assert len({tuple(each.token_ids) for each in three}) == 3
    encoded = [step["Encoded images"] for step in served.stats]
    assert encoded[-1] == encoded[before - 1], "its images are cached"


def test_an_adapter_answers_as_the_merged_model_does(served: Served, tmp_path: Path) -> None:
    adapter = make_adapter(served.folder, tmp_path / "adapter", modules=DECODER, strength=1.0)
    merged = tmp_path / "merged"
    merged.mkdir()
    merge(adapter, served.folder, merged)
    for file in served.folder.iterdir():
        if not (merged / file.name).exists():
            shutil.copy(file, merged)
    assert json.loads((merged / "config.json").read_text())["vision_config"]
    prompts = served.prompts()
    options: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}
    with LLM(merged, **LIMITS) as llm:
        wanted = [each.token_ids for each in llm.generate(prompts, **options)]
    plain = [each.token_ids for each in served.llm.generate(prompts, **options)]
    with LLM(served.folder, lora_adapters={"a": adapter}, **LIMITS) as llm:
        found = llm.generate(prompts * 2, adapter=["a", "a", None, None], **options)
    assert [each.token_ids for each in found] == [*wanted, *plain]
    assert wanted[0] != plain[0], "it has an effect"
    assert wanted[1] != plain[1]

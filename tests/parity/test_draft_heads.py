"""With draft heads, the whole engine gives what it gives without, in fewer steps if they are right.

In bfloat16, with the kernels whose logits do not depend on how many rows are computed at once. What
heads propose is compared in float32 with a plain computation from transformers' hidden states.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.parity.cases import CASES, SMALL, Case
from tests.tools.checkpoints import make_llama
from tests.tools.draft_heads import LAYER, edit, make_eagle3, make_medusa, make_mlp_speculator
from tests.tools.miniatures import make_miniature, write_byte_tokenizer
from tests.tools.paged_run import random_ids
from tests.unit.models.speculators.plain import PlainEagle3
from tgi_cli import LLM, SamplingParams
from tgi_cli.engine.speculation.step_costs import StepCosts
from tgi_cli.engine.step import StepTime
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.kernels import cpp_library
from tgi_cli.models.speculators.base import Drafts, TargetStep
from tgi_cli.models.speculators.pairs import PairProposer

FREE = (StepTime(1, 1, 8, 1.0), StepTime(1, 64, 8, 1.0))
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, seed=7)
LIMITS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_total_tokens": 128,
    "max_batch_prefill_tokens": 24,
    "max_batch_total_tokens": 1024,
    "max_batch_size": 4,
}
PROMPTS = [random_ids(length, length) for length in (5, 40, 16, 33, 17, 48)]


class Nothing:
    """Finds no drafts."""

    def draft(self, sequence: object, most: int) -> None:
        return None

    def finish(self, sequence: object) -> None:
        pass


class Counted:
    """Counts steps, and the draft tokens that they verify."""

    def __init__(self) -> None:
        self.steps = self.drafts = 0

    def __call__(self, stats: str) -> None:
        self.steps += 1
        self.drafts += json.loads(stats)["Draft Tokens"]


@pytest.fixture(autouse=True)
def _free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only heads draft; rows and proposals cost nothing, so that all drafts are verified."""
    monkeypatch.setattr("tgi_cli.engine.speculation.LookupDrafter", lambda _: Nothing())
    monkeypatch.setattr("tgi_cli.worker.worker.time_steps", lambda *_: FREE)
    monkeypatch.setattr(StepCosts, "learn", lambda *_: None)
    monkeypatch.setattr(StepCosts, "learn_proposing", lambda *_: None)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_llama(tmp_path_factory.mktemp("target"), num_hidden_layers=6)
    write_byte_tokenizer(path)
    return path


def tokens_of(target: Path, **settings: Any) -> list[Any]:
    """Tokens and their log-probabilities, of greedy and sampled requests."""
    with LLM(target, **{**LIMITS, **settings}) as llm:
        done = llm.generate(PROMPTS, [GREEDY, SAMPLED] * 3, max_new_tokens=40, ignore_eos=True)
    return [(each.token_ids, each.logprobs) for each in done]


SMALL_CACHE: dict[str, Any] = {"max_batch_total_tokens": 192, "quantize": "int8"}


@pytest.fixture(scope="module")
def expected(target: Path) -> tuple[list[Any], list[Any]]:
    """Without drafts, and the same from a small cache and 8-bit weights."""
    return tokens_of(target, speculate=0), tokens_of(target, speculate=0, **SMALL_CACHE)


HEADS: dict[str, Callable[[Path], Path]] = {
    "eagle3": lambda path: make_eagle3(path, "sglang", layer_ids=[0, 2, 5]),
    "eagle3 of speculators": lambda path: make_eagle3(path, "speculators", own_embedding=True),
    "medusa": lambda path: make_medusa(path, "tgi"),
    "medusa without heads": lambda path: make_medusa(path, "tgi2"),
    "mlp": lambda path: make_mlp_speculator(path, tied=True),
}


@pytest.mark.parametrize("name", HEADS)
def test_answers_are_the_same_with_heads(
    name: str, target: Path, tmp_path: Path, expected: tuple[list[Any], list[Any]]
) -> None:
    if cpp_library() is None:
        pytest.skip("torch's products differ by the number of rows, in their last bits")
    counted, head = Counted(), str(HEADS[name](tmp_path))
    assert tokens_of(target, speculative_model=head, on_stats=counted) == expected[0]
    assert counted.drafts > 20
    assert tokens_of(target, speculative_model=head, **SMALL_CACHE) == expected[1]


def perfect(target: Path, path: Path) -> tuple[Path, Path]:
    """A target whose next token follows from the last one, and an EAGLE-3 head that knows it.

    The target's layers add nothing. The head's attention sees its own pair alone, whose value is
    the token's normed vector; all else that it adds up is zero.
    """

    def silence(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()

    def teach(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        layer = "layers.0"
        for name in ("fc", f"{layer}.hidden_norm", f"{layer}.mlp.down_proj"):
            tensors[f"{name}.weight"].zero_()
        tensors[f"{layer}.input_layernorm.weight"].fill_(1.0)
        for name in ("q_proj", "k_proj", "v_proj"):
            tensors[f"{layer}.self_attn.{name}.weight"] = torch.eye(64, 128)
        tensors[f"{layer}.self_attn.o_proj.weight"] = torch.eye(64)
        for name in ("q_norm", "k_norm"):
            tensors[f"{layer}.self_attn.{name}.weight"].fill_(10.0)
        tensors["norm.weight"] = own["model.norm.weight"]
        tensors["lm_head.weight"] = own["model.embed_tokens.weight"]
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
        config["transformer_layer_config"] |= heads

    make_llama(path / "target", num_hidden_layers=6)
    write_byte_tokenizer(path / "target")
    edit(path / "target", silence)
    own = load_file(path / "target" / "model.safetensors")
    make_eagle3(
        path / "head", "speculators", qk_norm=True, draft_vocab=False, norm_before_residual=True
    )
    edit(path / "head", teach)
    return path / "target", path / "head"


def test_a_head_that_is_right_is_always_accepted(target: Path, tmp_path: Path) -> None:
    silent, head = perfect(target, tmp_path)
    counted = Counted()
    settings = LIMITS | {"speculate": 4, "on_stats": counted}
    with LLM(silent, speculative_model=str(head), **settings) as llm:
        (warm,) = llm.generate([PROMPTS[0]], GREEDY, max_new_tokens=60, ignore_eos=True)
        before, drafted = counted.steps, counted.drafts
        (done,) = llm.generate([PROMPTS[1]], GREEDY, max_new_tokens=61, ignore_eos=True)
    assert len(warm.token_ids) == 60
    assert len(done.token_ids) == 61
    # The prompt's chunks give a token, and each further step four drafts and one more.
    assert counted.steps - before <= 2 + 60 // 5 + 2
    assert counted.drafts - drafted <= 60


class Recorder:
    """Keeps what proposers were asked and what they answered."""

    def __init__(self) -> None:
        self.proposals: list[tuple[list[int], list[int]]] = []

    def __call__(
        self, propose: Callable[[PairProposer, TargetStep], Drafts | None]
    ) -> Callable[[PairProposer, TargetStep], Drafts | None]:
        def recorded(proposer: PairProposer, step: TargetStep) -> Drafts | None:
            drafts = propose(proposer, step)
            if drafts is not None:
                for entry, ids in zip(step.proposing, drafts.token_ids.tolist(), strict=True):
                    end = int(step.starts[entry] + step.valid[entry])
                    row = step.tokens[step.rows[entry], : end + 1]
                    self.proposals.append((row.tolist(), ids))
            return drafts

        return recorded


def test_proposals_are_those_of_a_plain_head_over_transformers_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    target = make_miniature(CASES["Llama 3"], tmp_path / "target")
    head = make_eagle3(tmp_path / "head", "sglang", layer_ids=[0, 1])
    recorder = Recorder()
    monkeypatch.setattr(PairProposer, "propose", recorder(PairProposer.propose))
    settings = LIMITS | {"dtype": "float32", "speculate": 3}
    with LLM(target, speculative_model=str(head), **settings) as llm:
        recorder.proposals.clear()
        llm.generate(PROMPTS, [GREEDY, SAMPLED] * 3, max_new_tokens=20, ignore_eos=True)
    assert len(recorder.proposals) > 30
    theirs: Any = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager")
    embedding = theirs.get_input_embeddings().weight.detach()
    plain = PlainEagle3(load_file(head / "model.safetensors"), LAYER, embedding)
    for tokens, ids in sample(recorder.proposals):
        with torch.inference_mode():
            states = theirs(
                torch.tensor([tokens[:-1]]), output_hidden_states=True, use_cache=False
            ).hidden_states
            # SGLang's ids are of outputs: the inputs of the layers behind them.
            expected, _ = plain.drafts(
                torch.cat((states[1][0], states[2][0]), -1), tokens, len(ids)
            )
        assert ids == expected


def sample(proposals: list[Any]) -> Iterator[Any]:
    """Every third one."""
    return iter(proposals[::3])


def test_a_model_that_transformers_runs_gives_no_states_of_layers(tmp_path: Path) -> None:
    target = make_miniature(Case("ArceeConfig", SMALL), tmp_path / "target")
    head = make_eagle3(tmp_path / "head", "vllm")
    with pytest.raises(UnsupportedModelError, match="hidden states that this model does not give"):
        LLM(target, speculative_model=str(head), **LIMITS)

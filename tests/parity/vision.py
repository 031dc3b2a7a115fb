"""Vision-language models against transformers' own implementation of them, in float32.

A case is a miniature of a decoder with its tower. transformers computes a prompt with images as a
whole. Compared with it are

- what our tower makes of each image alone;
- the logits of the decoder, fed in chunks that cut around and within images, beside other
  sequences, on both of the CPU's attention backends and shared out to two shards;
- greedy tokens after it.

``python -m tests.parity.vision`` prints the table of docs/models.md; names of cases may follow.
"""

from __future__ import annotations

import inspect
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.parity.families import make_checkpoint, random_ids
from tests.parity.vision_cases import IMAGE, VISION_CASES, Inputs, VisionCase
from tests.tools.image_prompts import ImageChunk, ImagePrompt
from tests.tools.paged_run import CPU, PagedRun
from tests.tools.thread_shards import on_shards
from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.models import CausalLM, load_model, read_config
from tgi_cli.models.vision import ImageFeatures

NEW = 12
"""Greedy tokens after each prompt."""

_KINDS = ("mm_token_type_ids", "token_type_ids")
"""What models call the kinds of tokens, text or image."""

_SIZES = (1, 1, 2, 3, 5, 8, 13)
"""Of chunks: images of the miniatures have 2 to 20 rows."""


@dataclass(frozen=True, slots=True)
class VisionResult:
    """What a case came to.

    Attributes:
        max_feature_difference: of our tower's rows, one image alone, from transformers'.
        max_logit_difference: over all prompts and backends.
        sharded_logit_difference: as above, on either of two shards.
        logit_std: what differences of logits are to be seen beside.
        image_effect: the largest change of the last logits if an image is its negative.
        compared, identical: greedy tokens.
        rows: tokens of the first prompt that are images'.
        builtin: whether the decoder is a family's of our own.
    """

    max_feature_difference: float
    max_logit_difference: float
    sharded_logit_difference: float
    logit_std: float
    image_effect: float
    compared: int
    identical: int
    rows: int
    builtin: bool


class VisionOracle:
    """transformers' model of a checkpoint that sees."""

    def __init__(self, path: Path, case: VisionCase) -> None:
        self.case = case
        kind: Any = getattr(transformers, case.case.model)
        self.model = kind.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def features(self, image: Inputs) -> Tensor:
        """[N, hidden] of one image."""
        with torch.inference_mode():
            output = self.model.model.get_image_features(**image, return_dict=True).pooler_output
        found = output if isinstance(output, Tensor) else torch.cat(list(output))
        return found.reshape(-1, found.shape[-1])

    def logits(self, ids: list[int], images: list[Inputs], answer: Sequence[int] = ()) -> Tensor:
        """[n, vocab] of a prompt, and an answer to it."""
        whole = [*ids, *answer]
        kinds = self._kinds(whole)
        if self.case.spans == "prompt":  # they are those of prompt and answer
            kinds["token_type_ids"] = (torch.arange(len(whole)) >= len(ids)).long()[None]
        with torch.inference_mode():
            given = kinds | self.case.joined(images)
            logits: Tensor = self.model(torch.tensor([whole]), **given).logits[0]
            return logits

    def prepared(self, prompt: ImagePrompt, images: list[Inputs]) -> ImagePrompt:
        """A prompt with what the model's images change for its tokens."""
        if self.case.spans:
            prompt = prompt.bidirectional(self.case.spans == "prompt")
        if self.case.axes == 1:
            return prompt
        grids = {"image_grid_thw": self.case.joined(images)["image_grid_thw"]}
        kinds = self._kinds(prompt.ids) | grids
        positions, _ = self.model.model.get_rope_index(torch.tensor([prompt.ids]), **kinds)
        return replace(prompt, positions=positions[-3:, 0])

    def _kinds(self, ids: list[int]) -> Inputs:
        """Which tokens are images', as the model takes it."""
        parameters = inspect.signature(inspect.unwrap(type(self.model).forward)).parameters
        own = (torch.tensor([ids]) == IMAGE).long()
        return {name: own for name in _KINDS if name in parameters}


def check_vision(case: VisionCase, path: Path) -> VisionResult:
    """Compare our model of the checkpoint that ``make_checkpoint`` wrote with transformers'."""
    oracle = VisionOracle(path, case)
    images = [case.image(seed) for seed in case.seeds]
    theirs = [oracle.features(image) for image in images]
    model = _load(path)
    assert model.vision is not None, model.image_refusal
    ours = [
        model.vision.encode(image, len(rows)) for image, rows in zip(images, theirs, strict=True)
    ]
    orders = _ORDERS if case.axes == 1 and not case.spans else _APART
    asked = [[images[index] for index in order if index is not None] for order in orders]
    prompts = [
        oracle.prepared(_prompt(ours, order), given)
        for order, given in zip(orders, asked, strict=True)
    ]
    wanted = [oracle.logits(each.ids, given) for each, given in zip(prompts, asked, strict=True)]
    got = [_mixed(model, prompts, backend) for backend in ("torch", "cpu")]
    sharded = on_shards(2, lambda shard: _mixed(_load(path, shard), prompts, "torch"))
    negative = images[0] | {"pixel_values": -images[0]["pixel_values"]}
    unlike = oracle.logits(prompts[0].ids, [negative])[-1]
    answers = [_greedy(model, each) for each in prompts]
    likeliest = [
        _likeliest(oracle.logits(each.ids, given, answer)[len(each.ids) - 1 : -1])
        for each, answer, given in zip(prompts, answers, asked, strict=True)
    ]
    return VisionResult(
        max_feature_difference=max(
            (a.rows - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)
        ),
        max_logit_difference=max(_worst(each, wanted) for each in got),
        sharded_logit_difference=max(_worst(each, wanted) for each in sharded),
        logit_std=torch.cat(wanted).std().item(),
        image_effect=(wanted[0][-1] - unlike).abs().max().item(),
        compared=NEW * len(prompts),
        identical=sum(
            a == b
            for answer, best in zip(answers, likeliest, strict=True)
            for a, b in zip(answer, best, strict=True)
        ),
        rows=len(prompts[0].features.rows),
        builtin=not type(model).__name__.startswith("Transformers"),
    )


_ORDERS: tuple[tuple[int | None, ...], ...] = (
    (None, 0, None),
    (None, 1, None),
    (None, 0, None, 1, 0, None),
    (0, None, 1),
)
"""Prompts: images by their numbers, and text."""

_APART = (*_ORDERS[:2], (None, 0, None, 1, None, 0, None), _ORDERS[3])
"""Where transformers takes neighbouring images for one; their tokens have text between them."""


def _prompt(images: list[ImageFeatures], order: tuple[int | None, ...]) -> ImagePrompt:
    text = iter(random_ids(40, seed=3))
    parts: list[list[int] | ImageFeatures] = [
        [next(text) for _ in range(7)] if index is None else images[index] for index in order
    ]
    return ImagePrompt.of(parts, IMAGE)


def _load(path: Path, shard: Shard = ALONE) -> CausalLM:
    return load_model(read_config(path), torch.float32, CPU, shard=shard)


def _mixed(model: CausalLM, prompts: list[ImagePrompt], backend: str) -> list[Tensor]:
    """Our logits of prompts that are fed together, in pieces, beside a text."""
    run, choose = PagedRun(model, torch.float32, backend), random.Random(5)
    done = [0] * len(prompts)
    got: list[list[Tensor]] = [[] for _ in prompts]
    company = iter(random_ids(600, seed=8))
    while any(n < len(each.ids) for n, each in zip(done, prompts, strict=True)):
        tokens: dict[str, list[int]] = {}
        images: dict[str, ImageChunk] = {}
        for i, each in enumerate(prompts):
            if done[i] < len(each.ids) and choose.random() < 0.8:
                end = each.end(done[i], choose.choice(_SIZES))
                tokens[str(i)] = each.ids[done[i] : end]
                images[str(i)] = each.chunk(done[i], end)
                done[i] = end
        tokens["company"] = [next(company)]
        for name, logits in run.step(tokens, images=images).items():
            if name != "company":
                got[int(name)].append(logits)
    return [torch.cat(pieces) for pieces in got]


def _greedy(model: CausalLM, prompt: ImagePrompt) -> list[int]:
    run, answer = PagedRun(model, torch.float32, "torch"), list[int]()
    end = len(prompt.ids)
    step = run.step({"a": prompt.ids}, images={"a": prompt.chunk(0, end)})
    while True:
        answer += _likeliest(step["a"][-1:])
        if len(answer) == NEW:
            return answer
        step = run.step({"a": answer[-1:]}, images={"a": prompt.chunk(end, end + 1)})
        end += 1


def _likeliest(logits: Tensor) -> list[int]:
    """Tokens but that of images, which transformers would take for one."""
    tokens: list[int] = logits.index_fill(-1, torch.tensor(IMAGE), -torch.inf).argmax(-1).tolist()
    return tokens


def _worst(some: list[Tensor], others: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True))


def table(names: Iterable[str]) -> Iterator[str]:
    """The rows of the parity table, in Markdown."""
    yield (
        "| Model | Decoder | Rows in a prompt | Maximum difference of rows | Of logits "
        "| On two shards | Greedy tokens compared | Identical |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for name in names:
        case = VISION_CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            result = check_vision(case, make_checkpoint(case.case, Path(folder)))
        yield (
            f"| {name} | {'built in' if result.builtin else 'transformers'} | {result.rows} "
            f"| {result.max_feature_difference:.1e} | {result.max_logit_difference:.1e} "
            f"| {result.sharded_logit_difference:.1e} | {result.compared} | {result.identical} |"
        )


def main() -> None:
    for row in table(sys.argv[1:] or VISION_CASES):
        print(row, flush=True)


if __name__ == "__main__":
    main()

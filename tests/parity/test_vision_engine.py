"""A whole engine answers prompts with images as transformers does, in whatever steps it takes.

Its budget cuts prompts around and within images, the encoder runs in slices, a pool of few blocks
preempts, images come back, one prompt has several samples, and a conversation goes on.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.engine_run import running, with_worker
from tests.parity.families import make_checkpoint, random_ids
from tests.parity.vision import VisionOracle
from tests.parity.vision_cases import IMAGE, VISION_CASES, Inputs, VisionCase
from tgi_cli.config import BLOCK_SIZE, ServeConfig
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.core import EngineCore
from tgi_cli.engine.messages import FinishReason, GenerationRequest, ImageInput
from tgi_cli.models.image_support import IMAGE_ARCHITECTURES
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.sizing.kv_cache import Capacity

ENGINES = ("SmolVLM", "Mistral Small 3", "InternVL 3", "Qwen2.5-VL", "Qwen3-VL")
ENGINES += ("Gemma 3", "PaliGemma", "Qwen 3.5", "LLaVA-NeXT", "GLM-4.5V")
SHARDED = ("SmolVLM", "Qwen3-VL", "Gemma 3")
SERVED, CHUNK, NEW = 256, 24, 28
LONG = {"LLaVA-NeXT": 512}
"""Tokens of a request, where images take more of them."""

ORDERS: tuple[tuple[int | None, ...], ...] = (
    (None, 0, None),
    (None, 1, None),
    (None, 0, None, 1, None, 0, None),
    (0, None, 1),
    (None, 1, None, 0, None),
)
"""Prompts: images by their numbers, and text."""

SAMPLED = 2
"""The prompt that gets three samples."""

TURN, AGAIN = 100, 101


def served(names: tuple[str, ...]) -> list[str]:
    return [
        n for n in names if n in VISION_CASES and VISION_CASES[n].case.model in IMAGE_ARCHITECTURES
    ]


class Conversation:
    """Prompts with images, as requests and as transformers' model takes them.

    Args:
        case: of the model.
        oracle: transformers' model.
    """

    def __init__(self, case: VisionCase, oracle: VisionOracle) -> None:
        self.case = case
        self.images = [case.image(seed) for seed in case.seeds]
        self.rows = [len(oracle.features(image)) for image in self.images]
        self.prompts = [self._prompt(order, 11 * i) for i, order in enumerate(ORDERS)]

    def _prompt(self, order: tuple[int | None, ...], seed: int) -> list[int]:
        text = iter(random_ids(40, seed=seed))
        ids: list[int] = []
        for index in order:
            ids += [next(text) for _ in range(7)] if index is None else [IMAGE] * self.rows[index]
        return ids

    def inputs(self, order: tuple[int | None, ...]) -> list[Inputs]:
        return [self.images[index] for index in order if index is not None]

    def request(
        self, request_id: int, number: int, more: list[int] | None = None, **options: Any
    ) -> GenerationRequest:
        """Prompt ``number``, with ``more`` behind it."""
        ids, images, start = self.prompts[number], [], 0
        for index in ORDERS[number]:
            count = 7 if index is None else self.rows[index]
            if index is not None:
                images.append(self._image(index, start))
            start += count
        return GenerationRequest(
            request_id=request_id,
            prompt_ids=(*ids, *(more or ())),
            # Not an image: transformers would look for its rows.
            sampling=SamplingParams(temperature=0.0, logit_bias=((IMAGE, -100.0),)),
            max_new_tokens=NEW,
            ignore_eos=True,
            images=tuple(images),
            **options,
        )

    def _image(self, index: int, start: int) -> ImageInput:
        given = self.images[index]
        grid = None
        if self.case.axes == 3:
            _, height, width = given["image_grid_thw"][0].tolist()
            grid = (height // 2, width // 2)
        return ImageInput(
            digest=hashlib.blake2b(bytes([index]), digest_size=32).digest(),
            spans=((start, self.rows[index]),),
            tensors={name: tensor.numpy() for name, tensor in given.items()},
            grid=grid,
            bidirectional=self.case.spans == "image",
        )


def check_engine(name: str, path: Path, num_shard: int) -> None:
    case, total = VISION_CASES[name], LONG.get(name, SERVED)
    values = dict(case.case.values)
    if total > SERVED:
        values["text_config"] = values["text_config"] | {"max_position_embeddings": total}
    make_checkpoint(replace(case.case, values=values), path)
    oracle = VisionOracle(path, case)
    talk = Conversation(case, oracle)
    whole = case.spans == "prompt"
    chunk = 5 * CHUNK if whole else CHUNK  # of the turn behind an answer
    serve = ServeConfig(
        model_id="miniature",
        dtype="float32",
        max_total_tokens=total,
        max_batch_prefill_tokens=chunk,
        max_batch_total_tokens=4 * total,
        max_batch_size=8,
        speculate=0,  # nothing drafts here: the warm-up need not time it
    )

    numbers = {i: i for i in range(len(ORDERS))}
    """The prompt of each request."""

    def use(worker: Any, capacity: Capacity) -> dict[int, list[int]]:
        assert capacity.encoder is not None
        # A row of the largest image costs a third of a step's budget; one and a half fit.
        most = max(talk.rows)
        encoder = replace(
            capacity.encoder, row_cost=chunk / 3 / most, cache_rows=3 * most if whole else most + 3
        )
        limits = SchedulerConfig(
            max_total_tokens=total,
            max_batch_prefill_tokens=chunk,
            max_batch_size=8,
            block_size=BLOCK_SIZE,
            # Of the longest sequence alone.
            num_blocks=-(-(max(map(len, talk.prompts)) + 2 * NEW + 5) // BLOCK_SIZE),
            window=capacity.kv_window,
            num_state_slots=capacity.num_state_slots,
            encoder=encoder,
            whole_prompts=capacity.whole_prompts,
        )
        core = EngineCore(worker, limits)
        asked = [talk.request(i, i) for i in range(len(ORDERS))]
        asked += [talk.request(10 + i, SAMPLED, fork_of=SAMPLED) for i in range(2)]
        for request in asked:
            core.inbox.put(request)
        with running(core) as client:
            client.read_until_finished(*(request.request_id for request in asked))
            assert core.metrics.load.preemptions > 0 or name not in SHARDED
            last = next(i for i in reversed(client.finished) if i < len(ORDERS))
            more = [*client.tokens[last], *random_ids(5, seed=77)]
            core.inbox.put(talk.request(TURN, last, more))
            client.read_until_finished(TURN)
            before = core.metrics.load
            core.inbox.put(talk.request(AGAIN, last, more))
            client.read_until_finished(AGAIN)
            load = core.metrics.load
            assert load.reused_tokens - before.reused_tokens >= len(talk.prompts[last])
            assert load.encoded_images == before.encoded_images
            assert client.tokens.pop(AGAIN) == client.tokens[TURN]
            assert set(client.finished.values()) == {(FinishReason.LENGTH, "")}
            numbers.update({TURN: last, 10: SAMPLED, 11: SAMPLED})
            return {AGAIN: more, **client.tokens}

    tokens = with_worker(path, serve, num_shard, use)
    more = tokens.pop(AGAIN)
    for request_id, answer in tokens.items():
        number = numbers[request_id]
        ids = [*talk.prompts[number], *(more if request_id == TURN else ())]
        logits = oracle.logits(ids, talk.inputs(ORDERS[number]), answer).clone()
        logits[:, IMAGE] = -torch.inf
        likeliest = logits[len(ids) - 1 : -1].argmax(-1).tolist()
        assert answer == likeliest, f"request {request_id}"


@pytest.mark.parametrize("name", served(ENGINES))
def test_an_engine_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    check_engine(name, tmp_path / "model", 1)


@pytest.mark.parametrize("name", served(SHARDED))
def test_so_do_two_shards(name: str, tmp_path: Path) -> None:
    check_engine(name, tmp_path / "model", 2)

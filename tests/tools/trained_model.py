"""Trains a small Llama on the standard library's sources: a model whose weights mean something.

    python -m tests.tools.trained_model OUT [--steps 400] [--layers 4]
    python -m tests.tools.trained_model OUT --from tgi_cli/demo/model --repeats

4 layers, hidden 256, 4.2 M parameters, a byte-level BPE of 2048 tokens: about two minutes on two
cores. Quantization loses next to nothing of random weights, and nothing that could be compared.

With fewer layers and the same seed the tokenizer and the texts are the same: a draft model.

``--from`` goes on with a trained checkpoint and keeps its tokenizer. With ``--repeats``, rows are
1024 tokens long and quote a passage of themselves several times: the bundled model learns in some
1300 steps (ten minutes) to copy its context as large models do, on which drafts out of it depend.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import sysconfig
import time
from collections import deque
from pathlib import Path
from statistics import fmean

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tools.demo import corpus
from tests.tools.demo.tokenizer import END_OF_TEXT_ID, save_tokenizer, train_tokenizer

VOCABULARY = 2048
LENGTH = 256
LENGTH_OF_REPEATS = 1024
TOKENS = 2048
"""In a step: 8 rows of 256 tokens, or 2 of 1024."""
STEPS = 400
_TEXTS = 400
"""Modules of the standard library that are read."""


def passage(stream: torch.Tensor, length: int) -> torch.Tensor:
    """Return ``length`` consecutive tokens of the corpus, from a random place."""
    start = int(torch.randint(len(stream) - length, ()))
    return stream[start : start + length]


def row_with_repeats(stream: torch.Tensor, length: int) -> torch.Tensor:
    """Return ``length`` tokens in which one passage comes several times, other text between."""
    repeated = passage(stream, random.randint(48, length // 2))
    parts: list[torch.Tensor] = []
    while sum(map(len, parts)) < length:
        start = random.randrange(len(repeated) // 2)
        parts += [passage(stream, random.randint(1, 96)), repeated[start:]]
    return torch.cat(parts)[:length]


def new_model(layers: int) -> LlamaForCausalLM:
    """Return the miniature with random weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def train(
    out: Path,
    steps: int = STEPS,
    seed: int = 0,
    layers: int = 4,
    start: Path | None = None,
    repeats: bool = False,
) -> float:
    """Write a trained checkpoint (bfloat16) into ``out``.

    Args:
        out: folder of the checkpoint.
        steps: of the optimizer, with 2,048 tokens each.
        seed: of the texts and weights.
        layers: of a new model.
        start: folder of a checkpoint to go on with, at a third of the learning rate.
        repeats: rows quote themselves; see the module's docstring.

    Returns:
        The mean loss of the last 40 steps.
    """
    length = LENGTH_OF_REPEATS if repeats else LENGTH
    torch.manual_seed(seed)
    random.seed(seed)
    stdlib = Path(sysconfig.get_path("stdlib"))
    documents = [each for each in corpus.read_modules(stdlib) if not corpus.is_heldout(each)]
    texts = [each.text for each in random.sample(documents, min(_TEXTS, len(documents)))]
    if start is None:
        tokenizer = train_tokenizer(texts[::4], VOCABULARY)
    else:
        tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
    stream = torch.tensor(
        [token for text in texts for token in (*tokenizer.encode(text).ids, END_OF_TEXT_ID)]
    )
    model = new_model(layers) if start is None else LlamaForCausalLM.from_pretrained(start)
    model = model.float().train()
    peak = 3e-3 if start is None else 1e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
    losses: deque[float] = deque(maxlen=40)
    fast = torch.cpu._is_avx512_bf16_supported()  # elsewhere, float32 is many times faster
    for step in range(steps):
        rate = peak * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = torch.stack(
            [
                (row_with_repeats if repeats else passage)(stream, length + 1)
                for _ in range(TOKENS // length)
            ]
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=fast):
            logits = model(batch[:, :-1]).logits
        loss = cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 40 == 39:
            print(f"step {step + 1}: loss {fmean(losses):.3f}", file=sys.stderr)
    model.eval().bfloat16().save_pretrained(out)
    save_tokenizer(tokenizer, out, model.config.max_position_embeddings)
    return fmean(losses)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.trained_model", description=__doc__
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--from", dest="start", type=Path, help="checkpoint to go on with")
    parser.add_argument("--repeats", action="store_true", help="rows that quote themselves")
    arguments = parser.parse_args()
    began = time.monotonic()
    loss = train(**vars(arguments))
    print(f"{arguments.out}: loss {loss:.3f} after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()

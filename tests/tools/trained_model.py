"""Trains a small Llama on the standard library's sources: a model whose weights mean something.

    python -m tests.tools.trained_model OUT [--steps 400] [--layers 4]

4 layers, hidden 256, 4.2 M parameters, a byte-level BPE of 2048 tokens: about two minutes on two
cores. Quantization loses next to nothing of random weights, and nothing that could be compared.

With fewer layers and the same seed the tokenizer and the texts are the same: a draft model.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import sysconfig
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tools.demo import corpus
from tests.tools.demo.tokenizer import END_OF_TEXT_ID, save_tokenizer, train_tokenizer

VOCABULARY = 2048
LENGTH = 256
ROWS = 8
STEPS = 400
_TEXTS = 400
"""Modules of the standard library that are read."""


def train(out: Path, steps: int = STEPS, seed: int = 0, layers: int = 4) -> float:
    """Write a trained checkpoint (bfloat16) into ``out``; returns its last loss."""
    torch.manual_seed(seed)
    random.seed(seed)
    stdlib = Path(sysconfig.get_path("stdlib"))
    documents = [each for each in corpus.read_modules(stdlib) if not corpus.is_heldout(each)]
    texts = [each.text for each in random.sample(documents, min(_TEXTS, len(documents)))]
    tokenizer = train_tokenizer(texts[::4], VOCABULARY)
    stream = torch.tensor(
        [token for text in texts for token in (*tokenizer.encode(text).ids, END_OF_TEXT_ID)]
    )
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
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    loss = torch.zeros(())
    for step in range(steps):
        rate = 3e-3 * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(stream) - LENGTH - 1, (ROWS,)).tolist()
        batch = torch.stack([stream[start : start + LENGTH + 1] for start in starts])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1]).logits
        loss = cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 40 == 39:
            print(f"step {step + 1}: loss {loss.item():.3f}", file=sys.stderr)
    model.eval().bfloat16().save_pretrained(out)
    save_tokenizer(tokenizer, out, config.max_position_embeddings)
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.trained_model", description=__doc__
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    began = time.monotonic()
    loss = train(arguments.out, arguments.steps, arguments.seed, arguments.layers)
    print(f"{arguments.out}: loss {loss:.3f} after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()

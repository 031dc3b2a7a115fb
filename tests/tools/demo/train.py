"""Train the bundled model: `python -m tests.tools.demo.train --docs SOURCES --out FOLDER`.

Reads the standard library's modules and the documentation's sources, trains the tokenizer, then
a 4.5 M parameter Llama on both, mixed with question and answer pairs made of the same text, and
writes a checkpoint that `transformers` loads. Matrices learn with Muon, the rest with AdamW;
windows grow from 256 to 2048 tokens, and the learning rate follows a cosine.
"""

import argparse
import json
import math
import random
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress, TextColumn
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tests.tools.demo import corpus, dialogs
from tests.tools.demo import tokenizer as tokens
from tests.tools.demo.windows import ChatWindows, TextWindows, encode_stream
from tgi_cli.demo import HELDOUT_PATH, heldout_text

VOCAB_SIZE = 4096
MAX_LENGTH = 2048
BATCH_TOKENS = 4096
TEMPERATURE = 0.1
"""Default of requests: at higher ones, a model of this size writes nonsense."""
MATRIX_LR, OTHER_LR, WARMUP_STEPS = 4e-3, 3e-3, 60
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Phase:
    """A part of training: it lasts until `until` (fraction of the whole).

    Its batches hold `length`-token windows, a `chat` share of which are conversations.
    """

    until: float
    length: int
    chat: float


PHASES = (
    Phase(until=0.35, length=256, chat=0.15),
    Phase(until=0.60, length=512, chat=0.30),
    Phase(until=0.75, length=1024, chat=0.40),
    Phase(until=1.00, length=2048, chat=0.40),
)


def llama_config() -> LlamaConfig:
    """Return the model's shape: 5 layers of 256, 4 query and 2 key-value heads of 64."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=tokens.END_OF_TEXT_ID,
        eos_token_id=tokens.EOS_IDS,
        pad_token_id=tokens.END_OF_TEXT_ID,
    )


def perplexity(model: LlamaForCausalLM, ids: list[int], window: int = 1024) -> float:
    """Return exp of the mean loss over `ids`, read in separate windows of `window` tokens."""
    loss, count = 0.0, 0
    with torch.inference_mode():
        for start in range(0, len(ids) - 1, window):
            chunk = torch.tensor([ids[start : start + window + 1]])
            logits = model(input_ids=chunk[:, :-1], use_cache=False).logits[0].float()
            loss += functional.cross_entropy(logits, chunk[0, 1:], reduction="sum").item()
            count += chunk.shape[1] - 1
    return math.exp(loss / count)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model, rounded to bfloat16, and its tokenizer to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = LlamaForCausalLM(llama_config())
    rounded.load_state_dict(model.state_dict())
    rounded.bfloat16()
    rounded.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokens.END_OF_TEXT_ID,
        eos_token_id=tokens.EOS_IDS,
        pad_token_id=tokens.END_OF_TEXT_ID,
        do_sample=True,
        temperature=TEMPERATURE,
    )
    rounded.save_pretrained(folder)
    tokens.save_tokenizer(tokenizer, folder, MAX_LENGTH)


class Trainer:
    """One training run; everything random in it follows from `seed`."""

    def __init__(
        self,
        documents: list[corpus.Document],
        exchanges: list[dialogs.Exchange],
        tokenizer: Tokenizer,
        seed: int,
        compiled: bool,
        peak: float = 1.0,
    ) -> None:
        torch.manual_seed(seed)
        rng = random.Random(seed)
        self._stream = encode_stream(documents, tokenizer, rng)
        self._text = TextWindows(self._stream, np.random.default_rng(seed))
        self._chat = ChatWindows(exchanges, tokenizer, rng)
        self.model = LlamaForCausalLM(llama_config())
        self._loss = self._eager_loss
        if compiled:
            self._loss = torch.compile(self._eager_loss, dynamic=False)
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for name, parameter in self.model.named_parameters():
            chosen = matrices if parameter.ndim == 2 and "embed" not in name else others
            chosen.append(parameter)
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=MATRIX_LR, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=OTHER_LR, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._rates = [MATRIX_LR * peak, OTHER_LR * peak]
        self.steps = 0

    @property
    def corpus_tokens(self) -> int:
        """How many tokens one pass over the text has, conversations not counted."""
        return len(self._stream)

    def _eager_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model.model(input_ids=inputs, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden)
        return functional.cross_entropy(logits.view(-1, VOCAB_SIZE).float(), targets.reshape(-1))

    def step(self, done: float) -> float:
        """Take one optimizer step at fraction `done` of the run; return its loss."""
        phase = next(phase for phase in PHASES if done < phase.until or phase is PHASES[-1])
        rows = BATCH_TOKENS // phase.length
        # Rounding up and down at random keeps the share right when a batch has two windows.
        chats = int(rows * phase.chat + torch.rand(()).item())
        drawn = [
            (self._chat if row < chats else self._text).draw(phase.length + 1)
            for row in range(rows)
        ]
        batch = torch.from_numpy(np.stack(drawn).astype(np.int64))
        loss = self._loss(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.steps += 1
        scale = min(1.0, self.steps / WARMUP_STEPS) * (0.02 + 0.98 * _cosine(done))
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()


def _cosine(done: float) -> float:
    return 0.5 + 0.5 * math.cos(math.pi * min(done, 1.0))


def main() -> None:
    """Parse the command line, train, and write the checkpoint and `training.json`."""
    options = _parse()
    console = Console()
    torch.set_num_threads(options.threads)
    everything = [*corpus.read_modules(options.stdlib), *corpus.read_pages(options.docs)]
    if not any(document.kind == "docs" for document in everything):
        raise SystemExit(f"no documentation sources (*.rst.txt or *.rst) below {options.docs}")
    if options.write_heldout:
        corpus.write_heldout(everything, HELDOUT_PATH)
    documents = [document for document in everything if not corpus.is_heldout(document)]
    exchanges = dialogs.collect(documents, _HERE / "smalltalk.json")
    tokenizer = _tokenizer(options.start, documents, exchanges, options.seed)
    trainer = Trainer(documents, exchanges, tokenizer, options.seed, options.compile, options.peak)
    if options.start:
        earlier = LlamaForCausalLM.from_pretrained(options.start, dtype=torch.float32)
        trainer.model.load_state_dict(earlier.state_dict())
    console.print(
        f"{len(documents)} documents of {trainer.corpus_tokens / 1e6:.2f} M tokens, "
        f"{len(exchanges)} exchanges, {trainer.model.num_parameters() / 1e6:.2f} M parameters"
    )
    heldout = tokenizer.encode(heldout_text()).ids

    def checkpoint(minutes: float) -> None:
        save(trainer.model, tokenizer, options.out)
        rounded = LlamaForCausalLM.from_pretrained(options.out, dtype=torch.float32)
        facts = {
            "seed": options.seed,
            "steps": trainer.steps,
            "tokens": trainer.steps * BATCH_TOKENS,
            "minutes": round(minutes, 1),
            "heldout_tokens": len(heldout),
            "heldout_perplexity": round(perplexity(rounded, heldout), 3),
        }
        (options.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
        console.print(f"{minutes:.1f} min: {facts}")

    run(trainer, options.steps, options.minutes, options.save_every, console, checkpoint)


def _tokenizer(
    start: Path | None,
    documents: list[corpus.Document],
    exchanges: list[dialogs.Exchange],
    seed: int,
) -> Tokenizer:
    if start:
        return Tokenizer.from_file(str(start / "tokenizer.json"))
    conversations = dialogs.epoch(exchanges, random.Random(seed))
    texts = [*(document.text for document in documents), *map(tokens.render, conversations)]
    return tokens.train_tokenizer(texts, VOCAB_SIZE)


def run(
    trainer: Trainer,
    steps: int,
    minutes: float | None,
    save_every: float,
    console: Console,
    checkpoint: Callable[[float], None],
) -> None:
    """Step until `steps` (or, when given, for `minutes`), calling `checkpoint` on the way.

    `checkpoint` gets the minutes elapsed; it is called every `save_every` minutes and at the end.
    """
    start = saved = time.monotonic()
    mean = 0.0
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=1.0, state="")
        done = 0.0
        while done < 1.0:
            loss = trainer.step(done)
            mean = loss if trainer.steps == 1 else 0.98 * mean + 0.02 * loss
            now = time.monotonic()
            done = (now - start) / (60 * minutes) if minutes else trainer.steps / steps
            rate = trainer.steps * BATCH_TOKENS / (now - start)
            state = f"step {trainer.steps}  loss {mean:.3f}  {rate:.0f} tokens/s"
            progress.update(task, completed=min(done, 1.0), state=state)
            if now - saved > 60 * save_every or done >= 1.0:
                checkpoint((now - start) / 60)
                saved = time.monotonic()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.demo.train", description=__doc__)
    add = parser.add_argument
    add(
        "--docs",
        type=Path,
        required=True,
        help="folder of the documentation's sources (*.rst.txt or *.rst): _sources of the Debian "
        "package python3.11-doc or of docs.python.org's HTML archive, or CPython's Doc folder",
    )
    add(
        "--stdlib",
        type=Path,
        default=Path(sysconfig.get_path("stdlib")),
        help="folder of the standard library's modules (default: %(default)s)",
    )
    add("--out", type=Path, required=True, help="folder for the checkpoint")
    add("--steps", type=int, default=3600, help="optimizer steps (default: %(default)s)")
    add(
        "--minutes",
        type=float,
        help="train for this time instead; the schedule follows the clock, so that a run on a "
        "busy machine ends in time but is not repeated exactly",
    )
    add("--save-every", type=float, default=5.0, help="minutes between checkpoints (default: 5)")
    add("--start", type=Path, help="go on from this checkpoint instead of from random weights")
    add(
        "--peak",
        type=float,
        default=1.0,
        help="factor of the highest learning rate; about 0.3 goes well with --start (default: 1)",
    )
    add("--seed", type=int, default=0, help="seed of everything random (default: 0)")
    add("--threads", type=int, default=2, help="threads of PyTorch (default: 2)")
    add("--compile", action="store_true", help="compile the loss (faster; needs a C++ compiler)")
    add(
        "--write-heldout",
        action="store_true",
        help="write the held-out files of the package anew from the same sources",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

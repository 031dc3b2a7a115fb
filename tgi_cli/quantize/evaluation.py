"""Compares a quantized checkpoint with its original; both run block after block, side by side.

Perplexity may change little while the model degrades; the divergence of the distributions shows it
(https://arxiv.org/abs/2407.09141).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp, nan
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from tgi_cli.quantize.block_runner import ActivationFile, BlockRunner
from tgi_cli.quantize.offloaded_model import OffloadedModel, stored_size

WINDOW = 256
"""Tokens per sequence: logits of a large vocabulary take memory."""

TOKENS = 8192
"""Tokens that are compared at most."""

_ROWS = 64
"""Rows of logits that are compared at a time."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A quantized checkpoint compared with its original.

    Attributes:
        tokens: number of compared tokens.
        perplexity, original_perplexity: of the text, within windows.
        kl: mean KL divergence from the original's distributions, in nats.
        top1: share of positions at which both have the same most likely token.
        num_bytes, original_bytes: size of the weights on disk.
    """

    tokens: int
    perplexity: float
    original_perplexity: float
    kl: float
    top1: float
    num_bytes: int
    original_bytes: int

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Rows of a table: metric, original, quantized."""
        yield "perplexity", f"{self.original_perplexity:.3f}", f"{self.perplexity:.3f}"
        yield "KL divergence (nats per token)", "0", f"{self.kl:.2e}"
        yield "same most likely token", "100 %", f"{100 * self.top1:.2f} %"
        yield "weights (MiB)", f"{self.original_bytes / 2**20:.1f}", f"{self.num_bytes / 2**20:.1f}"


def evaluate(
    original: Path,
    quantized: Path,
    ids: Tensor,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Compare two checkpoints of one architecture on windows of text.

    Two blocks are in memory at a time, then two heads.

    Args:
        original, quantized: folders of the checkpoints.
        ids: int64 [windows, tokens].
        device: where to compute.
        trust_remote_code: run code from the checkpoints.
        progress: called with the number of finished blocks and their total.
    """
    ids = ids[: max(1, TOKENS // ids.shape[1])]
    with torch.no_grad(), TemporaryDirectory(prefix="tgi-evaluation-") as scratch:
        sides = [
            _EvaluatedModel(folder, ids, device, trust_remote_code, Path(scratch) / f"{number}-")
            for number, folder in enumerate((original, quantized))
        ]
        count = len(sides[0].model.blocks)
        for block in range(count):
            for side in sides:
                side.step(block)
            if progress is not None:
                progress(block + 1, count)
        sums = torch.zeros(4, dtype=torch.float64)
        sides[0].model.materialize_rest(head=True)
        sides[1].model.share_rest(sides[0].model)
        sides[1].model.materialize_rest(head=True)
        for number, (start, stop) in enumerate(sides[0].runner.batches):
            first, second = (side.logits(number) for side in sides)
            for row in range(stop - start):
                sums += _compare(first[row], second[row], ids[start + row].to(first.device))
        read = len(ids) * (ids.shape[1] - 1)
        return Evaluation(
            tokens=ids.numel(),
            original_perplexity=exp(float(sums[0]) / read) if read else nan,
            perplexity=exp(float(sums[1]) / read) if read else nan,
            kl=float(sums[2]) / ids.numel(),
            top1=float(sums[3]) / ids.numel(),
            original_bytes=sides[0].num_bytes,
            num_bytes=sides[1].num_bytes,
        )


class _EvaluatedModel:
    """One of the two checkpoints, with its hidden states."""

    def __init__(
        self,
        folder: Path,
        ids: Tensor,
        device: torch.device,
        trust_remote_code: bool,
        scratch: Path,
    ) -> None:
        self.model = OffloadedModel(folder, device, trust_remote_code)
        self.runner = BlockRunner(self.model, ids)
        self._scratch = scratch
        hidden = self.runner.begin(self._path(0))
        assert hidden is not None
        self._hidden: ActivationFile = hidden

    @property
    def num_bytes(self) -> int:
        return sum(map(stored_size, self.model.stored.values()))

    def step(self, block: int) -> None:
        """Run one block."""
        path = self.model.block_paths[block]
        self.model.materialize(path)
        outputs = self.runner.run_all(block, self._hidden, self._path(block + 1))
        self.model.release(path)
        self._hidden.remove()
        self._hidden = outputs

    def logits(self, batch: int) -> Tensor:
        return self.runner.logits(batch, self._hidden.read(*self.runner.batches[batch]))

    def _path(self, block: int) -> Path:
        return self._scratch.with_name(f"{self._scratch.name}{block}.bin")


def _compare(first: Tensor, second: Tensor, ids: Tensor) -> Tensor:
    """Sums over a window: both negative log-likelihoods, KL divergence, equal top tokens."""
    sums = torch.zeros(4, dtype=torch.float64)
    for start in range(0, len(ids), _ROWS):
        p, q = (log_softmax(x[start : start + _ROWS].float(), -1) for x in (first, second))
        nexts = ids[start + 1 : start + 1 + _ROWS, None]
        sums[0] -= p[: len(nexts)].gather(1, nexts).double().sum().cpu()
        sums[1] -= q[: len(nexts)].gather(1, nexts).double().sum().cpu()
        sums[2] += kl_div(q, p, reduction="sum", log_target=True).double().cpu()
        sums[3] += (p.argmax(-1) == q.argmax(-1)).double().sum().cpu()
    return sums

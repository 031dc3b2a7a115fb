"""Quantizes a model folder into a checkpoint, block after block; an interrupted run can resume."""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tgi_cli.device import describe as describe_device
from tgi_cli.device.memory import large_blocks_apart
from tgi_cli.errors import ConfigError, TgiError
from tgi_cli.files import read_bytes
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.registry import quantization_name
from tgi_cli.process.progress import ProgressReporter
from tgi_cli.quantization.algorithms.grid import rtn
from tgi_cli.quantization.algorithms.recipe import Recipe, check_recipe, describe_recipe
from tgi_cli.quantize import awq, gptq
from tgi_cli.quantize.block_runner import BlockRunner
from tgi_cli.quantize.calibration import BUNDLED, Calibration, heldout_windows, load_calibration
from tgi_cli.quantize.checkpoint_writer import SHARD_BYTES, write_checkpoint
from tgi_cli.quantize.evaluation import WINDOW, Evaluation, evaluate
from tgi_cli.quantize.gptq import BlockTask, LayerReport, pack_layer
from tgi_cli.quantize.model_card import model_card
from tgi_cli.quantize.offloaded_model import OffloadedModel
from tgi_cli.quantize.options import QuantizeOptions
from tgi_cli.quantize.selection import LayerSelection, select_layers
from tgi_cli.quantize.unfinished_run import UnfinishedRun
from tgi_cli.version import __version__

log = logging.getLogger(__name__)

CALIBRATED = {"gptq": gptq.quantize_block, "awq": awq.quantize_block}
"""Functions that quantize a block, by methods that need calibration samples."""

_DEFAULT_CONTEXT = 2048
"""Context length of models whose config has none."""


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """One checkpoint to quantize.

    Attributes:
        model: the folder of an unquantized checkpoint.
        out: the folder to create.
        recipe: how weights are quantized; takes precedence over ``options``.
        options: calibration, choice of layers, evaluation, resuming.
        command_line: for the model card.
        shard_bytes: size limit of a file of weights.
    """

    model: Path
    out: Path
    recipe: Recipe
    options: QuantizeOptions
    command_line: str = ""
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """A finished checkpoint.

    Attributes:
        path: its folder.
        layers: reports of the quantized layers, in the model's order.
        ignored: linear layers that were not quantized.
        num_bytes: size of the weights.
        evaluation: comparison with the original, if requested.
        seconds: duration of this run.
        source: source of the calibration samples; empty if there were none.
    """

    path: Path
    layers: Sequence[LayerReport]
    ignored: Sequence[str]
    num_bytes: int
    evaluation: Evaluation | None
    seconds: float
    source: str


def quantize(job: QuantizeJob, progress: ProgressReporter | None = None) -> QuantizeResult:
    """Run a job.

    An interrupted run leaves the finished blocks in ``OUT.partial``; the same job with ``resume``
    continues there, and arrives at the same bytes.

    Raises:
        ConfigError: the recipe, a pattern, a file or a folder is invalid.
        UnsupportedModelError: the model cannot be quantized with this method.
        CheckpointError, ModelError, HubError: the model or the calibration text is unavailable.
    """
    began = time.monotonic()
    check_recipe(job.recipe)
    progress = progress or ProgressReporter(show_bar=False, log_interval=None)
    with torch.no_grad(), large_blocks_apart(), progress:
        device = torch.device(describe_device(job.options.device).kind)
        model = OffloadedModel(job.model, device, job.options.trust_remote_code)
        if model.config.quantization is not None:
            raise ConfigError(
                f"the model is already quantized with {quantization_name(model.config)}",
                "name the checkpoint that it was made from",
            )
        job = replace(job, recipe=_with_scale_dtype(job.recipe, model.config))
        selection = select_layers(model, job.recipe, job.options.include, job.options.exclude)
        if any(entry.part is not None for entry in model.stored.values()):
            log.info("stacked experts are written one by one, under the family's names")
        _warn_about_unfit_layers(selection)
        samples = _load_samples(job, model)
        unfinished = UnfinishedRun(job.out, _identity(job, model, samples), job.options.resume)
        run = _Run(job, model, selection, samples, unfinished, progress)
        try:
            run.quantize_blocks()
        except TgiError:
            if not unfinished.done:
                unfinished.discard()
            raise
        num_bytes, evaluation = run.finish()
    return QuantizeResult(
        job.out,
        tuple(unfinished.layers),
        selection.ignored,
        num_bytes,
        evaluation,
        time.monotonic() - began,
        run.source,
    )


@dataclass
class _Run:
    """A job with everything that it works on."""

    job: QuantizeJob
    model: OffloadedModel
    selection: LayerSelection
    samples: Calibration | None
    unfinished: UnfinishedRun
    progress: ProgressReporter
    source: str = field(init=False, default="")

    def __post_init__(self) -> None:
        if self.samples is not None:
            count, length = self.samples.ids.shape
            self.source = f"{count} samples of {length} tokens: {self.samples.source}"

    def quantize_blocks(self) -> None:
        """Quantize the blocks that an earlier run left."""
        count = len(self.model.blocks)
        self.progress.start("quantizing", count, self.unfinished.done)
        if self.samples is None:
            for index in range(self.unfinished.done, count):
                self._round_block(index)
            return
        last = max(index for index, layers in enumerate(self.selection.blocks) if layers)
        if self.unfinished.done <= last:
            self._calibrate_blocks(self.samples.ids, last)
        while self.unfinished.done < count:  # no layer of these blocks is selected
            self._commit({}, [])

    def _commit(self, tensors: dict[str, Tensor], layers: list[LayerReport]) -> None:
        self.unfinished.commit(tensors, layers)
        self.progress.update(self.unfinished.done)

    def _round_block(self, index: int) -> None:
        """Round a block's weights to nearest, one tensor after the other, without running it."""
        recipe = self.job.recipe
        tensors: dict[str, Tensor] = {}
        reports: list[LayerReport] = []
        layers = self.selection.blocks[index]
        for layer in layers:
            weight = self.model.tensor(layer.stored).to(self.model.device)
            result = rtn(weight.T.contiguous() if layer.transposed else weight, recipe)
            packed, report = pack_layer(layer, result, recipe)
            tensors |= packed
            reports.append(report)
            self.progress.advance(1 / len(layers))
        self._commit(tensors, reports)

    def _calibrate_blocks(self, ids: Tensor, last: int) -> None:
        """Quantize blocks up to ``last``, each with the outputs of the quantized ones before it."""
        model, unfinished = self.model, self.unfinished
        runner = BlockRunner(model, ids)
        first = unfinished.done
        written = runner.begin(unfinished.inputs(0) if first == 0 else None)
        inputs = written or runner.activations(unfinished.inputs(first))
        for index in range(first, last + 1):
            path = model.block_paths[index]
            model.materialize(path)
            task = BlockTask(
                runner,
                index,
                inputs,
                list(self.selection.blocks[index]),
                self.job.recipe,
                unfinished.folder,
                lambda share: self.progress.advance(0.9 * share),
            )
            if task.layers:
                CALIBRATED[self.job.recipe.method](task)
            outputs = None
            if index < last:
                outputs = runner.run_all(index, inputs, unfinished.inputs(index + 1))
                outputs.flush()
            model.release(path)
            self._commit(task.tensors, task.reports)
            inputs.remove()
            inputs = outputs or inputs

    def finish(self) -> tuple[int, Evaluation | None]:
        """Write the checkpoint, evaluate it if requested, and move it to its destination."""
        job, model, unfinished = self.job, self.model, self.unfinished
        folder = unfinished.folder / "checkpoint"
        if folder.exists():  # left by a run that was interrupted here
            shutil.rmtree(folder)
        num_bytes = write_checkpoint(
            folder,
            model.config,
            model.stored,
            [unfinished.block(index) for index in range(unfinished.done)],
            {layer.stored for block in self.selection.blocks for layer in block},
            job.recipe,
            self.selection.ignored,
            job.shard_bytes,
        )
        evaluation = None
        if job.options.evaluate:
            self.progress.start("evaluating", len(model.blocks))
            evaluation = evaluate(
                job.model,
                folder,
                self._evaluation_ids(),
                model.device,
                trust_remote_code=job.options.trust_remote_code,
                progress=lambda done, _: self.progress.update(done),
            )
        card = model_card(
            name=job.out.resolve().name,
            original=job.options.model_id,
            folder=job.model,
            description=describe_recipe(job.recipe),
            command=job.command_line,
            calibration=self.source,
            layers=unfinished.layers,
            ignored=len(self.selection.ignored),
            evaluation=evaluation,
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
        unfinished.finish(folder)
        return num_bytes, evaluation

    def _evaluation_ids(self) -> Tensor:
        """Unused text of the calibration data set if there is enough, else the bundled text."""
        samples = self.samples
        length = min(WINDOW, _context_length(self.model) or WINDOW)
        if samples is not None and len(samples.rest) and samples.source != BUNDLED:
            rest = samples.rest.flatten()
            if len(rest) >= length:
                return rest[: len(rest) // length * length].view(-1, length)
        ids = heldout_windows(self.job.model, length, self.job.options.trust_remote_code)
        if not len(ids):
            raise ConfigError(f"the held-out text is shorter than one window of {length} tokens")
        return ids


def _load_samples(job: QuantizeJob, model: OffloadedModel) -> Calibration | None:
    if job.recipe.method not in CALIBRATED:
        return None
    samples = load_calibration(
        job.model, job.options, context=_context_length(model) or _DEFAULT_CONTEXT
    )
    count, length = samples.ids.shape
    log.info("calibrating with %d samples of %d tokens: %s", count, length, samples.source)
    return samples


def _context_length(model: OffloadedModel) -> int | None:
    return getattr(model.decoder.config, "max_position_embeddings", None)


def _with_scale_dtype(recipe: Recipe, config: ModelConfig) -> Recipe:
    """compressed-tensors stores scales in the model's dtype, the other formats in float16."""
    if recipe.format != "compressed-tensors":
        return recipe
    return replace(recipe, scale_dtype=getattr(torch, config.dtype))


def _warn_about_unfit_layers(selection: LayerSelection) -> None:
    for reason in sorted(set(selection.unfit.values())):
        names = [name for name, each in selection.unfit.items() if each == reason]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        log.warning("%s%s: not quantized, %s", names[0], more, reason)


def _identity(job: QuantizeJob, model: OffloadedModel, samples: Calibration | None) -> Any:
    """Everything that determines the output, to the last bit."""
    digest = hashlib.sha256(read_bytes(job.model / "config.json"))
    for name, entry in sorted(model.stored.items()):
        digest.update(f"{name} {entry.dtype} {entry.shape}\n".encode())
    files = sorted({entry.file for entry in model.stored.values()})
    digest.update(" ".join(str(file.stat().st_size) for file in files).encode())
    return {
        "version": __version__,
        "model": digest.hexdigest(),
        "options": {key: str(value) for key, value in asdict(job.recipe).items()},
        "calibration": None if samples is None else samples.digest,
        "layers": [list(job.options.include), list(job.options.exclude)],
        "device": [model.device.type, str(model.dtype)],
    }

"""How a step's forward pass is executed; the runner picks an executor for each step.

============  =====================================  ==========================================
executor      runs                                   steps
============  =====================================  ==========================================
CUDA graphs   kernels recorded at warm-up            decodes alone, up to the largest graph
mixed graphs  kernels recorded at warm-up            a few prompt tokens, with or without decodes
CPU program   C++ kernels, without Python between    those without adapters
eager         the model's modules, one by one        all
============  =====================================  ==========================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tgi_cli.attention import PagedAttention
from tgi_cli.models.base import CapturedStates, CausalLM, ImageRows
from tgi_cli.models.cpu_program import CpuProgram
from tgi_cli.models.speculators.base import TargetStates
from tgi_cli.sampling.table import SamplingBatch
from tgi_cli.worker.step_inputs import InputPreparer, StepBatch, StepInputs


class Forward(Protocol):
    """Computes the layers: a model, or the program compiled from it."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        images: ImageRows | None = None,
    ) -> Tensor:
        """Hidden states [T, H] of a flat batch; ids and positions are int64 [T].

        ``images`` has the vectors of tokens that stand for parts of images; None without any.
        """
        ...


class RunnableModel(Forward, Protocol):
    """What the runner needs of a model; :class:`tgi_cli.models.CausalLM` is one."""

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, V] of hidden states [N, H]."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """The result of a forward pass; valid until the next one runs.

    Attributes:
        output: [N, H], the hidden state of the last token of each sampled sequence; or
            float32 [N, V], its logits, if ``is_logits``.
        batch: the N sampled sequences.
        targets: int64 [N], where their tokens go: row * width + position.
        all_hidden: [T, H], if the step reports on prompts.
        states: [T, W], the hidden states that a drafter reads, if there is one that reads any and
            the step proposes drafts.
        is_logits: whether the executor has also computed the head.
        choose: writes the likeliest tokens to the pool and returns them and the bits of their
            log-probabilities, int32 [N, 2], valid until it is called for another step. None where
            the sampler has to choose.
    """

    output: Tensor
    batch: SamplingBatch
    targets: Tensor
    all_hidden: Tensor | None = None
    is_logits: bool = False
    states: Tensor | None = None
    choose: Callable[[], Tensor] | None = None


class Executor(Protocol):
    """Runs forward passes of the steps that it supports."""

    def supports(self, batch: StepBatch) -> bool:
        """Whether it can run this step."""
        ...

    def run(self, batch: StepBatch) -> ForwardOutput:
        """Start the forward pass of a step; does not wait for the device."""
        ...


class EagerExecutor:
    """Runs the model's modules on flat inputs.

    Args:
        model: computes the layers.
        attention: holds the KV cache.
        inputs: prepares the inputs of each step.
        needs: the hidden states that a drafter reads.
    """

    def __init__(
        self,
        model: Forward,
        attention: PagedAttention,
        inputs: InputPreparer,
        needs: TargetStates = "none",
    ) -> None:
        self._model = model
        self._needs = needs
        self._attention = attention
        self._states = attention.states
        self._inputs = inputs

    def supports(self, batch: StepBatch) -> bool:
        return True

    def run(self, batch: StepBatch) -> ForwardOutput:
        inputs = self._inputs.prepare(batch)
        self._attention.plan(inputs.metadata)
        if self._states is not None and inputs.metadata.states is not None:
            self._states.plan(inputs.metadata.states)
        hidden, states = self._run(inputs, self._needs if batch.step.proposals else "none")
        last = hidden if inputs.last is None else hidden.index_select(0, inputs.last)
        all_hidden = hidden if batch.reports_prompts else None
        return ForwardOutput(last, inputs.batch, inputs.targets, all_hidden, states=states)

    def _run(self, inputs: StepInputs, needs: TargetStates) -> tuple[Tensor, Tensor | None]:
        """Hidden states of all tokens, and those that a drafter reads, if it follows the step."""
        given = inputs.input_ids, inputs.positions, self._attention
        if not isinstance(needs, tuple):
            hidden = self._model.forward(*given, inputs.images)
            return hidden, hidden if needs == "final" else None
        captured = CapturedStates(needs)
        assert isinstance(self._model, CausalLM | CpuProgram)
        hidden = self._model.forward_capturing(*given, captured, inputs.images)
        return hidden, captured.joined()


class ProgramExecutor(EagerExecutor):
    """Runs a :class:`tgi_cli.models.cpu_program.CpuProgram`, which applies no adapters."""

    def supports(self, batch: StepBatch) -> bool:
        return batch.adapter_slots is None

"""Runs steps of encoder-decoder models, dividing tokens between encoder and decoder.

To the engine, a sequence is its prompt, the token that the decoder starts with, and the answer.
Chunks before the end of a prompt compute nothing, as an encoder takes the whole prompt at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from tgi_cli.attention import PagedAttention
from tgi_cli.models.base import DecoderTokens, EncoderDecoderLM
from tgi_cli.worker.executors import ForwardOutput
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.step_inputs import InputPreparer, StepBatch


class EncoderDecoderExecutor:
    """Runs any step of an encoder-decoder model.

    Args:
        model: computes logits.
        attention: holds its keys and values.
        inputs: prepares what the sampler needs.
        table: the persistent batch.
    """

    def __init__(
        self,
        model: EncoderDecoderLM,
        attention: PagedAttention,
        inputs: InputPreparer,
        table: InputBatch,
    ) -> None:
        self._model = model
        self._attention = attention
        self._inputs = inputs
        self._table = table

    def supports(self, batch: StepBatch) -> bool:
        """See :class:`~tgi_cli.worker.executors.Executor`."""
        return True

    def run(self, batch: StepBatch) -> ForwardOutput:
        """See :class:`~tgi_cli.worker.executors.Executor`."""
        inputs = self._inputs.prepare(batch)
        logits = self._model.decode(self._sequences(batch), self._attention)
        return ForwardOutput(logits, inputs.batch, inputs.targets, is_logits=True)

    def _sequences(self, batch: StepBatch) -> Iterator[DecoderTokens]:
        step, table = batch.step, self._table
        for row, start, count, samples in zip(
            step.rows, step.starts, step.counts, step.samples, strict=True
        ):
            length, end = int(table.encoder_tokens[row]), start + count
            if end < length:
                continue
            tokens, first = table.tokens[row], max(start, length)
            encodes = start < length
            # The first decoder token is computed with the prompt, even if the chunk ends before it:
            # layers compute the keys and values of cross-attention as they use them.
            ids = tokens[first : max(end, length + 1)].long()
            yield DecoderTokens(
                ids=ids,
                start=first - length,
                samples=samples,
                encoder_tokens=length,
                encoder_ids=tokens[:length].long() if encodes else None,
                block_table=table.blocks[row].long(),
            )

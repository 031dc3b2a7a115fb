"""LoRA adapters on the host: read by a thread, copied to the device's slots by steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.layers.lora import LoraPair, LoraTable
from tgi_cli.models import CausalLM
from tgi_cli.models.lora import lora_targets, read_adapter
from tgi_cli.worker.sizing.memory import LOAD_REMEDY, out_of_memory_as_error

log = logging.getLogger(__name__)


class LoraCache:
    """Implements :class:`tgi_cli.engine.step.AdapterStore` for one model on one device.

    Args:
        model: built with ``table``.
        table: the model's slots, not allocated yet.
        dtype: dtype of the model.
        device: device of the model.
    """

    def __init__(
        self, model: CausalLM, table: LoraTable, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = table.allocate(dtype, device) / 2**20
        log.info("%d slots for adapters of rank %d: %.1f MiB", table.slots, table.rank, size)
        self._table = table
        self._targets = lora_targets(model)
        self._pin = device.type == "cuda"
        self._held: dict[int, list[LoraPair]] = {}
        # One thread: adapters are read in the order of their requests.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    def prepare_adapter(self, adapter_id: int, name: str, path: str) -> Future[None]:
        """See :meth:`tgi_cli.engine.step.AdapterStore.prepare_adapter`."""
        return self._reader.submit(self._read, adapter_id, Path(path))

    def forget_adapter(self, adapter_id: int) -> None:
        """See :meth:`tgi_cli.engine.step.AdapterStore.forget_adapter`."""
        self._held.pop(adapter_id, None)

    @torch.inference_mode()
    def _read(self, adapter_id: int, folder: Path) -> None:
        with out_of_memory_as_error(LOAD_REMEDY):
            pairs = read_adapter(folder, self._targets, self._table, self._pin)
        self._held[adapter_id] = pairs

    def put(self, adapters: Sequence[tuple[int, int]]) -> None:
        """Fill slots, given as (slot, adapter id)."""
        for slot, adapter_id in adapters:
            self._table.put(slot, self._held[adapter_id])

    def plan(self, slots: NDArray[np.int32] | None, token_slots: Tensor | None) -> None:
        """Prepare a step of sequences that use these slots; see :meth:`LoraTable.plan`."""
        self._table.plan([] if slots is None else np.unique(slots).tolist(), token_slots)

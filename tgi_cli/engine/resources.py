"""What all sequences on one worker share, whatever the policy that runs them."""

from __future__ import annotations

from tgi_cli.engine.block_store import BlockStore
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.host_blocks import HostBlocks, HostLoads
from tgi_cli.engine.image_encoding import NO_ENCODER, ImageEncoding
from tgi_cli.engine.kv_cache import KVCache
from tgi_cli.engine.lora_slots import LoraSlots
from tgi_cli.engine.prefix_loads import BlockSource, PrefixLoads
from tgi_cli.engine.step import AdapterStore
from tgi_cli.engine.step_pace import StepPace


class Resources:
    """What all sequences on one worker share, and the totals over all of them.

    Args:
        config: limits of a step and of a request.
        store: reads LoRA adapters, or None if the configuration has no slots for them.
        blocks: keeps copies of KV blocks, or None for none.

    Attributes:
        cache, pool: KV blocks.
        host: memory of the host after them; None if there is none.
        loads: brings back what is outside of the cache for waiting sequences.
        states: slots for recurrent states; None if the model has none.
        adapters: slots for LoRA adapters.
        pace: bounds the time of prompts and images in a step that streams wait for.
        images: plans the encoding of images, and chunks that must not be split; None if the model
            has neither.
        free_rows: rows of the worker that no sequence has.
        freed_rows: those of them whose release no step has sent to the worker yet.
        steps: number of scheduled steps, and the id of the next one.
        context_tokens, reused_tokens, prompt_tokens, drafted_tokens, accepted_tokens: see
            :class:`~tgi_cli.engine.metrics.EngineLoad`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        store: AdapterStore | None = None,
        blocks: BlockStore | None = None,
    ) -> None:
        self.config = config
        self.host = HostBlocks(config.num_host_blocks) if config.num_host_blocks else None
        self.cache = KVCache(config, blocks, None if self.host is None else self.host.offload)
        self.loads: BlockSource = PrefixLoads(self.cache, blocks)
        if self.host is not None:
            self.loads = HostLoads(self.cache, self.host)
        self.pool = self.cache.pool
        self.states = self.cache.states
        self.adapters = LoraSlots(config, store)
        self.pace = StepPace(config)
        self.images: ImageEncoding | None = None
        if config.encoder is not None or config.whole_prompts:
            self.images = ImageEncoding(config.encoder or NO_ENCODER, self.pace)
        self.free_rows = list(range(config.max_batch_size - 1, -1, -1))
        self.freed_rows: list[int] = []
        self.steps = 0
        self.context_tokens = 0
        self.reused_tokens = 0
        self.prompt_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0

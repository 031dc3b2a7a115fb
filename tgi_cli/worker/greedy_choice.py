"""How CUDA graphs choose tokens of steps whose sequences are all greedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from tgi_cli.device.distributed import Shard
from tgi_cli.models import CausalLM
from tgi_cli.sampling.sampler import Sampled, greedy
from tgi_cli.sampling.sharded import ShardedGreedy


class GreedyChoice(NamedTuple):
    """The likeliest tokens of logits, by work that is the same for any numbers.

    Attributes:
        width: width of the logits.
        choose: chooses a token for each row of them; None where the sampler has to.
        own_logits: computes them from hidden states, where they are those of this shard's part of
            the vocabulary, and all shards choose together; None where they are the model's.
    """

    width: int
    choose: Callable[[Tensor], Sampled] | None
    own_logits: Callable[[Tensor], Tensor] | None = None


def greedy_choice(model: CausalLM, shard: Shard, vocab_size: int) -> GreedyChoice:
    """How the graphs of a model choose tokens.

    A model of several shards must divide its vocabulary: elsewhere each shard would choose from
    logits of its own. Their last bits may differ from shard to shard, their texts may not.
    """
    if shard.size == 1:
        return GreedyChoice(vocab_size, greedy)
    own = model.own_vocabulary
    if own is None:
        return GreedyChoice(vocab_size, None)
    width = -(-vocab_size // shard.size)  # of the largest part: all shards have the same graphs
    return GreedyChoice(width, ShardedGreedy(shard, own.start), model.own_logits)

"""Sparse attention: an indexer chooses the tokens that a query attends to.

DeepSeek Sparse Attention (https://arxiv.org/abs/2512.02556) chooses single tokens, MiniMax M3
blocks of them, others pools by means of their keys. The indexer's keys are paged in a cache of
their own, whose :class:`~tgi_cli.attention.KVSpec` has ``index`` set.

A query that sees no more tokens than are chosen attends to all of them, by the backend's kernels.
For the other queries of a step keys and values are gathered token by token, by stock torch on any
device. Which of both it is depends on a query's position alone, and what is chosen and added up on
its own sequence: not on the rest of the step, nor on where a prompt was cut.

Not measured on a GPU; steps with sparse attention are not captured in CUDA graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from tgi_cli.attention.base import AttentionMetadata, PagedAttention
from tgi_cli.attention.cpu_plan import KEYS, QUERIES, round_up
from tgi_cli.attention.cpu_scores import Scoring, alike

_AT_ONCE = 1 << 24
"""Numbers in the tensors of a call: 64 MiB of float32."""


@dataclass(frozen=True, slots=True)
class _Queries:
    """Queries of one sequence each, or all of the same.

    Attributes:
        rows: int64 [n], their tokens in the flat batch.
        positions: int64 [n], ascending.
        table: int64 [n or 1, blocks], the blocks of each one's sequence, or of all.
        seen: how many tokens each of them sees, on the host.
    """

    rows: Tensor
    positions: Tensor
    table: Tensor
    seen: list[int]

    @property
    def shared(self) -> bool:
        """Whether they are of one sequence."""
        return len(self.table) == 1

    def parts(self, numbers: int) -> Iterator[_Queries]:
        """Neighbours that are computed together, where each takes so many numbers."""
        at_once = max(1, _AT_ONCE // numbers)
        for begin in range(0, len(self.seen), at_once):
            some = slice(begin, begin + at_once)
            table = self.table if self.shared else self.table[some]
            yield _Queries(self.rows[some], self.positions[some], table, self.seen[some])


@dataclass(frozen=True, slots=True, eq=False)
class SparsePlan:
    """A step's queries that see more than a number of tokens, and the others.

    Attributes:
        queries: the former.
        rows: int64 [n], their tokens in the flat batch, in the order of ``queries``.
        dense_rows: int64, the tokens of the others.
        dense: attention that is planned for these; None if there are none.
    """

    queries: list[_Queries]
    rows: Tensor
    dense_rows: Tensor
    dense: PagedAttention | None

    @classmethod
    def of(cls, attention: PagedAttention, limit: int) -> SparsePlan | None:
        """The plan of the step that ``attention`` is planned for; None if no query sees more.

        It is made once per step and limit.
        """
        metadata = attention.planned
        assert metadata is not None
        if max(metadata.kv_lens_host, default=0) <= limit:
            return None
        known: SparsePlan | None = metadata.sparse.get(limit)
        if known is None:
            known = metadata.sparse[limit] = _plan(attention, metadata, limit)
        return known


def _plan(attention: PagedAttention, metadata: AttentionMetadata, limit: int) -> SparsePlan:
    device, table = metadata.block_table.device, metadata.block_table.long()

    def tensor(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    queries: list[_Queries] = []
    decodes: list[tuple[int, int, int]] = []  # tokens seen, row, sequence
    dense_rows: list[int] = []
    short: list[tuple[int, int, int]] = []  # sequence, its tokens of the step, its KV
    start = 0
    lens = zip(metadata.query_lens_host, metadata.kv_lens_host, strict=True)
    for sequence, (query_len, kv_len) in enumerate(lens):
        count, end = min(query_len, max(0, kv_len - limit)), start + query_len
        if count < query_len:
            dense_rows += range(start, end - count)
            short.append((sequence, query_len - count, kv_len - count))
        if count and query_len == 1:
            decodes.append((kv_len, start, sequence))
        elif count:
            seen = list(range(kv_len - count + 1, kv_len + 1))
            rows, positions = list(range(end - count, end)), [last - 1 for last in seen]
            own = table[sequence : sequence + 1]
            queries.append(_Queries(tensor(rows), tensor(positions), own, seen))
        start = end
    if decodes:
        decodes.sort()  # those of similar length are computed together
        seen = [kv_len for kv_len, _, _ in decodes]
        rows, positions = [row for _, row, _ in decodes], [last - 1 for last in seen]
        own = table.index_select(0, tensor([sequence for _, _, sequence in decodes]))
        queries.append(_Queries(tensor(rows), tensor(positions), own, seen))
    kept = tensor(dense_rows)
    dense = None
    if short:
        dense = attention.beside()
        dense.plan(_shortened(metadata, short, kept))
    return SparsePlan(queries, torch.cat([each.rows for each in queries]), kept, dense)


def _shortened(
    metadata: AttentionMetadata, short: list[tuple[int, int, int]], rows: Tensor
) -> AttentionMetadata:
    """The step of these tokens: by sequence, how many there are in the step, and in its KV."""
    device = metadata.block_table.device
    query_lens, kv_lens = [each[1] for each in short], [each[2] for each in short]
    sequences = torch.tensor([each[0] for each in short], device=device)
    decodes = 0
    while decodes < len(query_lens) and query_lens[decodes] == 1:
        decodes += 1
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        block_table=metadata.block_table.index_select(0, sequences),
        slot_mapping=metadata.slot_mapping.index_select(0, rows),
        query_lens_host=query_lens,
        kv_lens_host=kv_lens,
        num_decodes=decodes,
    )


@dataclass(frozen=True, slots=True, eq=False)
class ChosenRows:
    """The tokens that the queries of a plan attend to.

    Attributes:
        plan: which queries.
        slots: int64 [n, 1 or kv_heads, k], where the chosen tokens are in the cache.
        hidden: bool of the same shape, which of them are not attended to; None if all are.
    """

    plan: SparsePlan
    slots: Tensor
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Pools:
    """Tokens that are chosen together: runs of this size, from the beginning of a text.

    Attributes:
        size: tokens of a pool.
        keys: from what is cached of pools, float32 [sequences, pools, size, width], and the
            positions of their first tokens, int64 [pools], to keys [sequences, pools, dim].
    """

    size: int
    keys: Callable[[Tensor, Tensor], Tensor]


def choose_tokens(
    attention: PagedAttention,
    layer: int,
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    count: int,
    pools: Pools | None = None,
) -> ChosenRows | None:
    """Store the index keys of a step, and choose the tokens that its queries attend to.

    A token's score is ``sum_h weights[h] * relu(query[h] . key)`` in float32
    (https://arxiv.org/abs/2512.02556, section 2.1). Of tokens with equal scores the earlier ones
    are chosen.

    Args:
        attention: planned for the step.
        layer: index of the cache of index keys.
        query: [T, heads, dim].
        key: [T, dim].
        weights: [T, heads].
        count: how many tokens are chosen.
        pools: chosen instead, as many as have ``count`` tokens. Then ``key`` is what they are made
            of; queries also attend to the tokens after the last complete pool that they see.

    Returns:
        The choice; None if no query sees more tokens than that.
    """
    attention.store(layer, key[:, None], None)
    size = 1 if pools is None else pools.size
    plan = SparsePlan.of(attention, count + size - 1)
    if plan is None:
        return None
    weights = _padded_heads(weights.float())
    within = torch.arange(size, device=query.device)
    chosen, hidden = [], []
    for part, scores in _scored(attention, layer, query, plan, pools=pools):
        # A row of weights as one of four: see cpu_plan.
        factors = pad(weights.index_select(0, part.rows)[:, None], (0, 0, 0, QUERIES - 1))
        totals = torch.bmm(factors, scores.relu_())[:, 0]
        own = part.positions[:, None]
        complete = (own + 1) // size
        totals.masked_fill_(_places(totals) >= complete, -math.inf)
        tokens = _best(totals, count // size)
        if pools is not None:
            tokens = (tokens[..., None] * size + within).flatten(1)
            tokens = torch.cat((tokens, complete * size + within[:-1]), 1)
            hidden.append(tokens > own)
        chosen.append(_slots(attention, part, tokens.minimum(own)))
    masked = torch.cat(hidden)[:, None] if hidden else None
    return ChosenRows(plan, torch.cat(chosen)[:, None], masked)


@dataclass(frozen=True, slots=True)
class BlockRule:
    """How many blocks of tokens are chosen.

    Attributes:
        size: tokens of a block; blocks are counted from the beginning of a text.
        count: number of the blocks that are chosen.
        local: how many of these are the query's own block and those right before it.
    """

    size: int
    count: int
    local: int


def choose_blocks(
    attention: PagedAttention, layer: int, query: Tensor, key: Tensor, rule: BlockRule
) -> ChosenRows | None:
    """As :func:`choose_tokens`, of the blocks with the highest scores, for each head of ``query``.

    A block's score is the highest ``query . key`` of its tokens, in float32. There are as many
    heads as KV heads of attention, and each chooses for those of its index.
    """
    attention.store(layer, key[:, None], None)
    plan = SparsePlan.of(attention, rule.size * rule.count)
    if plan is None:
        return None
    heads, within = query.shape[1], torch.arange(rule.size, device=query.device)
    chosen, hidden = [], []
    for part, scores in _scored(attention, layer, query, plan, rule.size):
        own = part.positions[:, None, None]
        seen = scores[:, :heads].masked_fill(_places(scores) > own, -math.inf)
        highest = seen.view(*seen.shape[:2], -1, rule.size).amax(-1)
        for back in range(rule.local):
            near = (own // rule.size - back).clamp_min(0).expand(-1, heads, -1)
            highest.scatter_(-1, near, math.inf)
        tokens = _best(highest, rule.count)[..., None] * rule.size + within
        tokens = tokens.flatten(-2)
        hidden.append(tokens > own)
        # What is hidden may not have been written yet.
        chosen.append(_slots(attention, part, tokens.minimum(own)))
    return ChosenRows(plan, torch.cat(chosen), torch.cat(hidden))


def attend_chosen(
    attention: PagedAttention,
    layer: int,
    query: Tensor,
    kv: tuple[Tensor | None, Tensor | None],
    scale: float,
    choice: ChosenRows | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As a call of ``attention``, where each query attends to the tokens chosen for it.

    ``kv`` are the keys and values of that call. With a ``choice`` of None all tokens are chosen.
    """
    key, value = kv
    if choice is None:
        return attention(layer, query, key, value, scale, sinks=sinks)
    if key is not None:
        attention.store(layer, key, value)
    plan, spec = choice.plan, attention.specs[layer]
    kv_heads, width = spec.num_kv_heads, spec.value_width
    output = query.new_empty(*query.shape[:2], width)
    if plan.dense is not None:
        others = query.index_select(0, plan.dense_rows)
        attended = plan.dense(layer, others, None, None, scale, sinks=sinks)
        output.index_copy_(0, plan.dense_rows, attended)
    scoring = Scoring(scale)
    if sinks is not None:
        scoring = replace(scoring, sinks=sinks.to(torch.float32).view(kv_heads, -1))
    heads = torch.arange(kv_heads, device=query.device)[:, None]
    count = choice.slots.shape[-1]
    at_once = max(1, _AT_ONCE // (kv_heads * count * (spec.head_dim + width)))
    for begin in range(0, len(plan.rows), at_once):
        some = slice(begin, begin + at_once)
        rows = plan.rows[some]
        keys, values = alike(*attention.read(layer, choice.slots[some], heads))
        mask = query.new_zeros(len(rows), 1, 1, count)
        if choice.hidden is not None:
            hidden = choice.hidden[some][:, :, None]
            mask = query.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)
        chosen = query.index_select(0, rows)
        attended = scoring.attend_tokens(chosen, keys, values, mask, width)
        output.index_copy_(0, rows, attended)
    return output


def _scored(
    attention: PagedAttention,
    layer: int,
    query: Tensor,
    plan: SparsePlan,
    multiple: int = 1,
    pools: Pools | None = None,
) -> Iterator[tuple[_Queries, Tensor]]:
    """Some queries, and their products with the keys of tokens or pools: float32 [n, heads, keys].

    Keys are those of the longest sequence, and more to the next multiple; products with keys after
    a query are undefined. Heads are as :func:`_padded_heads` leaves them.
    """
    query = _padded_heads(query.float())
    heads, dim = query.shape[1:]
    size = 1 if pools is None else pools.size
    multiple = math.lcm(KEYS * size, multiple)
    for queries in plan.queries:
        count = round_up(max(queries.seen), multiple)
        keys = _index_keys(attention, layer, queries, count, pools) if queries.shared else None
        for part in queries.parts(count * (heads if queries.shared else heads + dim)):
            count = round_up(max(part.seen), multiple)
            own = _index_keys(attention, layer, part, count, pools) if keys is None else keys
            own = own[:, : count // size]
            rows = query.index_select(0, part.rows).view(len(own), -1, dim)
            yield part, torch.matmul(rows, own.transpose(1, 2)).view(-1, heads, count // size)


def _index_keys(
    attention: PagedAttention, layer: int, queries: _Queries, count: int, pools: Pools | None
) -> Tensor:
    """The keys of each sequence's first ``count`` tokens: float32 [sequences, keys, dim]."""
    size, device = attention.block_size, queries.table.device
    last = queries.positions[-1:] if queries.shared else queries.positions
    # After a sequence's own blocks the table has anything: its last block is read again.
    columns = torch.arange(-(-count // size), device=device).minimum(last[:, None] // size)
    blocks = queries.table.gather(1, columns)[..., None]
    slots = (blocks * size + torch.arange(size, device=device)).flatten(1)[:, :count]
    keys = attention.read(layer, slots, torch.zeros_like(slots))[0].float()
    if pools is None:
        return keys
    firsts = torch.arange(0, count, pools.size, device=device)
    return pools.keys(keys.view(len(keys), -1, pools.size, keys.shape[-1]), firsts)


def _padded_heads(x: Tensor) -> Tensor:
    """[T, heads, ...] with heads of zeros, to a multiple that is computed alike (cpu_plan)."""
    missing = -x.shape[1] % QUERIES
    return pad(x, [0, 0] * (x.ndim - 2) + [0, missing]) if missing else x


def _places(scores: Tensor) -> Tensor:
    return torch.arange(scores.shape[-1], device=scores.device)


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices [..., count] of the highest scores of [..., n], ascending; of equal ones the first.

    torch's own choice among equal ones depends on how many scores there are.
    """
    lowest = scores.topk(count, dim=-1).values[..., -1:]
    above, equal = scores > lowest, scores == lowest
    missing = count - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= missing))
    # Where scores are no numbers fewer are chosen: the last index takes the place of the others.
    indices = _places(scores).where(chosen, scores.shape[-1] - 1)
    return indices.topk(count, dim=-1, largest=False, sorted=True).values


def _slots(attention: PagedAttention, part: _Queries, tokens: Tensor) -> Tensor:
    """Where tokens [n, ..., k], by their positions, are in the cache."""
    size, flat = attention.block_size, tokens.flatten(1)
    blocks = part.table.expand(len(tokens), -1).gather(1, flat // size)
    return (blocks * size + flat % size).view(tokens.shape)

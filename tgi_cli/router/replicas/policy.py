"""Chooses the replica for a request: where its prefix is cached, unless that one is too busy.

The rule, whose parts and thresholds are those of SGLang's and SMG's cache-aware policy
(https://github.com/lightseekorg/smg) and Ray's prefix-aware router
(https://docs.ray.io/en/latest/serve/llm/prefix-aware-request-router.html), but for one: a busy
replica is left out by itself, while the others are still chosen by their prefixes.

1. A replica is too busy if its requests in flight exceed those of the least busy one by more than
   ``balance_abs_threshold`` and by more than the factor ``balance_rel_threshold``.
2. Of the others, the one that was sent the longest prefix of the prompt is chosen, if that is at
   least ``cache_threshold`` of the prompt. Of several, the session's, or the least busy one.
3. Otherwise the replica of the session's latest request, if it is not too busy.
4. Otherwise the least busy one; of several, that with the fewest prefixes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from tgi_cli.router.replicas.prefix_index import BLOCK_TOKENS, PrefixIndex

R = TypeVar("R", bound=Hashable)
"""What a replica is known by."""

MAX_SESSIONS = 1 << 16
"""Sessions that are remembered; the least recently used ones are dropped first."""


class RoutingReason(Enum):
    """Why a replica was chosen."""

    PREFIX = "prefix"
    SESSION = "session"
    LOAD = "load"
    """It is the least busy one, and no replica has the prefix."""
    BALANCE = "balance"
    """Another replica has a longer prefix, but is too busy."""


@dataclass(frozen=True, slots=True)
class RoutingKey:
    """What a choice depends on besides the load.

    Attributes:
        hashes: Hashes of the prompt, by :func:`tgi_cli.router.replicas.prefix_index.prefix_hashes`.
        num_tokens: Tokens of the prompt.
        session: Hash of the session's name, or None if it has none.
    """

    hashes: Sequence[int]
    num_tokens: int
    session: int | None = None


class CacheAwarePolicy(Generic[R]):
    """See the module's docstring. It does no I/O.

    Args:
        capacities: For each replica the tokens that its KV cache holds.
        cache_threshold: Between 0 and 1.
        balance_abs_threshold: Number of requests.
        balance_rel_threshold: Factor, at least 1.
    """

    def __init__(
        self,
        capacities: Mapping[R, int],
        *,
        cache_threshold: float,
        balance_abs_threshold: int,
        balance_rel_threshold: float,
    ) -> None:
        self._indexes: dict[R, PrefixIndex] = {}
        for replica, tokens in capacities.items():
            self.add(replica, tokens)
        self._sessions: OrderedDict[int, R] = OrderedDict()
        self._share = cache_threshold
        self._abs = balance_abs_threshold
        self._rel = balance_rel_threshold

    def choose(self, key: RoutingKey, loads: Mapping[R, int]) -> tuple[R, RoutingReason]:
        """Return the replica for a request, and why.

        Args:
            key: Key of the request.
            loads: Requests in flight of each replica that may be chosen, at least one.
        """
        least = min(loads.values())
        idle_enough = {
            replica: load for replica, load in loads.items() if not self._is_busy(load, least)
        }
        session = None if key.session is None else self._sessions.get(key.session)
        matches = {replica: self._indexes[replica].match(key.hashes) for replica in loads}
        longest = max(matches[replica] for replica in idle_enough)
        if self._is_long(longest, key):
            tied = [replica for replica in idle_enough if matches[replica] == longest]
            reason = RoutingReason.PREFIX
            if session in tied:
                return session, reason
            return self._least_busy(tied, loads), reason
        if session is not None and session in idle_enough:
            return session, RoutingReason.SESSION
        has_prefix = self._is_long(max(matches.values()), key) or session in loads
        reason = RoutingReason.BALANCE if has_prefix else RoutingReason.LOAD
        return self._least_busy(list(idle_enough), loads), reason

    def sent(self, replica: R, key: RoutingKey) -> None:
        """A request was sent to a replica."""
        self._indexes[replica].add(key.hashes)
        if key.session is not None:
            self._sessions[key.session] = replica
            self._sessions.move_to_end(key.session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def add(self, replica: R, capacity: int) -> None:
        """A replica was added, whose KV cache holds ``capacity`` tokens."""
        self._indexes[replica] = PrefixIndex(capacity // BLOCK_TOKENS)

    def remove(self, replica: R) -> None:
        """A replica is gone."""
        del self._indexes[replica]

    def reset(self, replica: R, capacity: int) -> None:
        """A replica was restarted: its cache is empty, and holds ``capacity`` tokens."""
        self._indexes[replica].resize(capacity // BLOCK_TOKENS)

    def _is_busy(self, load: int, least: int) -> bool:
        return load - least > self._abs and load > self._rel * least

    def _is_long(self, blocks: int, key: RoutingKey) -> bool:
        return blocks > 0 and blocks * BLOCK_TOKENS >= self._share * key.num_tokens

    def _least_busy(self, replicas: Sequence[R], loads: Mapping[R, int]) -> R:
        return min(replicas, key=lambda replica: (loads[replica], len(self._indexes[replica])))

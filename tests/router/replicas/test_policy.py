"""The rule by which a replica is chosen, against its statement; and the index of prefixes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tgi_cli.engine.messages import GenerationRequest, ImageInput
from tgi_cli.router.replicas.policy import CacheAwarePolicy, RoutingKey, RoutingReason
from tgi_cli.router.replicas.prefix_index import BLOCK_TOKENS, PrefixIndex, prefix_hashes
from tgi_cli.sampling.params import SamplingParams

ABS, REL, SHARE = 3, 1.5, 0.25
PREFIXES = st.lists(st.integers(0, 2), max_size=6)
"""Of blocks; a letter stands for a block's content."""


def hashes(blocks: list[int]) -> list[int]:
    found, value = [], 0
    for block in blocks:
        value = hash((value, block))
        found.append(value)
    return found


def key(blocks: list[int], session: int | None = None, rest: int = 0) -> RoutingKey:
    return RoutingKey(hashes(blocks), len(blocks) * BLOCK_TOKENS + rest, session)


def policy(replicas: int, blocks: int = 1000) -> CacheAwarePolicy[int]:
    return CacheAwarePolicy(
        dict.fromkeys(range(replicas), blocks * BLOCK_TOKENS),
        cache_threshold=SHARE,
        balance_abs_threshold=ABS,
        balance_rel_threshold=REL,
    )


def common(first: list[int], second: list[int]) -> int:
    """Blocks at the start of both."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


@given(
    sent=st.lists(st.tuples(st.integers(0, 3), PREFIXES, st.sampled_from([None, 1, 2]))),
    asked=PREFIXES,
    session=st.sampled_from([None, 1, 2]),
    rest=st.integers(0, 2000),
    loads=st.dictionaries(st.integers(0, 3), st.integers(0, 12), min_size=1),
)
def test_the_choice_follows_the_stated_rule(
    sent: list[tuple[int, list[int], int | None]],
    asked: list[int],
    session: int | None,
    rest: int,
    loads: dict[int, int],
) -> None:
    chooser = policy(4)
    sessions: dict[int, int] = {}
    for replica, blocks, name in sent:
        chooser.sent(replica, key(blocks, name))
        if name is not None:
            sessions[name] = replica
    wanted = key(asked, session, rest)
    found, reason = chooser.choose(wanted, loads)

    least = min(loads.values())
    free = {r for r, load in loads.items() if load - least <= ABS or load <= REL * least}
    length = {
        r: max((common(asked, blocks) for replica, blocks, _ in sent if replica == r), default=0)
        for r in loads
    }
    needed = max(1.0, SHARE * wanted.num_tokens / BLOCK_TOKENS)
    longest = max(length[r] for r in free)
    assert found in free
    if longest >= needed:
        assert reason is RoutingReason.PREFIX
        assert length[found] == longest
        tied = {r for r in free if length[r] == longest}
        own = None if session is None else sessions.get(session)
        assert found == own if own in tied else loads[found] == min(loads[r] for r in tied)
    elif session is not None and sessions.get(session) in free:
        assert (found, reason) == (sessions[session], RoutingReason.SESSION)
    else:
        assert loads[found] == min(loads[r] for r in free) == least
        busy_has_it = max(length.values()) >= needed or (
            session is not None and sessions.get(session) in loads
        )
        assert reason is (RoutingReason.BALANCE if busy_has_it else RoutingReason.LOAD)


def test_new_prefixes_go_to_all_replicas_in_turn_and_stay() -> None:
    chooser = policy(2)
    prompts = [key([number] * 4) for number in range(8)]
    idle = {0: 0, 1: 0}
    first = []
    for prompt in prompts:
        replica, reason = chooser.choose(prompt, idle)
        assert reason is RoutingReason.LOAD
        chooser.sent(replica, prompt)
        first.append(replica)
    assert sorted(first) == [0] * 4 + [1] * 4
    assert [chooser.choose(prompt, idle)[0] for prompt in prompts] == first


def test_a_restarted_replica_has_no_prefixes() -> None:
    chooser = policy(2)
    chooser.sent(1, key([7, 7]))
    assert chooser.choose(key([7, 7]), {0: 0, 1: 0}) == (1, RoutingReason.PREFIX)
    chooser.reset(1, 1000)
    assert chooser.choose(key([7, 7]), {0: 0, 1: 0})[1] is RoutingReason.LOAD


@given(sent=st.lists(PREFIXES), asked=PREFIXES, capacity=st.integers(1, 12))
def test_the_index_is_bounded_and_finds_whole_prefixes_only(
    sent: list[list[int]], asked: list[int], capacity: int
) -> None:
    index = PrefixIndex(capacity)
    for blocks in sent:
        index.add(hashes(blocks))
        assert len(index) <= capacity
        assert index.match(hashes(blocks)) == min(len(blocks), capacity)
    found = index.match(hashes(asked))
    assert found <= max((common(asked, blocks) for blocks in sent), default=0)
    # Whatever is in the index is found: no block is there without those before it.
    assert all(index.match(hashes(asked[:length])) == length for length in range(found + 1))


def request(
    ids: range, salt: bytes = b"", images: tuple[ImageInput, ...] = ()
) -> GenerationRequest:
    return GenerationRequest(
        request_id=1,
        prompt_ids=tuple(ids),
        sampling=SamplingParams(),
        max_new_tokens=1,
        cache_salt=salt,
        images=images,
    )


def picture(digest: bytes, start: int) -> ImageInput:
    return ImageInput(digest=digest, spans=((start, 4),), tensors={})


def test_hashes_cover_all_that_cached_keys_and_values_depend_on() -> None:
    ids = range(5 * BLOCK_TOKENS + 3)
    plain = prefix_hashes(request(ids), "")
    assert len(plain) == 5
    assert prefix_hashes(request(range(3 * BLOCK_TOKENS)), "") == plain[:3]
    for other in (
        prefix_hashes(request(ids), "adapter"),
        prefix_hashes(request(ids, b"salt"), ""),
        prefix_hashes(request(range(1, 5 * BLOCK_TOKENS)), ""),
    ):
        assert not set(other) & set(plain)
    seen = prefix_hashes(request(ids, images=(picture(b"a", 2 * BLOCK_TOKENS + 1),)), "")
    other = prefix_hashes(request(ids, images=(picture(b"b", 2 * BLOCK_TOKENS + 1),)), "")
    assert seen[:2] == other[:2] == plain[:2]
    assert not set(seen[2:]) & {*other[2:], *plain[2:]}

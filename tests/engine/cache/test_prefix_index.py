from __future__ import annotations

import pytest

from adapters.identity import AdapterDigest
from engine.cache import prefix_index
from engine.cache.blocks import BlockId, BlockPool
from engine.cache.prefix_index import (
    MAX_LANDMARKS,
    BlockName,
    Landmarks,
    Lineage,
    PrefixIndex,
    child_name,
    landmark,
    root_name,
)
from tests.engine.cache.lookup import held


def chain(*blocks: tuple[int, ...], adapter: AdapterDigest | None = None, salt: str = "") -> list[BlockName]:
    names, parent = [], root_name(adapter, salt)
    for tokens in blocks:
        parent = child_name(parent, tokens)
        names.append(parent)
    return names


def test_the_longest_indexed_prefix_is_found() -> None:
    index = PrefixIndex(Landmarks(8))
    names = chain((1, 2), (3, 4), (5, 6))
    index.insert(names[0], BlockId(7), 0)
    index.insert(names[1], BlockId(3), 1)
    assert held(index, names) == [7, 3]
    assert held(index, chain((1, 2), (9, 9))) == [7]
    assert held(index, chain((9, 9), (3, 4))) == []


def test_a_prefix_with_a_hole_ends_at_the_hole() -> None:
    index = PrefixIndex(Landmarks(8))
    names = chain((1,), (2,), (3,))
    index.insert(names[0], BlockId(0), 0)
    index.insert(names[2], BlockId(2), 2)
    assert held(index, names) == [0]


def test_an_equal_block_after_another_beginning_has_another_name() -> None:
    assert chain((1,), (5,))[1] != chain((2,), (5,))[1]


def test_adapter_and_salt_each_make_a_chain_of_their_own() -> None:
    a, b = AdapterDigest("aa"), AdapterDigest("bb")
    roots = [root_name(None, ""), root_name(a, ""), root_name(b, ""), root_name(None, "x"), root_name(a, "x")]
    assert len(set(roots)) == len(roots)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((AdapterDigest("t"), ""), (None, "t")),
        ((AdapterDigest("ab"), "c"), (AdapterDigest("a"), "bc")),
        ((AdapterDigest(""), ""), (None, "")),
        ((None, "S"), (AdapterDigest("S"), "")),
        ((None, "\ud800"), (None, "?")),
    ],
)
def test_a_salt_is_never_taken_for_an_adapter(
    one: tuple[AdapterDigest | None, str], other: tuple[AdapterDigest | None, str]
) -> None:
    assert root_name(*one) != root_name(*other)


def test_blocks_before_an_activated_adapter_are_those_of_the_base() -> None:
    a, b = AdapterDigest("aa"), AdapterDigest("bb")
    tokens = tuple(range(12))

    def names_of(adapter: AdapterDigest | None, start: int, salt: str = "") -> list[BlockName]:
        names: list[BlockName] = []
        for at in range(0, len(tokens), 4):
            lineage = Lineage(adapter, salt, start)
            names.append(lineage.next_name(names[-1] if names else None, at, tokens[at : at + 4]))
        return names

    base = names_of(None, 0)
    assert base == chain(tokens[:4], tokens[4:8], tokens[8:])
    assert names_of(a, 0) == chain(tokens[:4], tokens[4:8], tokens[8:], adapter=a)
    for start, num_shared in ((1, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2), (12, 3), (40, 3)):
        names = names_of(a, start)
        assert names[:num_shared] == base[:num_shared]
        others = {*base, *names_of(a, 0), *names_of(b, start), *names_of(a, start, "salt")}
        others |= {name for other in range(12) if other != start for name in names_of(a, other)[other // 4 :]}
        assert others.isdisjoint(names[num_shared:])


def test_tokens_cannot_move_between_neighbouring_blocks_unseen() -> None:
    assert chain((1, 2), (3,))[-1] != chain((1,), (2, 3))[-1]


def test_a_name_is_a_sha_256() -> None:
    assert len(root_name(None, "")) == len(chain((1,))[0]) == 32


def test_the_first_block_of_a_name_keeps_it() -> None:
    index = PrefixIndex(Landmarks(8))
    [name] = chain((1,))
    index.insert(name, BlockId(4), 0)
    index.insert(name, BlockId(5), 0)
    assert held(index, [name]) == [4]
    assert len(index._block_by_name) == 1


def test_an_evicted_block_is_found_no_more() -> None:
    index = PrefixIndex(Landmarks(8))
    [name] = chain((1,))
    index.insert(name, BlockId(4), 0)
    index.evict(BlockId(4))
    index.evict(BlockId(4))
    assert held(index, [name]) == []
    index.check(BlockPool(5))


def test_check_finds_a_block_outside_the_pool() -> None:
    index = PrefixIndex(Landmarks(8))
    index.insert(chain((1,))[0], BlockId(4), 0)
    with pytest.raises(AssertionError, match="outside the pool"):
        index.check(BlockPool(4))


def test_landmarks_are_every_so_manieth_name_that_is_indexed() -> None:
    landmarks = Landmarks(2 * MAX_LANDMARKS)
    assert landmarks.stride_blocks == 2
    index = PrefixIndex(landmarks)
    names = chain((1,), (2,), (3,), (4,))
    for i, name in enumerate(names):
        index.insert(name, BlockId(i), i)
    assert landmarks.copy() == {landmark(names[1]), landmark(names[3])}
    for block in (0, 1, 9):
        index.evict(BlockId(block))
    assert landmarks.copy() == {landmark(names[3])}
    for i in (0, 1):
        landmarks.add_below(names[i], i)
    assert landmarks.copy() == {landmark(names[1]), landmark(names[3])}


def test_of_lower_tiers_what_is_no_landmark_or_was_dropped_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_LANDMARKS", 3)
    landmarks, names = Landmarks(4), [BlockName(bytes([number]) * 32) for number in range(10)]
    assert landmarks.stride_blocks == 2
    marks = {landmark(name) for name in names[3:8:2]}
    for number, name in enumerate(names[:8]):
        landmarks.add(name, number)
    for name in names[:8]:
        landmarks.drop(name, is_below=True)
    assert landmarks.copy() == marks
    landmarks.drop(names[5])
    landmarks.add_below(names[9], 9)
    assert landmarks.copy() == marks - {landmark(names[5])} | {landmark(names[9])}


@pytest.mark.parametrize("num_blocks", [1, MAX_LANDMARKS, MAX_LANDMARKS + 1, 48_000, 1_000_000])
def test_there_are_never_more_landmarks_than_the_bound(num_blocks: int) -> None:
    stride = Landmarks(num_blocks).stride_blocks
    assert num_blocks / stride <= MAX_LANDMARKS
    assert stride == 1 or num_blocks / (stride // 2) > MAX_LANDMARKS


def test_of_lower_tiers_the_newest_landmarks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_LANDMARKS", 3)
    landmarks, names = Landmarks(3), [BlockName(bytes([number]) * 32) for number in range(6)]
    for number, name in enumerate(names[:4]):
        landmarks.add(name, number)
        landmarks.drop(name, is_below=True)
    assert landmarks.copy() == {landmark(name) for name in names[1:4]}
    # Back in the cache it counts as one of that; what was there before the start is below.
    landmarks.add(names[1], 1)
    landmarks.add_below(names[4], 4)
    assert landmarks.copy() == {landmark(name) for name in names[1:5]}
    landmarks.add_below(names[5], 5)
    assert landmarks.copy() == {landmark(names[number]) for number in (1, 3, 4, 5)}
    landmarks.drop(names[3])
    landmarks.drop(names[1])
    assert landmarks.copy() == {landmark(names[number]) for number in (4, 5)}

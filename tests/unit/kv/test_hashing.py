"""Block hashes: known answers, the chain, and the name spaces of salts."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.kv.hashing import BASE_SEED, block_hashes, chain_hashes, chain_seed, pack_tokens

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=70)
salts = st.text(max_size=8)


def reference(token_ids: list[int], page_size: int, seed: int) -> list[int]:
    """The definition, written out byte by byte."""
    chain: list[int] = []
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        block = b"".join(t.to_bytes(4, "little") for t in token_ids[start : start + page_size])
        local = xxhash.xxh3_64(block, seed=seed).intdigest()
        if chain:
            words = chain[-1].to_bytes(8, "little") + local.to_bytes(8, "little")
            chain.append(xxhash.xxh3_64(words, seed=seed).intdigest())
        else:
            chain.append(local)
    return chain


def test_known_answers_do_not_change() -> None:
    # Frozen values: a change would silently part old and new workers and routers.
    assert block_hashes(list(range(8)), 4) == [9143094415614847814, 9510318385840434533]
    assert block_hashes(list(range(8)), 4, "tenant-a") == [17009624042690211646, 6045941939945539778]


def test_a_partly_filled_block_has_no_hash() -> None:
    assert block_hashes(list(range(7)), 4) == block_hashes(list(range(4)), 4)
    assert block_hashes([1, 2, 3], 4) == []
    assert block_hashes([], 4) == []


def test_an_empty_salt_is_no_salt() -> None:
    assert chain_seed("") == BASE_SEED
    assert chain_seed("a") == (BASE_SEED + xxhash.xxh3_64(b"a", seed=1).intdigest()) % 2**64


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_a_token_id_outside_u32_is_refused(bad: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([bad])


@given(tokens, st.integers(1, 9), salts)
@settings(deadline=None)
def test_hashes_follow_the_definition(token_ids: list[int], page_size: int, salt: str) -> None:
    assert block_hashes(token_ids, page_size, salt) == reference(token_ids, page_size, chain_seed(salt))


@given(tokens, st.integers(1, 9), salts, st.integers(0, 8))
@settings(deadline=None)
def test_a_chain_continues_from_any_parent(token_ids: list[int], page_size: int, salt: str, cut: int) -> None:
    whole = block_hashes(token_ids, page_size, salt)
    cut = min(cut, len(whole))
    rest = pack_tokens(token_ids[cut * page_size :])
    parent = whole[cut - 1] if cut else None
    assert list(chain_hashes(rest, page_size, chain_seed(salt), parent)) == whole[cut:]


@given(st.lists(st.integers(0, 99), min_size=8, max_size=8), st.integers(0, 7))
@settings(deadline=None)
def test_a_changed_token_changes_its_block_and_all_after_it(token_ids: list[int], at: int) -> None:
    changed = [*token_ids[:at], token_ids[at] + 100, *token_ids[at + 1 :]]
    before, after = block_hashes(token_ids, 2), block_hashes(changed, 2)
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [block < at // 2 for block in range(4)]


def test_salts_part_name_spaces() -> None:
    token_ids = list(range(32))
    assert not set(block_hashes(token_ids, 8, "a")) & set(block_hashes(token_ids, 8, "b"))

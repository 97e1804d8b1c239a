"""Block hashes: the names under which gateway and workers know a prefix.

A block is one full page of tokens. With `XXH3` = XXH3-64 and little-endian integers:

    b_i = XXH3(token ids of block i as u32, seed)
    s_0 = b_0,   s_i = XXH3(s_{i-1} ‖ b_i as u64 each, seed)
    seed = 1337 + XXH3(salt, seed 1) mod 2^64    (1337 without a salt)

This is the form that Dynamo, SMG and the Mooncake RFCs 1403/1527 share, so hashes may be exchanged with
them. A hash names a block *and* everything before it; equal hashes are a strong hint, not a proof
(`PagePool.match` compares token ids).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence

from xxhash import xxh3_64_digest, xxh3_64_intdigest

BASE_SEED = 1337
_SALT_SEED = 1
TOKEN_BYTES = 4


def chain_seed(salt: str = "") -> int:
    """Seed of every hash in the name space of `salt` (Dynamo's `lib/kv-hashing/src/salt.rs`)."""
    if not salt:
        return BASE_SEED
    return (BASE_SEED + xxh3_64_intdigest(salt.encode(), _SALT_SEED)) % 2**64


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as u32 little-endian.

    Raises:
        OverflowError: an id is negative or does not fit 32 bits.
    """
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def chain_hashes(packed: bytes, page_size: int, seed: int, parent: int | None = None) -> Iterator[int]:
    """Chained hashes of the full blocks of `packed`, lazily, continuing after block hash `parent`."""
    block_bytes = page_size * TOKEN_BYTES
    previous = None if parent is None else parent.to_bytes(8, "little")
    for end in range(block_bytes, len(packed) + 1, block_bytes):
        # xxhash digests are big-endian; the chain is defined over little-endian words.
        local = xxh3_64_digest(packed[end - block_bytes : end], seed)[::-1]
        if previous is None:
            block = int.from_bytes(local, "little")
        else:
            block = xxh3_64_intdigest(previous + local, seed)
        previous = block.to_bytes(8, "little")
        yield block


def block_hashes(token_ids: Sequence[int], page_size: int, salt: str = "") -> list[int]:
    """Chained XXH3-64 of every full block of `token_ids`; a last, partly filled block has none."""
    return list(chain_hashes(pack_tokens(token_ids), page_size, chain_seed(salt)))

"""Where a KV page lies in the pool, and what two workers must agree on to exchange pages.

The pool is one flat buffer, layer-major, each page in HND order:

    [layer][page][K=0, V=1][kv_head][slot in page][head_dim]

so that one (layer, page) is contiguous (one write), and within it a head's slice of K or V too (needed
when both sides shard heads differently).
"""

from __future__ import annotations

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers whose caches have the same shape and live in the same pages.

    Today every model has one group of kind `full`; sliding windows and fixed-size states add kinds.
    """

    kind: str
    """`full`: one page per `page_size` tokens, kept for the whole sequence."""
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int


class KVLayout(msgspec.Struct, frozen=True):
    """Shape of one worker's KV pool (one shard)."""

    groups: tuple[CacheGroup, ...]
    page_size: int
    """Tokens per page."""
    dtype: str
    num_pages: int
    state_bytes: int = 0
    """Fixed-size state of one sequence beside its pages (linear attention, sliding windows): crosses whole,
    with the last chunk. The native engine has none yet."""

    @property
    def group(self) -> CacheGroup:
        """The only group of today's models."""
        (group,) = self.groups
        return group

    @property
    def num_layers(self) -> int:
        return len(self.group.layers)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer: K and V."""
        group = self.group
        return 2 * group.kv_heads * self.page_size * group.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        return self.page_bytes * self.num_pages

    @property
    def pool_bytes(self) -> int:
        return self.layer_bytes * self.num_layers

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token over all layers (the paper's S_kv slope)."""
        return self.page_bytes * self.num_layers // self.page_size

    def descriptor_index(self, layer: int, page: int) -> int:
        """Index of (layer, page) in a descriptor list that holds the whole pool in memory order."""
        return layer * self.num_pages + page

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens, the last one perhaps partly filled."""
        return -(-tokens // self.page_size)

    @classmethod
    def fit(cls, groups: tuple[CacheGroup, ...], page_size: int, dtype: str, memory_bytes: int) -> KVLayout:
        """The layout with the most pages that `memory_bytes` holds.

        Raises:
            ValueError: not even one page fits.
        """
        one = cls(groups=groups, page_size=page_size, dtype=dtype, num_pages=1)
        pages = memory_bytes // one.pool_bytes
        if pages < 1:
            raise ValueError(f"one KV page needs {one.pool_bytes} bytes, the pool has {memory_bytes}")
        return cls(groups=groups, page_size=page_size, dtype=dtype, num_pages=pages)


class CompatRecord(msgspec.Struct, frozen=True):
    """What a sender and a receiver of KV must have in common, compared field by field."""

    protocol: int
    weights: str
    """XXH3-64 over config.json and the weight tensors' names, shapes and sampled bytes."""
    tokenizer: str
    """XXH3-64 of tokenizer.json."""
    attention: str
    """`gqa`, later `mla`, …"""
    page_layout: str
    """`HND`."""
    page_size: int
    kv_dtype: str
    groups: tuple[CacheGroup, ...]

    def differences(self, theirs: CompatRecord) -> list[tuple[str, str, str]]:
        """(field, ours, theirs) for every field that differs; empty = compatible."""
        return [
            (name, str(getattr(self, name)), str(getattr(theirs, name)))
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(theirs, name)
        ]

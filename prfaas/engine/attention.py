"""Attention over the paged KV pool, behind one small interface; here in plain torch.

The model hands a flattened batch of new tokens; the backend writes their K and V into the pages and lets
the queries attend to everything up to their own position. `Batch` holds what is the same for all layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from prfaas.engine.step import SequenceStep


class AttentionBackend(ABC):
    """One layer-wise view of a KV pool; `begin` once per step, then `write` and `attend` once per layer."""

    @abstractmethod
    def begin(self, sequences: Sequence[SequenceStep]) -> None:
        """Prepare for a step whose T new tokens are those of `sequences`, one after the other."""

    @abstractmethod
    def write(self, layer: int, kv: torch.Tensor) -> None:
        """Store K and V of the new tokens, `kv` [T, 2, kv_heads, head_dim], in their pages."""

    @abstractmethod
    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Causal attention of `q` [T, heads, head_dim] over the pages; returns [T, heads, head_dim].

        The step's own tokens must have been written."""


class TorchAttention(AttentionBackend):
    """Torch over a pool [layers, pages, 2, kv_heads, page_size, head_dim] (HND), any device and dtype.

    Decode steps (one new token) of all sequences run together, page by page: gather the pages, multiply
    each with its owner's query, and join the pages of a sequence by a softmax over segments (flash decoding
    with the page as the split). It needs no padding, no mask but in last pages, and its cost is that of the
    pages actually held, in any order, so fragmentation costs nothing. Measured for 4,000 tokens of
    SmolLM2 (3 KV heads of 64, float32, one thread): 1.5 ms a layer, the same as attention over a dense copy
    of the cache, against 2.4 ms for SDPA over page views and 4 ms for gathering, transposing and SDPA. A
    dense working copy per sequence would thus double the memory for nothing.

    Prefill chunks run one by one: gather to [kv_heads, tokens, head_dim], SDPA with a causal mask. The
    gather is a tenth of the arithmetic.
    """

    def __init__(self, pool: torch.Tensor, num_heads: int) -> None:
        self._pool = pool
        _, _, _, self._kv_heads, self._page_size, self._head_dim = pool.shape
        self._queries_per_kv = num_heads // self._kv_heads
        self._scale = self._head_dim**-0.5
        # [layers, pages, page_size, 2, kv_heads, head_dim]: a token's K and V by (page, slot).
        self._by_slot = pool.permute(0, 1, 4, 2, 3, 5)

    def begin(self, sequences: Sequence[SequenceStep]) -> None:
        device = self._pool.device
        pages: list[int] = []
        slots: list[int] = []
        decodes: list[tuple[int, SequenceStep]] = []
        self._chunks: list[_Chunk] = []
        row = 0
        for sequence in sequences:
            count = len(sequence.token_ids)
            for position in range(sequence.start, sequence.start + count):
                pages.append(sequence.page_ids[position // self._page_size])
                slots.append(position % self._page_size)
            if count == 1:
                decodes.append((row, sequence))
            else:
                self._chunks.append(_Chunk(row, sequence, self._page_size, device))
            row += count
        self._pages = torch.tensor(pages, device=device)
        self._slots = torch.tensor(slots, device=device)
        self._decodes = _Decodes(decodes, self._page_size, device) if decodes else None

    def write(self, layer: int, kv: torch.Tensor) -> None:
        self._by_slot[layer].index_put_((self._pages, self._slots), kv)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        if self._decodes is not None and not self._chunks:
            return self._attend_decodes(layer, q, self._decodes)
        out = torch.empty_like(q)
        if self._decodes is not None:
            out[self._decodes.rows] = self._attend_decodes(layer, q[self._decodes.rows], self._decodes)
        for chunk in self._chunks:
            out[chunk.rows] = self._attend_chunk(layer, q[chunk.rows], chunk)
        return out

    def _attend_chunk(self, layer: int, q: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
        keys, values = (
            self._pool[layer, :, which]
            .index_select(0, chunk.page_ids)
            .transpose(0, 1)
            .reshape(1, self._kv_heads, -1, self._head_dim)[:, :, : chunk.end]
            for which in (0, 1)
        )
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            enable_gqa=self._queries_per_kv > 1,
        )
        return attended.squeeze(0).transpose(0, 1)

    def _attend_decodes(self, layer: int, q: torch.Tensor, batch: _Decodes) -> torch.Tensor:
        """`q` [B, heads, head_dim] → the same. N = pages of all sequences, G = queries per KV head."""
        heads, per_kv, size, dim = self._kv_heads, self._queries_per_kv, self._page_size, self._head_dim
        count = len(batch.owners)
        queries = (q * self._scale).view(-1, heads, per_kv, dim)[batch.owners].view(-1, per_kv, dim)
        # Contiguous [N·heads, …] operands matter: bmm over the pool's own strides is three times slower.
        keys = self._pool[layer, :, 0].index_select(0, batch.page_ids).view(-1, size, dim)
        scores = torch.bmm(queries, keys.transpose(1, 2)).view(count, heads, per_kv, size).float()
        scores[batch.last_pages] = scores[batch.last_pages].masked_fill_(batch.unused, float("-inf"))
        peak = _per_sequence(scores.amax(-1), "max", batch)
        weights = scores.sub_(peak[batch.owners].unsqueeze(-1)).exp_()
        values = self._pool[layer, :, 1].index_select(0, batch.page_ids)
        # Weight 0 is not enough: unused slots hold what an earlier owner left, and 0 times NaN is NaN.
        values[batch.last_pages] = values[batch.last_pages].masked_fill_(batch.unused.transpose(2, 3), 0.0)
        values = values.view(-1, size, dim)
        parts = torch.bmm(weights.view(-1, per_kv, size).to(values.dtype), values).view(
            count, heads, per_kv, dim
        )
        total = _per_sequence(weights.sum(-1), "sum", batch)
        joined = scores.new_zeros(len(q), heads, per_kv, dim).index_add_(0, batch.owners, parts.float())
        return joined.div_(total.unsqueeze(-1)).view_as(q).to(q.dtype)


def _per_sequence(per_page: torch.Tensor, reduce: str, batch: _Decodes) -> torch.Tensor:
    """[N, …] → [B, …]. The lengths are right by construction; checking them costs more than the sum."""
    return torch.segment_reduce(per_page, reduce, lengths=batch.page_counts, unsafe=True)


class _Chunk:
    """A sequence with several new tokens: rows [T], pages, and the causal mask (None: SDPA makes it)."""

    def __init__(self, row: int, sequence: SequenceStep, page_size: int, device: torch.device) -> None:
        count = len(sequence.token_ids)
        self.rows = slice(row, row + count)
        self.end = sequence.start + count
        pages = sequence.page_ids[: -(-self.end // page_size)]
        self.page_ids = torch.tensor(pages, device=device)
        self.mask: torch.Tensor | None = None
        if sequence.start > 0:
            self.mask = torch.ones(count, self.end, dtype=torch.bool, device=device).tril(sequence.start)


class _Decodes:
    """The sequences with one new token each: their rows [B] and all their pages [N], one after the other."""

    def __init__(self, decodes: list[tuple[int, SequenceStep]], page_size: int, device: torch.device) -> None:
        lengths = [sequence.start + 1 for _, sequence in decodes]
        counts = [-(-length // page_size) for length in lengths]
        page_ids = [page for (_, step), n in zip(decodes, counts, strict=True) for page in step.page_ids[:n]]
        self.rows = torch.tensor([row for row, _ in decodes], device=device)
        self.page_ids = torch.tensor(page_ids, device=device)
        self.page_counts = torch.tensor(counts, device=device)
        self.owners = torch.repeat_interleave(torch.arange(len(decodes), device=device), self.page_counts)
        self.last_pages = self.page_counts.cumsum(0) - 1
        used = torch.tensor([(length - 1) % page_size + 1 for length in lengths], device=device)
        unused = torch.arange(page_size, device=device) >= used.unsqueeze(1)
        self.unused = unused[:, None, None, :]
        """[B, 1, 1, page_size]: slots of the last pages after the sequence's end."""

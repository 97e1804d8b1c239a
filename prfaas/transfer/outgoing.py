"""One attempt on its way out: which writes wait for the layer counter, which are ready, and how it went."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prfaas.engine.interface import ChunkPlan
from prfaas.kv.layout import KVLayout
from prfaas.transfer.events import AttemptKey, SendEvent, SendStats
from prfaas.transfer.tags import WriteTag, encode_tag, page_runs


def final_pages(plan: ChunkPlan, page_size: int) -> range:
    """Prompt pages that this chunk makes final: those it fills, and a partly filled last one if it is the
    last.

    Over the chunks of one prefill these ranges are disjoint and cover every page, so each page is sent once.
    """
    end = -(-plan.end_token // page_size) if plan.last else plan.end_token // page_size
    return range(plan.start_token // page_size, end)


@dataclass
class Write:
    """Pages of one layer, written together and named by one tag."""

    key: AttemptKey
    layer: int
    prompt_pages: tuple[int, ...]
    source_pages: tuple[int, ...]
    dest_pages: tuple[int, ...]
    nbytes: int
    after: int
    """The layer counter's value from which the source pages hold this layer's KV."""
    ready_s: float = 0.0
    """Since when the bytes have been ready to go."""

    def tag(self) -> bytes:
        return encode_tag(WriteTag(*self.key, self.layer, page_runs(self.prompt_pages)))


class Outgoing:
    """The queues and times of one attempt; guarded by the sender's lock."""

    def __init__(
        self,
        key: AttemptKey,
        session: str,
        first_page: int,
        dest_pages: Sequence[int],
        on_event: Callable[[SendEvent], None],
        now_s: float,
    ) -> None:
        self.key = key
        self.session = session
        self.on_event = on_event
        self.ready: deque[Write] = deque()
        self._waiting: deque[Write] = deque()
        """In the order in which the layer counter will pass them."""
        self._first_page = first_page
        self._dest_pages = tuple(dest_pages)
        self._handed_over: set[int] = set()
        self._begun_s = now_s
        self._last_ready_s = now_s
        self._first_post_s: float | None = None
        self._last_landed_s = now_s
        self._landed_bytes = 0

    @property
    def waits_for_layers(self) -> bool:
        return bool(self._waiting)

    @property
    def lacks(self) -> int:
        """Granted pages not handed over yet."""
        return len(self._dest_pages) - len(self._handed_over)

    # ------------------------------------------------------------ handing over

    def cached_writes(
        self, source_pages: Mapping[int, int], layout: KVLayout, max_write_bytes: int
    ) -> list[Write]:
        """Writes of pages that hold all their KV already, over all layers."""
        pages = self._take(sorted(source_pages))
        return self._writes(pages, source_pages, layout, max_write_bytes, [0] * layout.num_layers)

    def chunk_writes(
        self, plan: ChunkPlan, source_pages: Mapping[int, int], layout: KVLayout, max_write_bytes: int
    ) -> list[Write]:
        """Writes of the pages that a chunk makes final, in the order in which its layers will be done."""
        final = final_pages(plan, layout.page_size)
        if lost := [page for page in final if page >= self._first_page and page not in source_pages]:
            raise ValueError(f"chunk of {self.key} fills prompt pages {lost[:8]} without source pages")
        pages = self._take(final)
        after = [plan.layers_done_before + layer + 1 for layer in range(layout.num_layers)]
        writes = self._writes(pages, source_pages, layout, max_write_bytes, after)
        return sorted(writes, key=lambda write: write.after)

    def queue(self, writes: list[Write], now_s: float) -> None:
        """Queue writes; those that need no layer are ready at once."""
        for write in writes:
            if write.after:
                self._waiting.append(write)
            else:
                self._make_ready(write, now_s)

    def layers_done(self, count: int, now_s: float) -> None:
        """The layer counter stands at `count`."""
        while self._waiting and self._waiting[0].after <= count:
            self._make_ready(self._waiting.popleft(), now_s)

    def drop(self) -> None:
        """Forget everything not posted."""
        self.ready.clear()
        self._waiting.clear()

    def _make_ready(self, write: Write, now_s: float) -> None:
        write.ready_s = self._last_ready_s = now_s
        self.ready.append(write)

    def _take(self, pages: Sequence[int]) -> list[int]:
        """The granted ones of `pages`, now marked as handed over."""
        wanted = [page for page in pages if page >= self._first_page]
        if wanted and wanted[-1] >= self._first_page + len(self._dest_pages):
            raise ValueError(f"prompt page {wanted[-1]} lies behind the grant of {self.key}")
        if again := self._handed_over.intersection(wanted):
            raise ValueError(f"prompt pages {sorted(again)[:8]} of {self.key} were handed over before")
        self._handed_over.update(wanted)
        return wanted

    def _writes(
        self,
        pages: list[int],
        source_pages: Mapping[int, int],
        layout: KVLayout,
        max_write_bytes: int,
        after: list[int],
    ) -> list[Write]:
        """Groups of pages up to `max_write_bytes`, each over all layers, so that prefixes complete first."""
        group = max(1, max_write_bytes // layout.page_bytes)
        writes = []
        for start in range(0, len(pages), group):
            prompt = tuple(pages[start : start + group])
            sources = tuple(source_pages[page] for page in prompt)
            dests = tuple(self._dest_pages[page - self._first_page] for page in prompt)
            nbytes = len(prompt) * layout.page_bytes
            writes += [
                Write(self.key, layer, prompt, sources, dests, nbytes, after[layer])
                for layer in range(layout.num_layers)
            ]
        return writes

    # ------------------------------------------------------------ what happened

    def posted(self, now_s: float) -> None:
        if self._first_post_s is None:
            self._first_post_s = now_s

    def landed(self, nbytes: int, at_s: float) -> None:
        self._landed_bytes += nbytes
        self._last_landed_s = max(self._last_landed_s, at_s)

    def stats(self) -> SendStats:
        first_post_s = self._last_landed_s if self._first_post_s is None else self._first_post_s
        return SendStats(
            kv_bytes=self._landed_bytes,
            transfer_s=max(0.0, self._last_landed_s - first_post_s),
            tail_s=max(0.0, self._last_landed_s - self._last_ready_s),
            first_post_s=first_post_s - self._begun_s,
        )

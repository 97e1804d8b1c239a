"""One grant as the decode worker sees it: who owns its pages, and how it ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from prfaas.errors import PrfaasError
from prfaas.kv.pool import PagePool
from prfaas.protocol.messages import GrantFinished
from prfaas.transfer.events import AttemptKey

if TYPE_CHECKING:
    from decode_service.session import PrefillSession


class GrantFailure(PrfaasError):
    """The prefill leg of one attempt is over without a complete prompt.

    Attributes:
        site: worker at fault.
        reason: one of `FAILURE_REASONS`.
        complete_tokens: prompt tokens cached here nevertheless; 0 = no more than before.
    """

    def __init__(self, site: str, reason: str, message: str, complete_tokens: int = 0) -> None:
        self.site = site
        self.reason = reason
        self.message = message
        self.complete_tokens = complete_tokens
        super().__init__(f"{site}: {reason}: {message}")


class LiveGrant:
    """The pages of one attempt's prompt, pinned, and what became of them.

    They belong to the grant from `PrefillSession.grant` until they are complete and `take`n, or the attempt
    is abandoned; then complete ones are published in the prefix cache and the rest quarantined. The cached
    prefix stays pinned as long, because what is published hangs on it.

    Args:
        token_ids: the prompt; KV of all but its last token is wanted.
        prefix_pages: pages that this worker had cached.
        page_ids: pages that the prefill worker is to fill.
    """

    def __init__(
        self,
        pool: PagePool,
        key: AttemptKey,
        site: str,
        token_ids: list[int],
        cache_salt: str,
        prefix_pages: list[int],
        page_ids: list[int],
    ) -> None:
        self.key = key
        self.site = site
        self.page_ids = page_ids
        self.site_cached_tokens = 0
        """What the prefill worker found in its own cache."""
        loop = asyncio.get_running_loop()
        self.report: asyncio.Future[GrantFinished | None] = loop.create_future()
        """The sender's last word; None if it will never come."""
        self._pool = pool
        self._prefix_pages = prefix_pages
        self._token_ids = token_ids
        self._cache_salt = cache_salt
        self._complete: asyncio.Future[None] = loop.create_future()
        self._complete.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._taken = False
        self._failure: tuple[str, str] | None = None
        self._session: PrefillSession | None = None

    @property
    def first_page(self) -> int:
        """Index, in the prompt, of the first granted page."""
        return len(self._prefix_pages)

    @property
    def is_complete(self) -> bool:
        return self._complete.done() and self._complete.exception() is None

    def bind(self, session: PrefillSession) -> None:
        self._session = session

    async def complete(self) -> None:
        """Wait until every page holds its KV.

        Raises:
            GrantFailure: the attempt ended otherwise; its pages are dealt with.
        """
        await asyncio.shield(self._complete)

    def take(self) -> list[int]:
        """The prompt's pages, complete; their pins are the caller's now."""
        self._taken = True
        return self._prefix_pages + self.page_ids

    def give_up(self, reason: str, message: str) -> None:
        """The attempt is not wanted any more, whatever its state; no-op once the pages are taken."""
        if self._taken:
            return
        if self.is_complete:
            self._pool.release(self.take())
        elif self._session is not None and not self._complete.done():
            self._session.abandon(self, reason, message)

    # ------------------------------------------------------------ called by the session

    def completed(self) -> None:
        if not self._complete.done():
            self._complete.set_result(None)

    def fail_with(self, reason: str, message: str) -> None:
        """Remember why; the first reason given is the one reported."""
        if self._failure is None:
            self._failure = (reason, message)

    def abandoned(self, complete_pages: list[int], quarantined_pages: list[int]) -> None:
        """Publish what is complete, quarantine the rest, report the failure."""
        complete_tokens = self._publish(complete_pages)
        self._pool.release(self._prefix_pages + complete_pages)
        self._pool.quarantine(quarantined_pages)
        reason, message = self._failure or ("peer_lost", "the session ended")
        if not self._complete.done():
            self._complete.set_exception(GrantFailure(self.site, reason, message, complete_tokens))
        self.finished(None)

    def _publish(self, complete_pages: list[int]) -> int:
        """Tokens from the start of the prompt that are cached here now."""
        pages = self._prefix_pages + complete_pages
        size = self._pool.page_size
        end_token = min(len(pages) * size, len(self._token_ids) - 1)
        self._pool.commit(self._token_ids[:end_token], pages, self._cache_salt, start_page=self.first_page)
        return end_token - end_token % size

    def finished(self, message: GrantFinished | None) -> None:
        if not self.report.done():
            self.report.set_result(message)

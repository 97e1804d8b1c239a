"""How many cached pages may be pinned, and sent, for grants that still wait for pages to compute the rest."""

from __future__ import annotations

from prfaas.transfer.events import AttemptKey


class EarlyPins:
    """A bound that keeps waiting grants from blocking each other.

    A grant that holds cached pages while it waits for more is hold-and-wait. As long as such holdings leave
    room for the largest prompt, the one whose turn it is gets its pages as soon as running ones end.

    Args:
        total_pages: pages in the pool.
        largest_prompt_pages: pages of the longest prompt.
    """

    def __init__(self, total_pages: int, largest_prompt_pages: int) -> None:
        self._room = max(total_pages - largest_prompt_pages, 0)
        self._held: dict[AttemptKey, int] = {}

    def take(self, key: AttemptKey, pages: int) -> bool:
        """Whether `key` may hold `pages` pages while it waits; then they are booked."""
        if sum(self._held.values()) + pages > self._room:
            return False
        self._held[key] = pages
        return True

    def give_back(self, key: AttemptKey) -> None:
        """`key` waits no more. Unknown keys are ignored."""
        self._held.pop(key, None)

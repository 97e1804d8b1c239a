"""Load that placements in flight put on workers and links, booked in the same call as the choice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from policies.types import PlacementKind
from prfaas.protocol.messages import PrefillReport

if TYPE_CHECKING:
    from router.core.costs import Priced
    from router.core.decision import Decision
    from router.core.events import PlaceRequest
    from router.core.fleet import WorkerState
    from router.core.links import LinkState
    from router.core.prefix_index import Prediction


@dataclass(slots=True, eq=False)
class Booking:
    """One placed request. It stands in `site.prefills` and `link.transfers` until its KV is complete, and
    in `decode.decodes` until its answer has ended."""

    decision: Decision
    decode: WorkerState
    site: WorkerState
    link: LinkState | None
    booked_s: float
    elapsed_s: float
    """Since the request's arrival, when it was booked."""
    arrive_s: float
    """When the site is to hear of it."""
    visible_s: float
    """From when on a status that does not show it means that it is done."""
    work_s: float
    """Prefill seconds at the site."""
    tokens: int
    """Tokens to prefill."""
    mixed_step_s: float
    """Decode step that each local prefill chunk carries along."""
    kv_bytes: int
    transfer_begin_s: float
    transfer_end_s: float
    decode_pages: int
    site_pages: int
    context_tokens: int
    end_s: float
    """When the answer is expected to end."""
    output_tokens: float
    """Its expected length."""
    predictions: tuple[Prediction, ...] = ()
    """What its prompt is held to leave in caches."""
    report: PrefillReport | None = None
    prefilled: bool = False
    ttft_s: float | None = None

    @property
    def request_id(self) -> str:
        return self.decision.request_id

    @property
    def attempt(self) -> int:
        return self.decision.attempt

    @property
    def kind(self) -> PlacementKind:
        return self.decision.kind

    @property
    def decoding(self) -> bool:
        return self.ttft_s is not None


class Bookings:
    """All bookings, oldest first. Every method keeps workers' and links' own tables in step."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._by_request: dict[str, Booking] = {}
        self.expired_total = 0

    def add(self, booking: Booking) -> None:
        request_id = booking.request_id
        self._by_request[request_id] = booking
        booking.site.prefills[request_id] = booking
        booking.decode.decodes[request_id] = booking
        if booking.link is not None:
            booking.link.transfers[request_id] = booking
            booking.link.refresh()

    def get(self, request_id: str) -> Booking | None:
        return self._by_request.get(request_id)

    def end_prefill(self, booking: Booking) -> None:
        """The prompt's KV is complete, or its site is gone: nothing of it is left at site and link."""
        booking.prefilled = True
        booking.site.prefills.pop(booking.request_id, None)
        if booking.link is not None and booking.request_id in booking.link.transfers:
            del booking.link.transfers[booking.request_id]
            booking.link.refresh()

    def release(self, booking: Booking) -> None:
        self.end_prefill(booking)
        booking.decode.decodes.pop(booking.request_id, None)
        del self._by_request[booking.request_id]

    def expired(self, now_s: float) -> list[Booking]:
        """Bookings past their deadline; the caller releases them."""
        found = []
        for booking in self._by_request.values():
            if now_s - booking.booked_s <= self._deadline_s:
                break
            found.append(booking)
        self.expired_total += len(found)
        return found

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[Booking]:
        return iter(self._by_request.values())


def pages_pinned(worker: WorkerState, bookings: Iterable[Booking]) -> int:
    """Pages that `bookings` pin on `worker`; a local prefill's pages count once."""
    return sum(b.decode_pages if b.decode is worker else b.site_pages for b in bookings)


def make_booking(
    request: PlaceRequest,
    decision: Decision,
    priced: Priced,
    decode: WorkerState,
    site: WorkerState,
    output_tokens: float,
) -> Booking:
    """The booking of a decision just made (its link is set by the caller)."""
    row, now_s = decision.chosen, request.now_s
    elapsed_s = max(0.0, now_s - request.arrival_s)
    granted_s = float(priced.granted_s[row])
    computed_s = decision.term("start_s") + decision.term("prefill_s")
    first_s = now_s + decision.ttft_s - elapsed_s
    prompt = request.prompt_tokens - 1
    return Booking(
        decision=decision,
        decode=decode,
        site=site,
        link=None,
        booked_s=now_s,
        elapsed_s=elapsed_s,
        arrive_s=now_s + granted_s,
        visible_s=now_s + 2 * granted_s,
        work_s=decision.term("prefill_s"),
        tokens=decision.count("uncached_tokens"),
        mixed_step_s=float(priced.mixed_step_s[row]),
        kv_bytes=decision.count("kv_bytes"),
        transfer_begin_s=now_s + float(priced.transfer_begin_s[row]),
        transfer_end_s=now_s + computed_s + decision.term("transfer_s"),
        decode_pages=decode.info.layout.pages_for(request.prompt_tokens + 1),
        site_pages=site.info.layout.pages_for(prompt),
        context_tokens=request.prompt_tokens,
        end_s=first_s + output_tokens * decision.term("step_s"),
        output_tokens=output_tokens,
    )

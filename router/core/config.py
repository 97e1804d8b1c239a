"""What can be tuned in the cost model; docs/cost.md explains each term."""

from __future__ import annotations

import msgspec

from prfaas.engine.interface import StepProfile

# Optimistic on purpose: an unmeasured worker gets traffic, and the traffic measures it.
UNMEASURED = StepProfile(
    chunk_tokens=256,
    prefill_base_s=2e-3,
    prefill_token_s=5e-4,
    prefill_context_s=1e-7,
    decode_base_s=1e-2,
    decode_sequence_s=1e-3,
    decode_context_s=1e-6,
)


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    default_profile: StepProfile = UNMEASURED
    """Of a worker that has sent none."""
    local_rate_bytes_per_s: float = 300e6
    """Prior of the rate inside a cluster."""
    local_rtt_s: float = 1e-3
    link_ramp_s: float = 0.0
    """t0: what a transfer loses to a cold connection."""
    link_quiet_s: float = 30.0
    """Without a sample for this long, a link's estimate drifts back to its prior and a probe is due."""
    predicted_ttl_s: float = 3.0
    """How long a prompt counts as cached after its predicted completion, until KV events confirm it."""
    predicted_from: str = "computed"
    """`computed`: a prompt in flight counts as cached from its predicted completion on, right for
    workers that match their cache on arrival (ours do); `placed`: at once, for workers that match when
    the prompt's turn comes."""
    status_lag_s: float = 0.2
    """A booking may be missing from statuses that arrive this soon after it reached its worker."""
    status_fresh_s: float = 3.0
    """Older statuses are not used; the bookings alone count then."""
    expected_output_tokens: float = 128.0
    """Prior of the answer's length; learned from finished requests."""
    booking_deadline_s: float = 900.0
    """A booking older than this has leaked: it is released and counted."""
    rate_window_s: float = 30.0
    """Time constant of the arrival rates behind the externality."""
    max_load: float = 0.8
    """A server's load is capped here: beyond it the busy period's length is unbounded and means nothing."""
    busy_horizon_s: float = 30.0
    """Cap on the length of a busy period that is priced."""
    overhead_window: int = 9
    """Samples in each moving median (overhead per path, prefill and decode factor per worker)."""
    shortlist: int = 12
    """Where there are more than 512 pairs, a policy that takes the cheapest is shown those of about this many
    decode and this many prefill workers of each cluster; 0 = always all."""
    policy_faults: int = 3
    """After so many exceptions or wrong answers a policy is replaced for good."""
    policy_overruns: int = 5
    """So many overruns of the time budget within `policy_overrun_window_s` replace it too."""
    policy_overrun_window_s: float = 60.0

"""What one placement's work costs the requests still to come, by pools of servers. Compiled.

A later arrival goes to whichever server of a pool is free first, so a pool makes nobody wait while one of its
servers is idle, and x seconds of work on one of K busy servers delay everybody by x/K.
"""

from __future__ import annotations

from policies.types import Floats
from router.core.compiled import compiled

# A pool's numbers.
(
    RATE,     # arrivals per second, mean over its servers
    LOAD,     # mean over its servers
    WAIT,     # seconds until the first of them is free
    SERVERS,
    OTHERS_BUSY,  # written by `close`: chance that all servers but one are busy
    SERVICE,  # written by `close`: mean service time, seconds
) = range(6)  # fmt: skip
POOL_NUMBERS = 6


@compiled
def imposed_s(x_s: float, pool: Floats, horizon_s: float) -> float:
    """Delay that x seconds of work impose on later arrivals at a pool, summed over them.

    Until the pool's wait W has drained, for W/(1 - load), each arrival waits x/K longer: in all
    λ·x·W/(1 - load), with λ arrivals per second and server. Where all other servers are busy anyhow,
    load^(K-1), those who come while x is worked on wait too: x/2 on average, but hardly longer than one mean
    service time, after which another server is free (or another pool the better choice).

    Args:
        pool: closed.
        horizon_s: a busy period counts for at most so long.
    """
    blocked_s = min(x_s / 2, pool[SERVICE])
    busy_s = min((pool[WAIT] + pool[OTHERS_BUSY] * blocked_s) / (1 - pool[LOAD]), horizon_s)
    return float(pool[RATE] * x_s * busy_s)


@compiled
def join(pool: Floats, rate: float, load: float, wait_s: float, servers: float) -> None:
    """Add a member to sums of rates and loads, and to the shortest wait."""
    pool[RATE] += rate
    pool[LOAD] += load
    pool[WAIT] = min(pool[WAIT], wait_s)
    pool[SERVERS] += servers


@compiled
def close(pool: Floats) -> None:
    """All members have joined and the means are taken: derive what each price of the pool needs."""
    pool[OTHERS_BUSY] = pool[LOAD] ** (pool[SERVERS] - 1)
    pool[SERVICE] = pool[LOAD] / max(pool[RATE], 1e-9)

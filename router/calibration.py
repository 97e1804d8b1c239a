"""Measure the fleet before the first client: step times, sessions between pairs, and a few real requests.

All workers are timed at once, because on shared machines they slow each other. Warm-up requests go the
normal way (placement, booking, journal), each with a cache salt of its own so that nothing is reused, and
are marked as calibration in the decision log.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout

from prfaas.engine.interface import StepProfile
from prfaas.protocol.messages import Sampling, WarmRequest
from prfaas.protocol.openai_errors import ApiError
from router.context import Gateway
from router.dispatch import Job

logger = logging.getLogger(__name__)
STRAGGLERS_S = 15.0
"""Once a decode worker is ready, the others have this long to be timed together with it."""
PROMPT_TOKENS = (96, 320, 96)
"""Warm-up prompts of each pair; the first one meets cold connections."""
ANSWER_TOKENS = 4
_profiles = msgspec.json.Decoder(StepProfile)


class Calibration:
    """Runs once at start, and again for each worker that joins later."""

    def __init__(self, gateway: Gateway, session: ClientSession) -> None:
        config = gateway.config
        self._config = config
        self._session = session
        self._workers = gateway.workers
        self._dispatcher = gateway.dispatcher
        self._recorder = gateway.recorder
        self._prompts = gateway.prompts
        self._vocab_size = gateway.model.vocab_size
        self._timeout = ClientTimeout(total=float(config.timeouts.start))
        self._late: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Wait for the workers and measure them; failures are logged and leave default profiles."""
        await self._wait_for_workers()
        if self._config.gateway.calibrate:
            names = self._workers.ready()
            logger.info("event=measuring workers=%s", ",".join(names))
            await asyncio.gather(*(self._time(name) for name in names))
            pairs = self._pairs()
            await asyncio.gather(*(self._warm(*pair) for pair in pairs))
            if self._config.gateway.warm_up:
                await self._warm_up(pairs)
            self._workers.on_rejoin = self._joined_later
        logger.info("event=fleet_ready workers=%s", ",".join(self._workers.ready()))

    async def stop(self) -> None:
        """End what still runs for late workers."""
        self._workers.on_rejoin = lambda worker: None
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)

    async def _wait_for_workers(self) -> None:
        deadline_s = float(self._config.timeouts.start)
        if not await self._workers.wait_for_decode(deadline_s):
            logger.error("event=no_decode_worker waited_s=%.0f", deadline_s)
            return
        if not await self._workers.wait_ready(min(STRAGGLERS_S, deadline_s)):
            missing = sorted(set(self._workers.names()) - set(self._workers.ready()))
            logger.warning("event=start_without_workers missing=%s", ",".join(missing))

    def _joined_later(self, worker: str) -> None:
        task = asyncio.create_task(self._measure_late(worker))
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _measure_late(self, worker: str) -> None:
        """A restarted worker keeps its profile; timing it among running requests would spoil both."""
        if not self._workers.has_profile(worker):
            await self._time(worker)
        await asyncio.gather(*(self._warm(*pair) for pair in self._pairs() if worker in pair))

    def _pairs(self) -> list[tuple[str, str]]:
        """(decode worker, prefill site), the decode worker itself first."""
        prefills = self._workers.ready("prefill")
        return [(decode, site) for decode in self._workers.ready("decode") for site in (decode, *prefills)]

    async def _time(self, worker: str) -> None:
        body = await self._post(worker, "/v1/calibrate", b"{}")
        if body is None:
            return
        try:
            self._workers.set_profile(worker, _profiles.decode(body))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.warning("event=bad_profile worker=%s error=%s", worker, error)

    async def _warm(self, decode: str, site: str) -> None:
        if decode != site:
            request = WarmRequest(prefill=self._workers.site(site))
            await self._post(decode, "/v1/warm", msgspec.json.encode(request))

    async def _post(self, worker: str, path: str, body: bytes) -> bytes | None:
        """The answer's body; None (and a warning) where the worker does not give one."""
        url = self._workers.site(worker).url + path
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(url, data=body, headers=headers, timeout=self._timeout) as response:
                answer = await response.read()
        except (ClientError, OSError, TimeoutError) as error:
            logger.warning("event=calibration_failed worker=%s path=%s error=%r", worker, path, error)
            return None
        if response.status >= 300:
            text = answer[:200].decode("utf-8", "replace")
            logger.warning(
                "event=calibration_failed worker=%s path=%s status=%d body=%s",
                worker,
                path,
                response.status,
                text,
            )
            return None
        return answer

    async def _warm_up(self, pairs: list[tuple[str, str]]) -> None:
        """All pairs at once, as with the step times: on shared machines they slow each other."""
        try:
            async with asyncio.timeout(float(self._config.timeouts.start)):
                for prompt_tokens in PROMPT_TOKENS:
                    await asyncio.gather(*(self._request(pair, prompt_tokens) for pair in pairs))
        except TimeoutError:
            logger.warning("event=warm_up_cut_short pairs=%d", len(pairs))

    async def _request(self, pair: tuple[str, str], prompt_tokens: int) -> None:
        context = self._workers.context_length()
        if context is None:
            return
        length = max(2, min(prompt_tokens, context - ANSWER_TOKENS))
        salt = f"calibration-{uuid.uuid4().hex}"
        rng = random.Random(prompt_tokens)
        token_ids = [rng.randrange(self._vocab_size // 2, self._vocab_size) for _ in range(length)]
        hashes = await self._prompts.hashes(token_ids, salt)
        arrival_s = self._recorder.now()
        job = Job(
            request_id=salt,
            token_ids=token_ids,
            block_hashes=tuple(hashes),
            sampling=Sampling(max_tokens=ANSWER_TOKENS, ignore_eos=True),
            arrival_s=arrival_s,
            cache_salt=salt,
            pair=pair,
        )
        trace = self._recorder.trace(arrival_s, {}, calibration=True)
        try:
            await self._dispatcher.run(job, trace, lambda update: None)
        except ApiError as error:
            logger.warning("event=warm_up_failed decode=%s site=%s error=%s", *pair, error.message)
        finally:
            trace.close()

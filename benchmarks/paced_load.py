"""An open-loop client: sends requests at their true arrival times, whatever becomes of the others."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from prfaas.engine.paced_runner import next_tokens, token_marks
from simulations.engine.build import asked_tokens
from simulations.workload.trace import Trace

_UNSHARED = 1 << 40
"""Token streams from here on belong to one request alone."""


@dataclass(slots=True)
class Answer:
    """What came of one request; seconds since it was sent."""

    sent_s: float = 0.0
    """Since the first arrival was due."""
    late_s: float = 0.0
    """How long after its time it was sent."""
    ttft_s: float = float("nan")
    total_s: float = float("nan")
    tokens: int = 0
    error: str = ""
    placement: str = ""
    decode: str = ""
    site: str = ""


def prompt_tokens(trace: Trace, index: int, vocabulary: int) -> NDArray[np.int64]:
    """Token ids of a request's prompt: equal blocks are equal tokens, everything else is unlike.

    Args:
        vocabulary: ids are 1 … vocabulary - 1.
    """
    length, size = int(trace.prompt_tokens[index]), trace.block_tokens
    if len(trace.block_offsets) > 1:
        blocks = trace.blocks[trace.block_offsets[index] : trace.block_offsets[index + 1]]
    else:
        blocks = np.zeros(0, dtype=np.int64)
    streams = np.full(-(-length // size), _UNSHARED + index, dtype=np.int64)
    known = min(len(blocks), length // size)  # a partial block is this request's own
    streams[:known] = blocks[:known]
    positions = np.arange(length)
    marks = token_marks(streams[positions // size], positions)
    return 1 + (marks % np.uint64(vocabulary - 1)).astype(np.int64)


def stop_tokens(
    last: NDArray[np.int64], prompts: NDArray[np.int64], answers: NDArray[np.int64], vocabulary: int
) -> list[int]:
    """For each request the token that paced workers give at the true end of its answer, to stop there; so
    `max_tokens` need not tell the router how long the answer will be. -1 where that token comes before, too.

    Args:
        last: last token of each prompt.
        prompts, answers: tokens in each.
    """
    tokens, longest = last, int(answers.max(initial=0))
    given = np.empty((longest, len(last)), dtype=np.int64)
    for step in range(longest):
        tokens = given[step] = next_tokens(tokens, prompts + step, vocabulary, frozenset((0,)))
    ends = given[answers - 1, np.arange(len(last))]
    earlier = (given == ends) & (np.arange(longest)[:, None] < answers - 1)
    return np.where(earlier.any(axis=0), -1, ends).tolist()


class LoadClient:
    """Sends requests to a gateway as streams of completions over token ids.

    Args:
        url: of the gateway, without `/v1`.
        model: name that the gateway serves.
        vocabulary: token ids are 1 … vocabulary - 1; 0 ends answers.
        context_length: of the model.
    """

    def __init__(self, url: str, model: str, vocabulary: int, context_length: int) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self._vocabulary = vocabulary
        self._context_length = context_length

    async def run(
        self, trace: Trace, progress: Callable[[int, int], None] = lambda ended, total: None
    ) -> list[Answer]:
        """Send every request at `trace.arrival_s` (seconds of this machine's clock); one answer each."""
        bodies = self._bodies(trace)
        answers = [Answer() for _ in bodies]
        ended = 0
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        gc.collect()
        gc.freeze()
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            began_s = time.monotonic()

            async def one(index: int) -> None:
                nonlocal ended
                due_s = began_s + float(trace.arrival_s[index])
                await asyncio.sleep(due_s - time.monotonic())
                answer = answers[index]
                answer.sent_s = time.monotonic() - began_s
                answer.late_s = time.monotonic() - due_s
                await self._send(http, bodies[index], answer)
                if not answer.error and answer.tokens != trace.output_tokens[index]:
                    answer.error = f"{answer.tokens} tokens, should be {trace.output_tokens[index]}"
                bodies[index] = b""
                ended += 1
                progress(ended, len(answers))

            async with asyncio.TaskGroup() as group:
                for index in range(len(bodies)):
                    group.create_task(one(index))
        return answers

    def _bodies(self, trace: Trace) -> list[bytes]:
        prompts = [prompt_tokens(trace, index, self._vocabulary) for index in range(len(trace))]
        last = np.array([prompt[-1] for prompt in prompts], dtype=np.int64)
        stops = stop_tokens(last, trace.prompt_tokens, trace.output_tokens, self._vocabulary)
        asked = asked_tokens(trace)
        bodies = []
        for index, prompt in enumerate(prompts):
            room = self._context_length - len(prompt)
            known = stops[index] < 0
            body: dict[str, Any] = {
                "model": self._model,
                "prompt": prompt.tolist(),
                "max_tokens": int(trace.output_tokens[index]) if known else min(asked, room),
                "stop_token_ids": [] if known else [stops[index]],
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
            bodies.append(msgspec.json.encode(body))
        return bodies

    async def _send(self, http: aiohttp.ClientSession, body: bytes, answer: Answer) -> None:
        sent_s = time.monotonic()
        last = b""
        try:
            headers = {"Content-Type": "application/json"}
            async with http.post(self._url, data=body, headers=headers) as response:
                answer.placement = response.headers.get("x-prfaas-placement", "")
                answer.decode = response.headers.get("x-prfaas-decode-worker", "")
                answer.site = response.headers.get("x-prfaas-prefill-worker", "")
                async for data in response.content.iter_any():
                    if answer.ttft_s != answer.ttft_s and response.status == 200:
                        answer.ttft_s = time.monotonic() - sent_s
                    last = last[-2048:] + data
        except (aiohttp.ClientError, OSError) as error:
            answer.error = repr(error)
            return
        answer.total_s = time.monotonic() - sent_s
        answer.tokens = _completion_tokens(last)
        if response.status != 200 or not answer.tokens:
            answer.error = f"status {response.status}: {last[-300:].decode('utf-8', 'replace')}"


def _completion_tokens(tail: bytes) -> int:
    """The count in the usage event before `[DONE]`; 0 where the stream did not end well."""
    events = tail.split(b"data: ")
    if len(events) < 2 or not events[-1].startswith(b"[DONE]"):
        return 0
    usage = msgspec.json.decode(events[-2]).get("usage") or {}
    return int(usage.get("completion_tokens", 0))

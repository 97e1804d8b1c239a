"""Send the workload through the `openai` client, as any program would, and follow the gateway's decisions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec
from openai import AsyncOpenAI, OpenAIError

from launcher.demo.records import Record
from launcher.demo.workload import Conversation, Turn, Workload
from router.decision_log import DecisionRecord

MAX_CONVERSATIONS = 5
REQUEST_TIMEOUT_S = 180.0
_POLL_S = 0.4
_DECISIONS_KEPT = 1000


class DemoClient:
    """Runs conversations and keeps `records` up to date.

    Args:
        url: of the gateway, without `/v1`.
        on_change: called after any record has changed.
    """

    def __init__(self, url: str, model: str, on_change: Callable[[], None] = lambda: None) -> None:
        self.records: list[Record] = []
        self._url = url
        self._model = model
        self._on_change = on_change
        self._openai = AsyncOpenAI(
            base_url=f"{url}/v1", api_key="demo", max_retries=0, timeout=REQUEST_TIMEOUT_S
        )
        self._running = asyncio.Semaphore(MAX_CONVERSATIONS)
        self._began_s = 0.0

    async def close(self) -> None:
        await self._openai.close()

    async def run(self, workload: Workload) -> None:
        """Send everything; returns when the last answer has ended. Failures stand in the records."""
        self._began_s = time.monotonic()
        following = asyncio.create_task(self._follow_decisions())
        try:
            async with asyncio.TaskGroup() as group:
                for conversation in workload.conversations:
                    group.create_task(self._converse(conversation))
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
        await self.refresh_decisions()

    async def _converse(self, conversation: Conversation) -> None:
        await asyncio.sleep(conversation.start_s - (time.monotonic() - self._began_s))
        messages: list[dict[str, str]] = []
        async with self._running:
            for i, turn in enumerate(conversation.turns):
                if i:
                    await asyncio.sleep(conversation.think_s)
                record = await self._ask(turn, messages)
                if record.error:
                    return
                messages += [
                    {"role": "user", "content": turn.text},
                    {"role": "assistant", "content": record.text},
                ]

    async def _ask(self, turn: Turn, history: list[dict[str, str]]) -> Record:
        record = Record(number=len(self.records) + 1, work=turn.work, max_tokens=turn.max_tokens)
        if turn.raw:
            record.prompt = turn.text
        else:
            record.messages = [*history, {"role": "user", "content": turn.text}]
        self.records.append(record)
        self._on_change()
        sent_s = time.monotonic()
        try:
            async for text, token_ids, finish_reason in self._stream(record):
                if record.ttft_s is None and token_ids:
                    record.ttft_s, record.state = time.monotonic() - sent_s, "answering"
                record.text += text
                record.token_ids += token_ids
                record.finish_reason = finish_reason or record.finish_reason
                self._on_change()
            if record.finish_reason is None:
                record.error = "the answer ended without a finish reason"
        except OpenAIError as error:
            record.error = str(error) or type(error).__name__
        record.total_s = time.monotonic() - sent_s
        record.state = "error" if record.error else "done"
        self._on_change()
        return record

    async def _stream(self, record: Record) -> AsyncIterator[tuple[str, list[int], str | None]]:
        """(text, token ids, finish reason) of each chunk; greedy, with token ids for the parity check."""
        settings: dict[str, Any] = {
            "model": self._model,
            "max_tokens": record.max_tokens,
            "temperature": 0,
            "stream": True,
            "extra_body": {"return_token_ids": True},
        }
        if record.prompt:
            answer = await self._openai.completions.with_raw_response.create(prompt=record.prompt, **settings)
        else:
            chat = self._openai.chat.completions
            answer = await chat.with_raw_response.create(messages=record.messages, **settings)  # type: ignore[arg-type]
        record.request_id = answer.headers.get("x-request-id", "")
        async with answer.parse() as chunks:
            async for chunk in chunks:
                for choice in chunk.choices:
                    text = choice.text if record.prompt else choice.delta.content
                    extra = choice.model_extra or {}
                    yield text or "", extra.get("token_ids") or [], choice.finish_reason

    # ------------------------------------------------------------ what the gateway decided

    async def _follow_decisions(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            with suppress(aiohttp.ClientError, TimeoutError):  # the next poll, or the last one, catches up
                await self.refresh_decisions()

    async def refresh_decisions(self) -> None:
        """Attach the gateway's newest decision to every record."""
        timeout = aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session:
            parameters = {"limit": str(_DECISIONS_KEPT)}
            async with session.get(f"{self._url}/debug/decisions", params=parameters) as answer:
                decisions = parse_decisions(await answer.read())
        newest = {decision.request_id.rpartition("-")[0]: decision for decision in decisions}
        for record in self.records:
            record.decision = newest.get(record.request_id, record.decision)
        self._on_change()

    async def prompt_token_ids(self, record: Record) -> list[int]:
        """Token ids of a record's prompt, from the gateway's own tokenizer and chat template.

        Raises:
            aiohttp.ClientError: the gateway refused or is gone.
        """
        body: dict[str, Any] = {"model": self._model}
        body |= {"prompt": record.prompt} if record.prompt else {"messages": record.messages}
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session:
            async with session.post(f"{self._url}/tokenize", json=body) as answer:
                return msgspec.json.decode(await answer.read(), type=_Tokenized).tokens


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class _Decisions(msgspec.Struct):
    decisions: list[DecisionRecord]


def parse_decisions(body: bytes) -> list[DecisionRecord]:
    """Records of `/debug/decisions`, earlier attempts first. Their ids are `<x-request-id>-<choice>`."""
    decisions = msgspec.json.decode(body, type=_Decisions).decisions
    return sorted(decisions, key=lambda decision: decision.attempt)

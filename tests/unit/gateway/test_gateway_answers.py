"""Shapes of answers: chat and completions, whole and streamed, with usage, n, logprobs and token ids."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway_fleet import Fleet, chat, events
from scripted_worker import answer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def test_a_chat_answer_has_openai_s_shape_and_names_its_placement(fleet: Fleet) -> None:
    response = await fleet.client.post(CHAT, json=chat())
    body = await response.json()

    assert response.status == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert response.headers["x-prfaas-placement"] in ("reuse", "local", "pool", "remote")
    assert response.headers["x-prfaas-decode-worker"] == "decode-0"
    assert response.headers["x-prfaas-prefill-worker"] in fleet.workers
    assert response.headers["x-prfaas-attempts"] == "1"
    assert response.headers["x-prfaas-decision"].startswith(response.headers["x-prfaas-placement"])
    assert body["id"] == f"chatcmpl-{response.headers['x-request-id']}"


async def test_usage_counts_the_prompt_and_the_cached_tokens_that_the_prefill_site_reported(
    fleet: Fleet,
) -> None:
    fleet.decode.script = answer([([72, 73], "Hi"), ([74], "!")], cached=16)
    body = await (await fleet.client.post(CHAT, json=chat("a long enough question, " * 5))).json()

    prompt = len(fleet.decode.requests[0].token_ids)
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 3,
        "total_tokens": prompt + 3,
        "prompt_tokens_details": {"cached_tokens": 16},
    }


async def test_cached_tokens_never_exceed_the_prompt(fleet: Fleet) -> None:
    fleet.decode.script = answer([([72], "Hi")], cached=100_000)
    usage = (await (await fleet.client.post(CHAT, json=chat())).json())["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]


async def test_a_chat_stream_opens_with_the_role_and_ends_with_done(fleet: Fleet) -> None:
    response = await fleet.client.post(CHAT, json=chat(stream=True))
    body = await response.read()

    assert response.status == 200
    assert response.content_type == "text/event-stream"
    assert body.endswith(b"data: [DONE]\n\n")
    chunks = events(body)
    assert [chunk["object"] for chunk in chunks] == ["chat.completion.chunk"] * 4
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " world"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    assert response.headers["x-prfaas-decode-worker"] == "decode-0"


async def test_include_usage_adds_a_last_chunk_without_choices(fleet: Fleet) -> None:
    options = {"include_usage": True}
    response = await fleet.client.post(CHAT, json=chat(stream=True, stream_options=options))
    chunks = events(await response.read())

    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_completions_answer_whole_and_streamed(fleet: Fleet) -> None:
    request = {"model": "tiny", "prompt": "Once upon", "max_tokens": 5}
    whole = await (await fleet.client.post(COMPLETIONS, json=request)).json()
    streamed = await fleet.client.post(COMPLETIONS, json={**request, "stream": True})
    chunks = events(await streamed.read())

    assert whole["object"] == "text_completion"
    assert whole["choices"][0]["text"] == "Hello world"
    assert whole["id"].startswith("cmpl-")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello world"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert [request.sampling.max_tokens for request in fleet.decode.requests] == [5, 5]


async def test_prompts_may_be_token_ids_and_batches(fleet: Fleet) -> None:
    ids = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4}
    assert (await fleet.client.post(COMPLETIONS, json=ids)).status == 200
    assert fleet.decode.requests[0].token_ids == [5, 6, 7]

    batch = {"model": "tiny", "prompt": ["ab", "cd"], "n": 2, "max_tokens": 4}
    body = await (await fleet.client.post(COMPLETIONS, json=batch)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert len({tuple(request.token_ids) for request in fleet.decode.requests[1:]}) == 2


async def test_chat_logprobs_name_tokens_their_bytes_and_the_likeliest(fleet: Fleet) -> None:
    response = await fleet.client.post(CHAT, json=chat(logprobs=True, top_logprobs=2))
    entries = (await response.json())["choices"][0]["logprobs"]["content"]

    assert len(entries) == 3
    raw = fleet.gateway.model.token_bytes(72)
    assert entries[0]["bytes"] == list(raw)
    assert entries[0]["token"] == raw.decode()
    assert entries[0]["logprob"] == -0.5
    assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [-1.0, -2.0]


async def test_completions_logprobs_have_parallel_lists_and_running_offsets(fleet: Fleet) -> None:
    request = {"model": "tiny", "prompt": "x", "max_tokens": 5, "logprobs": 1}
    found = (await (await fleet.client.post(COMPLETIONS, json=request)).json())["choices"][0]["logprobs"]

    assert found["token_logprobs"] == [-0.5, -0.5, -0.5]
    assert found["text_offset"] == [0, len(found["tokens"][0]), len("".join(found["tokens"][:2]))]
    assert [len(top) for top in found["top_logprobs"]] == [2, 2, 2]


async def test_logprobs_of_a_frame_without_text_are_streamed(fleet: Fleet) -> None:
    fleet.decode.script = answer([([200], ""), ([201], "é")])
    response = await fleet.client.post(CHAT, json=chat(stream=True, logprobs=True))
    entries = [
        entry
        for chunk in events(await response.read())
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert len(entries) == 2


async def test_return_token_ids_adds_them_whole_and_streamed(fleet: Fleet) -> None:
    whole = await (await fleet.client.post(CHAT, json=chat(return_token_ids=True))).json()
    stream = await fleet.client.post(CHAT, json=chat(return_token_ids=True, stream=True))
    ids = [i for chunk in events(await stream.read()) for i in chunk["choices"][0].get("token_ids", [])]

    assert whole["choices"][0]["token_ids"] == [72, 73, 74]
    assert ids == [72, 73, 74]


async def test_sampling_reaches_the_worker_with_every_field_filled_in(fleet: Fleet) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 11, "stop": "END",
        "stop_token_ids": [3], "ignore_eos": True, "max_completion_tokens": 9, "cache_salt": "mine",
    }  # fmt: skip
    await fleet.client.post(CHAT, json=chat(**fields))
    await fleet.client.post(CHAT, json=chat())

    given, default = (request.sampling for request in fleet.decode.requests)
    assert fleet.decode.requests[0].cache_salt == "mine"
    assert (given.temperature, given.top_p, given.top_k, given.min_p) == (0.5, 0.9, 7, 0.1)
    assert (given.seed, given.stop, given.stop_token_ids) == (11, ("END",), (3,))
    assert (given.ignore_eos, given.max_tokens, given.logprobs) == (True, 9, -1)
    assert (default.temperature, default.top_p, default.max_tokens) == (1.0, 1.0, 32)


async def test_choices_have_seeds_of_their_own_and_wait_for_the_first_one(fleet: Fleet) -> None:
    started: list[int] = []

    async def script(request: Any) -> Any:
        started.append(request.sampling.seed)
        if len(started) == 1:
            await asyncio.sleep(0.05)
            assert len(started) == 1, "the others are placed once the first one's prompt is cached"
        async for frame in answer([([72], f"seed{request.sampling.seed}")])(request):
            yield frame

    fleet.decode.script = script
    response = await fleet.client.post(CHAT, json=chat(n=3, seed=5))
    body = await response.json()

    assert response.status == 200
    assert [choice["message"]["content"] for choice in body["choices"]] == ["seed5", "seed6", "seed7"]
    assert body["usage"]["completion_tokens"] == 3
    assert body["usage"]["prompt_tokens"] == len(fleet.decode.requests[0].token_ids)


async def test_streamed_choices_are_told_apart_by_their_index(fleet: Fleet) -> None:
    response = await fleet.client.post(CHAT, json=chat(n=2, stream=True))
    texts = {0: "", 1: ""}
    for chunk in events(await response.read()):
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {0: "Hello world", 1: "Hello world"}


async def test_an_answer_without_text_still_has_a_role_and_an_end(fleet: Fleet) -> None:
    fleet.decode.script = answer([])
    response = await fleet.client.post(CHAT, json=chat(stream=True))
    chunks = events(await response.read())
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"

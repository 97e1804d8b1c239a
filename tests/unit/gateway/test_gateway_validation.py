"""Bad input gets a 4xx with an OpenAI error body that names the parameter, and reaches no worker."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from gateway_fleet import Fleet, MakeFleet, chat
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prfaas.protocol.openai import ChatRequest, CompletionRequest, decode
from prfaas.protocol.openai_errors import ApiError

CHAT_CASES: list[tuple[dict[str, Any], str]] = [
    ({"temprature": 1}, "temprature"),
    ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
    ({"bootstrap_room": 7}, "bootstrap_room"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": -5}, "max_completion_tokens"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"seed": "x"}, "seed"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": -1}, "frequency_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"audio": {"voice": "a"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"store": True}, "store"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
]
NEUTRAL: dict[str, Any] = {
    "tools": [], "tool_choice": "none", "functions": None, "response_format": {"type": "text"},
    "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "modalities": ["text"], "store": False,
    "user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "top_k": -1, "stop": None, "n": 1,
    "repetition_penalty": 1.0, "parallel_tool_calls": True,
}  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), CHAT_CASES, ids=lambda value: str(value)[:60])
def test_a_wrong_chat_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode(msgspec.json.encode({**chat(), **fields}), ChatRequest)
    assert caught.value.status == 400
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": []}, "messages"),
        ({"prompt": {"a": 1}}, "prompt"),
    ],
    ids=str,
)
def test_a_wrong_completions_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode(msgspec.json.encode({"model": "tiny", "prompt": "x", **fields}), CompletionRequest)
    assert caught.value.status == 400
    assert caught.value.param == param


@pytest.mark.parametrize(
    "prompt", [[], [1, "a"], [[1], "a"], [-1], [2**40], ["x"] * 33], ids=lambda p: str(p)[:20]
)
def test_a_wrong_list_of_prompts_is_refused(prompt: list[Any]) -> None:
    with pytest.raises(ApiError) as caught:
        decode(msgspec.json.encode({"model": "tiny", "prompt": prompt}), CompletionRequest).prompts()
    assert caught.value.param is not None
    assert caught.value.param.startswith("prompt")


def test_values_that_ask_for_nothing_are_accepted() -> None:
    request = decode(msgspec.json.encode({**chat(), **NEUTRAL}), ChatRequest)
    assert request.choices == 1
    same = {"model": "tiny", "prompt": "x", "n": 2, "best_of": 2, "echo": False, "suffix": ""}
    assert decode(msgspec.json.encode(same), CompletionRequest).choices == 2


def test_an_unknown_field_is_answered_with_the_nearest_valid_one() -> None:
    with pytest.raises(ApiError, match="did you mean `max_tokens`"):
        decode(msgspec.json.encode({**chat(), "max_token": 5}), ChatRequest)


def test_text_parts_are_joined_and_developers_speak_as_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    request = decode(msgspec.json.encode({"model": "tiny", "messages": messages}), ChatRequest)
    assert request.conversation() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"5",
        b'{"model":"tiny","messages":[{"role":"user","content":"\xff\xfe"}]}',
        b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}', b'\xef\xbb\xbf{}',
        b'{"model":"tiny","messages":' + b"[" * 50_000, b'{"model":"tiny","temperature":1e999}',
        b'{"model":"tiny","tools":' + b'{"a":' * 20_000,
    ],
    ids=range(11),
)  # fmt: skip
async def test_unreadable_bodies_are_400(fleet: Fleet, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/debug/place"):
        response = await fleet.client.post(path, data=body)
        assert response.status == 400, path
        assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
    assert fleet.decode.requests == []


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        ("/v1/chat/completions", chat(model="other"), 404, "model", "tiny"),
        ("/v1/completions", {"model": "tiny", "prompt": ""}, 400, "prompt", "0 tokens"),
        ("/v1/completions", {"model": "tiny", "prompt": [300_000]}, 400, "prompt", "vocabulary"),
        ("/v1/completions", {"model": "tiny", "prompt": [1] * 256}, 400, "prompt", "256"),
        ("/v1/chat/completions", chat("word " * 500), 400, "messages", "256"),
        ("/v1/chat/completions", chat(max_tokens=257), 400, "max_tokens", "256"),
        ("/v1/chat/completions", chat(max_completion_tokens=255), 400, "max_completion_tokens", "256"),
        ("/v1/chat/completions", chat(stop_token_ids=[99_999]), 400, "stop_token_ids", "vocabulary"),
        ("/detokenize", {"tokens": [99_999]}, 400, "tokens", "vocabulary"),
        ("/tokenize", {}, 400, "prompt", "messages"),
        ("/tokenize", {"model": "other", "prompt": "x"}, 404, "model", "tiny"),
    ],
)
async def test_what_only_the_model_can_tell_is_refused_with_the_counts(
    fleet: Fleet, path: str, body: dict[str, Any], status: int, param: str, words: str
) -> None:
    response = await fleet.client.post(path, json=body)
    error = (await response.json())["error"]
    assert (response.status, error["param"]) == (status, param)
    assert words in error["message"]
    assert fleet.decode.requests == []


async def test_a_body_beyond_the_limit_is_413(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(gateway={"max_body": 1000})
    response = await fleet.client.post("/v1/chat/completions", json=chat("x" * 5000))
    assert response.status == 413
    assert (await response.json())["error"]["code"] == "body_too_large"


async def test_unknown_paths_and_methods_have_openai_bodies(fleet: Fleet) -> None:
    unknown = await fleet.client.get("/v1/nothing")
    wrong = await fleet.client.get("/v1/chat/completions")
    assert (unknown.status, (await unknown.json())["error"]["code"]) == (404, "unknown_path")
    assert (wrong.status, wrong.headers["Allow"]) == (405, "POST")
    assert (await wrong.json())["error"]["code"] == "method_not_allowed"


JUNK_HEADERS = [
    b"Content-Type: \x7f/garbage; charset=klingon", b"Content-Encoding: gzip", b"Content-Encoding: klingon",
    b"Authorization: Bearer \x80\xff", b"X-Request-Id: " + b"a" * 4000, b"X-Long: " + b"a" * 20_000,
    b"Accept: " + b"," * 500, b"Expect: 200-maybe", b"Range: bytes=9-1", b"Cookie: =;;=\t", b"no colon here",
    b"Content-Length: 5", b"Transfer-Encoding: chunked", b"X-Nul: a\x00b", b"Traceparent: \xf0\x9f\x92\xa9",
]  # fmt: skip


@pytest.mark.parametrize("header", JUNK_HEADERS, ids=range(len(JUNK_HEADERS)))
async def test_header_junk_never_causes_a_5xx(fleet: Fleet, header: bytes) -> None:
    body = msgspec.json.encode(chat())
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    length = b"Content-Length: %d\r\n" % len(body)
    reader, writer = await asyncio.open_connection(fleet.client.host, fleet.client.port)
    try:
        writer.write(head + length + header + b"\r\n\r\n" + body)
        status_line = await asyncio.wait_for(reader.readline(), 5)
    finally:
        writer.close()
        await writer.wait_closed()
    assert 200 <= int(status_line.split()[1]) < 500


async def test_clients_without_a_known_token_are_401_and_probes_are_not(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(auth={"client_tokens": ["open sesame"], "service_token": "between us"})
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic open sesame"}):
        response = await fleet.client.post("/v1/chat/completions", json=chat(), headers=headers)
        assert response.status == 401
        assert (await response.json())["error"]["code"] == "invalid_api_key"
    known = {"Authorization": "Bearer open sesame"}
    assert (await fleet.client.post("/v1/chat/completions", json=chat(), headers=known)).status == 200
    for path in ("/healthz", "/readyz", "/metrics"):
        assert (await fleet.client.get(path)).status == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = st.sampled_from([*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, "junk"])
BODIES = st.builds(
    lambda base, changes: {**base, **changes},
    st.sampled_from([{}, chat(), {"model": "tiny", "prompt": "hello"}]),
    st.dictionaries(FIELDS, JSON, max_size=3),
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=BODIES)
def test_random_bodies_are_answered_or_refused_but_never_break_the_schema(body: dict[str, Any]) -> None:
    for kind in (ChatRequest, CompletionRequest):
        try:
            request = decode(msgspec.json.encode(body), kind)
        except ApiError as error:
            refusal = error
        else:
            refusal = None
            assert 1 <= request.choices <= 8
        assert refusal is None or refusal.status == 400


async def test_random_bodies_never_cause_a_5xx(fleet: Fleet) -> None:
    drawn: list[dict[str, Any]] = []
    collect = given(body=BODIES)(lambda body: drawn.append(body))
    settings(max_examples=100, database=None, deadline=None)(collect)()
    for body in drawn:
        for path in ("/v1/chat/completions", "/v1/completions", "/debug/place"):
            response = await fleet.client.post(path, data=msgspec.json.encode(body))
            assert response.status < 500, (path, body)
            await response.read()

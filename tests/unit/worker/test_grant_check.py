"""What prefill and decode workers refuse before they touch anything."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from decode_service.request_check import request_problem
from prefill_service.grant_check import grant_problem, hello_refusal
from prfaas.engine.model_config import LlamaConfig, RopeScaling
from prfaas.kv.layout import CacheGroup, CompatRecord, KVLayout
from prfaas.protocol.messages import GenerateRequest, Grant, Hello, PrefillSite, Sampling

GROUPS = (CacheGroup(kind="full", layers=(0, 1), kv_heads=2, head_dim=8),)
LAYOUT = KVLayout(groups=GROUPS, page_size=4, dtype="float32", num_pages=10)
COMPAT = CompatRecord(
    protocol=1,
    weights="w",
    tokenizer="t",
    attention="gqa",
    page_layout="HND",
    page_size=4,
    kv_dtype="float32",
    groups=GROUPS,
)
MODEL = LlamaConfig(
    architecture="LlamaForCausalLM",
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=50,
    context_length=100,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=RopeScaling(),
    tie_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    eos_token_ids=(0,),
)
HELLO = Hello(
    session="s",
    worker="decode-0",
    cluster="pd",
    incarnation="i",
    compat=COMPAT,
    layout=LAYOUT,
    pool_address=4096,
    agent_metadata=b"",
)
GRANT = Grant(
    request_id="r",
    attempt=1,
    token_ids=list(range(10)),
    first_page=1,
    page_ids=[7, 3],
    lease_s=3.0,
    deadline_s=10.0,
)


def test_an_equal_peer_is_welcome_whatever_its_pool_size() -> None:
    larger = replace(HELLO, layout=replace(LAYOUT, num_pages=999))
    assert hello_refusal(larger, COMPAT, "prefill-0") is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("weights", "other"), ("tokenizer", "other"), ("page_size", 8), ("kv_dtype", "bfloat16")],
)
def test_a_refusal_names_the_field_that_differs(field: str, value: Any) -> None:
    refused = hello_refusal(replace(HELLO, compat=replace(COMPAT, **{field: value})), COMPAT, "prefill-0")
    assert refused is not None
    assert refused.reason == "incompatible"
    assert [name for name, _, _ in refused.fields] == [field]


def test_a_layout_that_contradicts_the_record_is_refused() -> None:
    refused = hello_refusal(replace(HELLO, layout=replace(LAYOUT, page_size=8)), COMPAT, "prefill-0")
    assert refused is not None
    assert [name for name, _, _ in refused.fields] == ["layout.page_size"]


def test_another_protocol_version_is_refused() -> None:
    refused = hello_refusal(replace(HELLO, version=99), COMPAT, "prefill-0")
    assert refused is not None
    assert refused.fields == [("version", "1", "99")]


def test_a_good_grant_has_no_problem() -> None:
    assert grant_problem(GRANT, LAYOUT, LAYOUT, MODEL) == ""


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"token_ids": [1]}, "a prompt of 1 tokens"),
        ({"token_ids": [1] * 101}, "between 2 and 100"),
        ({"token_ids": [-1, *range(9)]}, "vocabulary of 50"),
        ({"first_page": 3, "page_ids": []}, "first_page 3"),
        ({"first_page": -1}, "first_page -1"),
        ({"page_ids": [7]}, "1 destination pages for 2"),
        ({"page_ids": [7, 7]}, "named twice"),
        ({"page_ids": [7, 10]}, "outside the receiver's 10 pages"),
        ({"page_ids": [7, -1]}, "outside the receiver's 10 pages"),
        ({"deadline_s": 0.0}, "must be positive and finite"),
        ({"lease_s": float("nan")}, "must be positive and finite"),
    ],
)
def test_a_wrong_grant_is_refused_with_its_reason(changes: dict[str, Any], problem: str) -> None:
    assert problem in grant_problem(replace(GRANT, **changes), LAYOUT, LAYOUT, MODEL)


REQUEST = GenerateRequest(
    request_id="r", attempt=1, token_ids=[1, 2, 3], sampling=Sampling(max_tokens=5), deadline_s=10.0
)


def test_a_good_request_has_no_problem() -> None:
    assert request_problem(REQUEST, MODEL, 80) == ""


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version": 2}, "version 2"),
        ({"request_id": ""}, "request_id"),
        ({"attempt": 0}, "attempt"),
        ({"token_ids": []}, "token_ids: 0 tokens"),
        ({"token_ids": [1] * 81}, "between 1 and 80"),
        ({"token_ids": [50]}, "vocabulary of 50"),
        ({"token_ids": [-1]}, "vocabulary of 50"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"deadline_s": float("inf")}, "deadline_s"),
        ({"prefill": PrefillSite(worker="w", url="file:///etc/passwd", cluster="c")}, "prefill.url"),
        ({"sampling": Sampling(max_tokens=0)}, "sampling.max_tokens"),
        ({"sampling": Sampling(max_tokens=98)}, "the 97 left"),
        ({"sampling": Sampling(max_tokens=1, temperature=float("nan"))}, "sampling.temperature"),
        ({"sampling": Sampling(max_tokens=1, top_p=0.0)}, "sampling.top_p"),
        ({"sampling": Sampling(max_tokens=1, min_p=2.0)}, "sampling.min_p"),
        ({"sampling": Sampling(max_tokens=1, top_k=-1)}, "sampling.top_k"),
        ({"sampling": Sampling(max_tokens=1, logprobs=-2)}, "sampling.logprobs"),
        ({"sampling": Sampling(max_tokens=1, stop=("",))}, "sampling.stop"),
    ],
)
def test_a_wrong_request_is_refused_with_the_name_of_the_field(changes: dict[str, Any], problem: str) -> None:
    assert problem in request_problem(replace(REQUEST, **changes), MODEL, 80)

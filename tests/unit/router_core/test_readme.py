"""What README.md shows works as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from brain_fleet import fleet, request

from prfaas.protocol.openai import ChatRequest, decode
from router.core.decision import Decision
from router.core.policy_loader import load_policy

README = Path(__file__).parents[3] / "README.md"


def block(language: str, containing: str) -> str:
    """The fenced block in `language` that contains a text."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    (found,) = [text for its, text in blocks if its == language and containing in text]
    return str(found)


def after_the_prefill(decision: Decision) -> float:
    """Just after the prompt is predicted to be cached, while the prediction lives."""
    return decision.now_s + sum(decision.term(name) for name in ("start_s", "prefill_s", "transfer_s")) + 0.1


def test_the_policy_goes_where_the_fewest_tokens_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_module.py").write_text(block("python", "class ShortestPrefill"))
    monkeypatch.syspath_prepend(str(tmp_path))
    policy = load_policy("my_module:ShortestPrefill")
    scheduler = fleet(2, 1, 2, policy=policy, policy_name="shortest")
    blocks = tuple(range(1, 40))
    first = scheduler.place(request("a", tokens=640, block_hashes=blocks))
    again = scheduler.place(request("b", tokens=640, block_hashes=blocks, now_s=after_the_prefill(first)))
    assert again.count("uncached_tokens") == int(again.candidates.uncached_tokens.min())
    assert again.count("uncached_tokens") < first.count("uncached_tokens")
    assert {first.policy, again.policy} == {"shortest"}
    assert scheduler.counters().policy_faults == 0


def test_the_body_for_curl_is_a_valid_chat_request() -> None:
    curl = block("", "curl ")
    body = curl[curl.index("-d '") + 4 : curl.rindex("'")]
    assert decode(body.encode(), ChatRequest).model == "smollm2-135m-instruct"

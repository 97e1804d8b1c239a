"""What a prefill worker refuses before it touches anything. Pure."""

from __future__ import annotations

from prfaas.engine.model_config import LlamaConfig
from prfaas.kv.layout import CompatRecord, KVLayout
from prfaas.protocol.messages import MAX_DEADLINE_S, PROTOCOL_VERSION, Grant, Hello, Refused


def hello_refusal(hello: Hello, ours: CompatRecord, name: str) -> Refused | None:
    """Why no session with this decode worker can be; None = it can."""
    if hello.version != PROTOCOL_VERSION:
        versions = ("version", str(PROTOCOL_VERSION), str(hello.version))
        return Refused(reason="incompatible", fields=[versions], message=f"{name} speaks another protocol")
    differences = ours.differences(hello.compat)
    layout = hello.layout
    for field, mine, theirs in (
        ("layout.groups", ours.groups, layout.groups),
        ("layout.page_size", ours.page_size, layout.page_size),
        ("layout.dtype", ours.kv_dtype, layout.dtype),
    ):
        if mine != theirs:
            differences.append((field, str(mine), str(theirs)))
    if differences:
        return Refused(
            reason="incompatible", fields=differences, message=f"{name} cannot exchange KV with you"
        )
    if layout.num_pages < 1:
        return Refused(reason="bad_request", message=f"a pool of {layout.num_pages} pages")
    return None


def grant_problem(grant: Grant, ours: KVLayout, theirs: KVLayout, model: LlamaConfig) -> str:
    """What is wrong with a grant, in words; empty = nothing."""
    prompt = len(grant.token_ids)
    if not 2 <= prompt <= model.context_length:
        return f"a prompt of {prompt} tokens; between 2 and {model.context_length} can be prefilled"
    if min(grant.token_ids) < 0 or max(grant.token_ids) >= model.vocab_size:
        return f"a token id outside the vocabulary of {model.vocab_size}"
    pages = ours.pages_for(prompt - 1)
    if not 0 <= grant.first_page < pages:
        return f"first_page {grant.first_page} of a prompt of {pages} pages"
    if len(grant.page_ids) != pages - grant.first_page:
        return f"{len(grant.page_ids)} destination pages for {pages - grant.first_page} prompt pages"
    if len(set(grant.page_ids)) != len(grant.page_ids):
        return "a destination page is named twice"
    if min(grant.page_ids) < 0 or max(grant.page_ids) >= theirs.num_pages:
        return f"a destination page outside the receiver's {theirs.num_pages} pages"
    if not (0 < grant.deadline_s <= MAX_DEADLINE_S and 0 < grant.lease_s <= MAX_DEADLINE_S):
        return f"deadline_s {grant.deadline_s} and lease_s {grant.lease_s} must be positive and finite"
    return ""

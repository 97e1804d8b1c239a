"""What a decode worker refuses before it touches anything. Pure."""

from __future__ import annotations

from prfaas.engine.model_config import LlamaConfig
from prfaas.protocol.messages import MAX_DEADLINE_S, PROTOCOL_VERSION, GenerateRequest, Sampling


def request_problem(request: GenerateRequest, model: LlamaConfig, longest_prompt_tokens: int) -> str:
    """What is wrong with a request, in words that name the field; empty = nothing."""
    prompt = len(request.token_ids)
    if request.version != PROTOCOL_VERSION:
        return f"version {request.version} is not spoken here, only {PROTOCOL_VERSION}"
    if not request.request_id or request.attempt < 1:
        return "request_id must not be empty and attempt at least 1"
    if not 1 <= prompt <= longest_prompt_tokens:
        return f"token_ids: {prompt} tokens; between 1 and {longest_prompt_tokens} are possible here"
    if min(request.token_ids) < 0 or max(request.token_ids) >= model.vocab_size:
        return f"token_ids: an id outside the vocabulary of {model.vocab_size}"
    if not 0 < request.deadline_s <= MAX_DEADLINE_S:
        return f"deadline_s: {request.deadline_s} is not between 0 and {MAX_DEADLINE_S:.0f}"
    if request.prefill is not None and not request.prefill.url.startswith(("http://", "https://")):
        return f"prefill.url: {request.prefill.url!r} is not an http address"
    return sampling_problem(request.sampling, model.context_length - prompt)


def sampling_problem(sampling: Sampling, room_tokens: int) -> str:
    """What is wrong with sampling parameters, with `room_tokens` left in the context."""
    if not 1 <= sampling.max_tokens <= room_tokens:
        return f"sampling.max_tokens: {sampling.max_tokens} is not between 1 and the {room_tokens} left"
    if not 0 <= sampling.temperature <= 100:
        return f"sampling.temperature: {sampling.temperature} is not between 0 and 100"
    if not 0 < sampling.top_p <= 1:
        return f"sampling.top_p: {sampling.top_p} is not in (0, 1]"
    if not 0 <= sampling.min_p <= 1:
        return f"sampling.min_p: {sampling.min_p} is not in [0, 1]"
    if sampling.top_k < 0:
        return f"sampling.top_k: {sampling.top_k} is negative"
    if sampling.logprobs < -1:
        return f"sampling.logprobs: {sampling.logprobs} is less than -1"
    if any(not stop for stop in sampling.stop):
        return "sampling.stop: an empty stop string"
    return ""

"""Requests of the OpenAI HTTP API that the gateway accepts, decoded strictly.

A field that OpenAI (or vLLM) has and we don't yet is declared with its neutral values: those pass, others
get a 400 that says so. A field nobody knows is refused with the nearest valid name. Shapes follow
https://platform.openai.com/docs/api-reference (chat, completions); `top_k`, `min_p`, `ignore_eos`,
`stop_token_ids`, `cache_salt` and `return_token_ids` follow vLLM.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from prfaas.protocol.openai_errors import ApiError, bad_request

MAX_CHOICES = 8
"""Largest `n`."""
MAX_PROMPTS = 32
"""Most prompts in one completions request."""
COMPLETIONS_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens` for /v1/completions."""

Count = Annotated[int, Meta(ge=1, le=2**31)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
StopStrings = Annotated[list[StopString], Meta(max_length=4)]
Salt = Annotated[str, Meta(min_length=1, max_length=256)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`stream_options`; `include_obfuscation` pads OpenAI's chunks and changes nothing here."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ContentPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One part of a message's content; only `text` parts can be served."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    audio: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Role and plain text of each message; `developer` is today's name of `system`."""
    return [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": _text(message.content),
        }
        for message in messages
    ]


class GenerationRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that chat and completions share."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    """0 and -1 mean off."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    seed: Seed | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Salt | None = None
    """Keeps the prefix cache of this tenant or conversation apart from others."""
    return_token_ids: bool | None = None
    """Adds `token_ids` to every choice."""
    user: str | None = None
    prompt_cache_key: str | None = None
    """Names the conversation, like `user` and the header `x-session-id`; policies may keep it together."""

    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    min_tokens: Any = None
    skip_special_tokens: Any = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def streaming(self) -> bool:
        return bool(self.stream)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    prompt_cache_retention: Any = None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """(name of the field that limits the answer, its value)."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def logprobs_count(self) -> int:
        """-1 = none, 0 = of the chosen token, k = and of the k likeliest."""
        return (self.top_logprobs or 0) if self.logprobs else -1

    def conversation(self) -> list[dict[str, str]]:
        """Messages for the chat template."""
        return plain_messages(self.messages)


class CompletionRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    echo: Any = None
    best_of: Any = None
    suffix: Any = None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """(name of the field that limits the answer, its value)."""
        return "max_tokens", COMPLETIONS_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def logprobs_count(self) -> int:
        """-1 = none, 0 = of the chosen token, k = and of the k likeliest."""
        return -1 if self.logprobs is None else self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt: text, or token ids.

        Raises:
            ApiError: empty, mixed, or too many prompts.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        items = self.prompt
        if not items:
            raise bad_request("`prompt` is an empty list", "prompt")
        kinds = {type(item) for item in items}
        if kinds == {int}:
            return [[_token_id(item) for item in items]]
        if len(kinds) > 1 or kinds <= {int}:
            raise bad_request("`prompt` mixes strings, token ids and lists: use one kind", "prompt")
        if len(items) > MAX_PROMPTS:
            raise bad_request(
                f"`prompt` has {len(items)} entries; at most {MAX_PROMPTS} fit one request", "prompt"
            )
        return [item for item in items if not isinstance(item, int)]


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    def conversation(self) -> list[dict[str, str]]:
        """Messages for the chat template."""
        return plain_messages(self.messages or [])


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


# ---------------------------------------------------------------- decoding

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "prompt_cache_retention": (),
    "echo": (False,),
    "best_of": (),
    "suffix": ("",),
}
"""Fields not supported yet, and the values besides null that ask for nothing."""

_INTERNAL = frozenset({
    "kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank",
    "disagg_prefill_dp_rank", "transfer_id", "remote_bootstrap_addr", "do_remote_prefill",
    "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_host", "remote_port",
    "remote_request_id", "prefill", "attempt", "request_id", "token_ids", "deadline_s", "ec_transfer_params",
})  # fmt: skip
"""Fields that routers and engines use among themselves: a client that sets one would steer KV transfers."""

_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_PATH = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)

Request = TypeVar("Request", bound=ChatRequest | CompletionRequest | TokenizeRequest | DetokenizeRequest)

_DECODERS: Mapping[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind)
    for kind in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
}


def decode(body: bytes, kind: type[Request]) -> Request:
    """Decode and check a request body.

    Raises:
        ApiError: 400 that names the parameter.
    """
    try:
        request: Request = _DECODERS[kind].decode(body)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not valid JSON in UTF-8: {error}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None
    _check(request)
    return request


def _refusal(text: str, kind: type[msgspec.Struct]) -> ApiError:
    """Turn msgspec's words into ours: the parameter's name, and for a misspelt one the nearest valid."""
    found = _PATH.search(text)
    path = found.group(1) if found else ""
    unknown = _UNKNOWN.search(text)
    if unknown is None:
        message = _PATH.sub("", text)
        if missing := re.search(r"required field `([^`]*)`", text):
            path = f"{path}.{missing.group(1)}" if path else missing.group(1)
        return bad_request(f"`{path or 'body'}`: {message}", path or None, "invalid_value")
    name = unknown.group(1)
    param = f"{path}.{name}" if path else name
    if name in _INTERNAL:
        return bad_request(
            f"`{param}` is internal to the service; clients may not set it", param, "internal_field"
        )
    nearest = difflib.get_close_matches(name, _fields(kind, path), n=1)
    hint = f"; did you mean `{nearest[0]}`?" if nearest else ""
    return bad_request(f"unknown field `{param}`{hint}", param, "unknown_field")


def _fields(kind: type[msgspec.Struct], path: str) -> Sequence[str]:
    """Names that are valid where an unknown one was found."""
    last = path.rsplit(".", 1)[-1].split("[")[0]
    nested: Mapping[str, type[msgspec.Struct]] = {
        "messages": ChatMessage,
        "content": ContentPart,
        "stream_options": StreamOptions,
    }
    return list(nested.get(last, kind).__struct_fields__)


def _check(request: Request) -> None:
    """Rules that types cannot say."""
    for name, neutral in _NEUTRAL.items():
        value = getattr(request, name, None)
        if value is not None and not any(_same(value, one) for one in neutral):
            if name == "best_of" and isinstance(request, CompletionRequest) and _same(value, request.choices):
                continue
            raise bad_request(f"`{name}` is not supported yet; leave it out", name, "unsupported_parameter")
    if isinstance(request, ChatRequest):
        _check_chat(request)
    if isinstance(request, GenerationRequest) and request.stream_options and not request.streaming:
        raise bad_request("`stream_options` is only allowed with `stream: true`", "stream_options")
    if isinstance(request, TokenizeRequest):
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("give either `prompt` or `messages`", "prompt")
        check_messages(request.messages or [])


def _check_chat(request: ChatRequest) -> None:
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("`top_logprobs` needs `logprobs: true`", "top_logprobs")
    if request.store:
        raise bad_request("`store` is not supported yet: nothing is kept", "store", "unsupported_parameter")
    if request.service_tier not in (None, "auto", "default"):
        raise bad_request("`service_tier` is not supported yet", "service_tier", "unsupported_parameter")
    check_messages(request.messages)


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Refuse messages whose meaning would be lost in plain text.

    Raises:
        ApiError: 400 that names the message and its field.
    """
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        if message.role in ("tool", "function"):
            raise bad_request(
                f"role `{message.role}` is not supported yet", f"{at}.role", "unsupported_parameter"
            )
        for name in ("audio", "tool_calls", "tool_call_id", "function_call", "refusal"):
            if getattr(message, name):
                raise bad_request(f"`{name}` is not supported yet", f"{at}.{name}", "unsupported_parameter")
        if message.content is None:
            raise bad_request(f"{at} has no content", f"{at}.content")
        if isinstance(message.content, str):
            continue
        for number, part in enumerate(message.content):
            where = f"{at}.content[{number}]"
            if part.type != "text":
                raise bad_request(
                    f"content of type `{part.type}` is not supported yet",
                    f"{where}.type",
                    "unsupported_parameter",
                )
            if part.text is None:
                raise bad_request("a text part needs `text`", f"{where}.text")


def _same(value: object, neutral: object) -> bool:
    """Equal, and not merely because Python holds True for 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _text(content: str | list[ContentPart] | None) -> str:
    if isinstance(content, list):
        return "\n".join(part.text or "" for part in content)
    return content or ""


def _token_id(item: object) -> int:
    if not isinstance(item, int) or not 0 <= item < 2**31:
        raise bad_request(f"`prompt`: {item} is not a token id", "prompt")
    return item

"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from aiohttp import web

from prfaas.protocol.openai import DetokenizeRequest, TokenizeRequest, decode
from router.bodies import read_body
from router.context import GATEWAY


def add_routes(app: web.Application) -> None:
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)


async def tokenize(http: web.Request) -> web.Response:
    """Token ids of a prompt, or of a conversation as the chat template writes it."""
    gateway = http.app[GATEWAY]
    request = decode(await read_body(http), TokenizeRequest)
    gateway.check_model(request.model)
    if request.messages is not None:
        tokens = await gateway.prompts.chat(
            request.conversation(), add_generation_prompt=request.add_generation_prompt
        )
    else:
        prompt = request.prompt or ""
        tokens = await gateway.prompts.prompt(prompt, special_tokens=request.add_special_tokens)
    length = gateway.workers.context_length()
    return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": length})


async def detokenize(http: web.Request) -> web.Response:
    """Text of token ids."""
    gateway = http.app[GATEWAY]
    request = decode(await read_body(http), DetokenizeRequest)
    gateway.check_model(request.model)
    return web.json_response({"prompt": await gateway.prompts.text(request.tokens)})

"""The conversation that a client names reaches the policies."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_fleet import Fleet, chat

from router.core.decision import Decision
from router.core.events import PlaceRequest


@pytest.mark.parametrize(
    ("headers", "fields", "session"),
    [
        ({"x-session-id": "s-1"}, {"prompt_cache_key": "key", "user": "me"}, "s-1"),
        ({}, {"prompt_cache_key": "key", "user": "me"}, "key"),
        ({}, {"user": "me"}, "me"),
        ({}, {}, ""),
        ({"x-session-id": "x" * 1000}, {}, "x" * 256),
    ],
    ids=["header", "prompt_cache_key", "user", "none", "long"],
)
async def test_the_session_is_the_header_else_the_cache_key_else_the_user(
    fleet: Fleet,
    monkeypatch: pytest.MonkeyPatch,
    headers: dict[str, str],
    fields: dict[str, Any],
    session: str,
) -> None:
    placed: list[PlaceRequest] = []
    place = fleet.gateway.brain.place

    def spy(request: PlaceRequest) -> Decision:
        placed.append(request)
        return place(request)

    monkeypatch.setattr(fleet.gateway.brain, "place", spy)
    response = await fleet.client.post("/v1/chat/completions", json=chat(**fields), headers=headers)
    assert response.status == 200
    assert [request.session for request in placed] == [session]

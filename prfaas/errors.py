"""Errors that cross module boundaries. Each message says what is wrong, where, and what to do."""

from __future__ import annotations


class PrfaasError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(PrfaasError):
    """The configuration is wrong; the message names the field's path and the nearest valid name."""


class IncompatiblePeer(PrfaasError):
    """Two workers may not exchange KV; `fields` names what differs.

    Attributes:
        fields: (field name, our value, their value) for every field that must be equal and is not.
    """

    def __init__(self, peer: str, fields: list[tuple[str, str, str]]) -> None:
        self.peer = peer
        self.fields = fields
        differs = "; ".join(f"{name}: ours {ours}, theirs {theirs}" for name, ours, theirs in fields)
        super().__init__(f"cannot exchange KV with {peer}: {differs}")


class OutOfPages(PrfaasError):
    """The page pool has too few free or evictable pages for this request."""


class EngineFailure(PrfaasError):
    """An engine process died or answered nonsense; every sequence it ran has failed."""

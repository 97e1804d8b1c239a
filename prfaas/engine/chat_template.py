"""Render chat messages to the prompt text that a model was trained on, by its own Jinja template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prfaas.errors import ConfigError, PrfaasError


class ChatTemplateError(PrfaasError):
    """The messages cannot be rendered; the message is the template's own where it raised one."""


class ChatTemplate:
    """A model's chat template, with the environment that Hugging Face's `apply_chat_template` gives it.

    The sandbox keeps a template from the outside world, not from looping: use models you trust.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """
        Args:
            source: Jinja text.
            special_tokens: `bos_token`, `eos_token`, … by name, for the template's use.

        Raises:
            ConfigError: the text is not valid Jinja.
        """
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, model_path: Path) -> ChatTemplate | None:
        """The template of `chat_template.jinja`, else of tokenizer_config.json; None where there is none.

        Raises:
            ConfigError: a file cannot be read, or the template is not valid Jinja.
        """
        path = model_path / "tokenizer_config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        file = model_path / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.exists() else _default(config.get("chat_template"))
        return None if source is None else cls(source, _special_tokens(config))

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for `messages` (OpenAI's form: `role`, `content`, …).

        Args:
            add_generation_prompt: end with the opening of the assistant's answer.
            variables: anything else that the template may look at.

        Raises:
            ChatTemplateError: the template refuses the messages, or they lack what it needs.
        """
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
                **variables,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
        ) as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error


def _default(template: str | list[dict[str, str]] | None) -> str | None:
    """A model may have several named templates; plain chat uses the one called `default`."""
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like; each is a string or an object with `content`."""
    found = {name: value for name, value in config.items() if name.endswith("_token")}
    contents = {name: value["content"] if isinstance(value, dict) else value for name, value in found.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks words for training; it renders as what is inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Plain JSON; jinja2's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

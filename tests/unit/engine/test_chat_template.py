"""Chat templates render as `transformers` renders them; what a template refuses becomes a typed error."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from prfaas.engine.chat_template import ChatTemplate, ChatTemplateError
from prfaas.errors import ConfigError

MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Hé, 漢字?\n"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "More"},
]
TRICKY = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {% if loop.last %}
[{{ message | tojson }}]
    {% else %}
{% generation %}{{ message['content'] | trim }}{% endgeneration %}
    {% endif %}
{%- endfor %}
{% if add_generation_prompt %}go{% endif %}
"""


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("source", [None, TRICKY], ids=["own", "tricky"])
def test_rendering_equals_transformers(
    tmp_path: Path, source: str | None, add_generation_prompt: bool
) -> None:
    from transformers import PreTrainedTokenizerFast

    path = make_tiny_model(tmp_path / "model")
    if source is not None:
        (path / "chat_template.jinja").write_text(source)
    template = ChatTemplate.load(path)
    assert template is not None
    theirs = PreTrainedTokenizerFast.from_pretrained(path).apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert template.render(MESSAGES, add_generation_prompt=add_generation_prompt) == theirs


def test_what_a_template_raises_is_the_error_message() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        template.render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    ["{{ messages[9].content.upper() }}", "{{ 'a' + 1 }}", "{{ messages[0]['content'] % 0 }}", "{{ 1 / 0 }}"],
)
def test_a_template_that_trips_over_the_messages_is_a_typed_error(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="refuses these messages"):
        ChatTemplate(source, {}).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception.__globals__.json }}"],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render(list(MESSAGES))


def test_extra_variables_and_the_date_reach_the_template() -> None:
    template = ChatTemplate("{{ thinking }} {{ strftime_now('%Y-%m-%d') }}", {})
    assert re.fullmatch(r"off \d{4}-\d\d-\d\d", template.render(MESSAGES, thinking="off"))


def test_invalid_jinja_is_refused_with_its_line() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("fine\n{% if %}", {})


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None


def test_among_named_templates_the_default_one_is_used(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ eos_token }}"}]
    config = {"chat_template": named, "eos_token": {"content": "</s>"}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render([]) == "</s>"

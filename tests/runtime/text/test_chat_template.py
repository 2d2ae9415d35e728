"""Tests that no message is dropped because the chat template does not have its role."""

from pathlib import Path

import pytest

from meshserve.runtime.api.errors import InvalidRequestError
from meshserve.runtime.text.chat_template import ChatTemplate
from meshserve.runtime.text.tokenizer import Tokenizer
from tests.checkpoints import save_byte_tokenizer

ASKED = {"role": "user", "content": "Hello?"}


def template(directory: Path, text: str) -> ChatTemplate:
    save_byte_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(text)
    return ChatTemplate(directory)


@pytest.mark.parametrize("role", ["User", "developer", " user", "function", "use", "meshserve", "ASSISTANT", "ai"])
def test_a_role_that_the_template_does_not_have_is_refused_by_name(second_model: Path, role: str):
    tokenizer = Tokenizer(second_model)
    for messages, index in (
        ([{"role": role, "content": "x"}], 0),
        ([ASKED, {"role": "assistant", "content": "a"}, {"role": role, "content": "x"}, ASKED], 2),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            tokenizer.render_chat(messages)
        assert str(caught.value) == (
            f"messages[{index}].role: got {role!r}, whose messages the chat template drops. It has system, user, "
            "assistant, tool."
        )


def test_every_role_that_the_template_has_is_rendered(second_model: Path):
    messages = [
        {"role": role, "content": f"text {index}"}
        for index, role in enumerate(["system", "user", "assistant", "tool", "tool", "assistant", "system", "user"])
    ]
    rendered = Tokenizer(second_model).render_chat(messages)
    assert all(message["content"] in rendered for message in messages)


def test_a_template_that_writes_every_role_has_every_role(tmp_path: Path):
    every = template(tmp_path, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert every.render([{"role": "alien", "content": "hi"}]) == "alien: hi\n"


STRICT = """
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{% endif %}
    {%- if m.role in ('user', 'model') %}{{- m.role + ': ' + m.content | trim }}{% endif %}
{%- endfor %}
"""


def test_roles_of_a_template_that_allows_them_at_some_places_only(tmp_path: Path):
    strict = template(tmp_path, STRICT)
    answer = {"role": "model", "content": "b"}
    assert strict.render([{"role": "system", "content": "s"}, ASKED, answer]) == "suser: Hello?model: b"
    with pytest.raises(InvalidRequestError, match="messages: the chat template refused them: roles must alternate"):
        strict.render([answer, ASKED])
    with pytest.raises(InvalidRequestError, match=r"messages\[1\].role: got 'assistant'.* It has system, user\.$"):
        strict.render([ASKED, {"role": "assistant", "content": "b"}])


def test_a_role_that_the_template_refuses_itself_keeps_its_message(tmp_path: Path):
    text = (
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no ' + m.role) }}{% endif %}{% endfor %}"
    )
    with pytest.raises(InvalidRequestError, match="messages: the chat template refused them: no alien"):
        template(tmp_path, text).render([ASKED, {"role": "alien", "content": "x"}])

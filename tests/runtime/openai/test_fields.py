"""The fields of requests: what is honoured, refused and documented."""

from pathlib import Path

import pytest

from meshserve.runtime.api.errors import InvalidRequestError
from meshserve.runtime.api.sampling_params import params_table
from meshserve.runtime.openai import anthropic_request, responses_request
from meshserve.runtime.openai.chat_call import tool_choice_of
from meshserve.runtime.openai.field_tables import TABLES, field_table
from meshserve.runtime.openai.fields import CHAT, SAMPLING, checked_body

DOCUMENT = Path(__file__).parents[3] / "docs" / "openai.md"
# Parameters that have a field of another name, or none because a route sets them.
ELSEWHERE = {"include_stop", "logprobs", "constraint", "num_resumed_tokens"}


def test_the_documentation_has_every_field():
    """Write what `python -m meshserve.runtime.openai.field_tables` prints to the end of the page."""
    assert DOCUMENT.read_text().endswith("\n\n" + field_table())


def test_every_sampling_parameter_has_a_field():
    assert params_table().keys() - ELSEWHERE <= SAMPLING.keys()


def test_unset_fields_are_left_out_and_others_checked():
    assert checked_body({"temperature": 1, "stop": None, "user": "me"}, CHAT) == {"temperature": 1, "user": "me"}
    assert checked_body({"audio": None, "store": False, "functions": []}, CHAT) == {}
    for body, message in (
        ({"temperatur": 1}, "did you mean temperature"),
        ({"temperature": "1"}, "allowed is a number"),
        ({"n": True}, "allowed is a whole number"),
        ({"store": True}, "nothing is stored"),
        ([], "allowed is an object"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            checked_body(body, CHAT)


@pytest.mark.parametrize("route", TABLES)
def test_a_refused_field_says_why(route: str):
    for name, field in TABLES[route].items():
        if field.only is not None:
            assert field.note, name
            with pytest.raises(InvalidRequestError, match=name):
                checked_body({name: {"a": "value"}}, TABLES[route])


@pytest.mark.parametrize("value", [[], {}, 1])
def test_a_name_that_is_no_text_is_refused(value):
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(InvalidRequestError, match="tool_choice"):
        tool_choice_of({"tools": tools, "tool_choice": {"type": "function", "function": {"name": value}}})
    with pytest.raises(InvalidRequestError, match="include"):
        responses_request.chat_fields({"input": "a", "include": [value]})
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(InvalidRequestError, match="tool_choice.type"):
        anthropic_request.chat_fields({"messages": messages, "max_tokens": 1, "tool_choice": {"type": value}})

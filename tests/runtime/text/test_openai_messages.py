"""The forms in which OpenAI's clients write messages: accepted as they are meant, or refused by message and key."""

import re
import typing
from typing import Any

import pytest

from meshserve.protos import inference_pb2 as pb
from meshserve.runtime.api.errors import InvalidRequestError
from meshserve.runtime.client.messages import chat_request
from meshserve.runtime.text.openai_messages import chat_messages

CALL = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f", arguments='{"x": 1}')])


def called(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"role": "user", "content": "hi", "name": "Ann"}, pb.ChatMessage(role="user", content="hi")),
        ({"role": "developer", "content": "hi"}, pb.ChatMessage(role="system", content="hi")),
        ({"role": "assistant", "content": None, "tool_calls": None}, pb.ChatMessage(role="assistant")),
        ({"role": "assistant"}, pb.ChatMessage(role="assistant")),
        (called('{"x": 1}'), CALL),
        (called({"x": 1}), CALL),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}, CALL),
        (called(""), pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f", arguments="{}")])),
        (called(None), pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f", arguments="{}")])),
        ({"role": "tool", "tool_call_id": "1", "content": "3"}, pb.ChatMessage(role="tool", content="3")),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]},
            pb.ChatMessage(role="user", content="a\nb\nc"),
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            pb.ChatMessage(role="assistant", content="no"),
        ),
        ({"role": "assistant", "content": None, "refusal": "no"}, pb.ChatMessage(role="assistant", content="no")),
        (
            {"role": "assistant", "content": "yes", "reasoning": "hm", "refusal": None},
            pb.ChatMessage(role="assistant", content="yes", reasoning_content="hm"),
        ),
    ],
)
def test_forms_are_accepted_as_they_are_meant(given: dict[str, Any], expected: pb.ChatMessage):
    assert chat_messages([given]) == [expected]


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("hi", "messages[1]: is 'hi'"),
        ({"role": 3, "content": "a"}, "messages[1].role: is 3"),
        ({"role": "user", "content": 3}, "messages[1].content: is 3"),
        ({"role": "user", "content": {"text": "a"}}, "messages[1].content: is "),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0].type: is 'image_url'"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "messages[1].content[0].text: is 3"),
        ({"role": "user", "content": [3]}, "messages[1].content[0]: is 3"),
        ({"role": "user", "contents": "a"}, "messages[1].contents: cannot be served; allowed are role, content"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[1].function_call: cannot"),
        ({"role": "assistant", "tool_calls": "f"}, "messages[1].tool_calls: is 'f'"),
        ({"role": "assistant", "tool_calls": ["f"]}, "messages[1].tool_calls[0]: is 'f'"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "messages[1].tool_calls[0].type: is 'custom'"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[1].tool_calls[0].function: is {}"),
        (called([1]), "messages[1].tool_calls[0].function.arguments: is [1]"),
    ],
)
def test_what_cannot_be_sent_is_named_by_message_and_key(given: Any, place: str):
    with pytest.raises(InvalidRequestError, match=re.escape(place)):
        chat_request([{"role": "user", "content": "a"}, given], None, {})


def test_every_key_of_openai_is_accepted_or_refused_by_name():
    chat = pytest.importorskip("openai.types.chat", reason="needs the extra gateway-test")
    keys = {key for kind in typing.get_args(chat.ChatCompletionMessageParam) for key in typing.get_type_hints(kind)}
    assert keys >= {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "audio", "function_call"}
    for key in keys - {"role", "content", "tool_calls"}:
        assert chat_messages([{"role": "user", "content": "a", key: None}]) == [
            pb.ChatMessage(role="user", content="a")
        ]
        try:
            chat_messages([{"role": "user", "content": "a", key: "text"}])
        except InvalidRequestError as error:
            assert error.field == f"messages[0].{key}"


def test_an_answer_of_openai_continues_a_conversation():
    chat = pytest.importorskip("openai.types.chat", reason="needs the extra gateway-test")
    answer = chat.ChatCompletionMessage(role="assistant", content="yes", annotations=[])
    assert chat_messages([answer.model_dump()]) == [pb.ChatMessage(role="assistant", content="yes")]

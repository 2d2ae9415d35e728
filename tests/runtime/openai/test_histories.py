"""Answers that clients send back, with what their helpers have added."""

from meshserve.runtime.openai import anthropic_request, responses_request
from meshserve.runtime.text.openai_messages import chat_messages


def test_what_clients_have_parsed_is_left_out():
    [message] = chat_messages([{"role": "assistant", "content": "4", "parsed": {"acts": 4}}])
    assert message.content == "4"
    specific = {"provider_specific_fields": {"refusal": None, "reasoning": None}}
    [message] = chat_messages([{"role": "assistant", "content": "4", "function_call": None, **specific}])
    assert message.content == "4"
    text = {"type": "text", "text": "4", "parsed_output": {"acts": 4}}
    fields = anthropic_request.chat_fields({"messages": [{"role": "assistant", "content": [text]}]})
    assert fields["messages"][0]["content"] == [{"type": "text", "text": "4"}]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "parsed_arguments": {"x": 1}}
    [message] = responses_request.chat_fields({"input": [call]})["messages"]
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]

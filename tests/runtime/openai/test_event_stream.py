"""Chunks that are put together of pieces are those that JSON's encoder writes."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from meshserve.runtime.api.request import Output
from meshserve.runtime.openai.chat_call import ChatChoice
from meshserve.runtime.openai.chat_completions import _ChatAnswer
from meshserve.runtime.openai.event_stream import as_json
from meshserve.runtime.text.answers.answer_parts import ContentPart


@pytest.mark.parametrize("text", [" word", 'a "quote" \\ and\r\n\tlines\x00\x1f', "é\u2028한\U0001f600</script>", ""])
def test_a_chunk_of_content_is_the_same_in_both_ways(text: str):
    chat: Any = SimpleNamespace(request_id='an "id"', created=1, model="org/é", num_logprobs=None)
    answer, choice, part = _ChatAnswer(chat, {"stream": True}), ChatChoice(2), ContentPart(text)
    output = Output(request_id="a", text=text, token_ids=(7,))
    first = list(answer.chunks(choice, [part], output))
    [second] = answer.chunks(choice, [part], output)
    assert not isinstance(first[-1], str) and isinstance(second, str)
    assert second == as_json(first[-1]) and "\n" not in second
    assert json.loads(second)["choices"][0]["delta"] == {"content": text}

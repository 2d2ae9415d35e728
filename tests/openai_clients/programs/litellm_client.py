"""litellm: a chat, a stream, tools, a schema, completions and embeddings.

python litellm_client.py URL_OF_CHATS URL_OF_EMBEDDINGS
"""

import json
import sys

import litellm

MESSAGES = [{"role": "user", "content": "Who art thou?"}]
SCHEMA = {
    "type": "object", "properties": {"acts": {"enum": [4, 5]}}, "required": ["acts"], "additionalProperties": False,
}  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip


def main(url: str, embeddings_url: str) -> None:
    for provider in ("openai", "hosted_vllm"):
        options = {"model": f"{provider}/thinker", "api_base": url, "api_key": "none", "max_tokens": 200, "seed": 1}
        whole = litellm.completion(**options, messages=MESSAGES, temperature=0)
        assert whole.choices[0].finish_reason in ("stop", "length"), whole
        text = whole.choices[0].message.content
        stream = litellm.completion(
            **options, messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (text or "")
        assert any(getattr(chunk, "usage", None) for chunk in chunks)
        form = {"type": "json_schema", "json_schema": {"name": "play", "schema": SCHEMA, "strict": True}}
        budget = {"extra_body": {"thinking_token_budget": 4}}
        shaped = litellm.completion(**options, messages=MESSAGES, response_format=form, **budget)
        assert json.loads(shaped.choices[0].message.content)["acts"] in (4, 5), shaped
        if provider != "openai":  # litellm removes additionalProperties from tools, so that a random model never ends
            continue
        asked = litellm.completion(**options, messages=MESSAGES, tools=[WEATHER], tool_choice="required", **budget)
        assert asked.usage.completion_tokens_details.reasoning_tokens <= 6, "the budget is passed on"
        [call] = asked.choices[0].message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "15 degrees"}
        turns = [*MESSAGES, asked.choices[0].message.model_dump(), result]
        again = litellm.completion(**options, messages=turns, tools=[WEATHER])
        assert again.usage.prompt_tokens > asked.usage.prompt_tokens
    text = litellm.text_completion(
        model="text-completion-openai/thinker", api_base=url, api_key="none", prompt="HAMLET:", max_tokens=4, seed=1
    )
    assert text.usage.completion_tokens > 0, text  # random tokens may have no text
    found = litellm.embedding(
        model="openai/embedder", api_base=embeddings_url, api_key="none", input=["The sea", "a king"]
    )
    assert [each["index"] for each in found.data] == [0, 1] and len(found.data[0]["embedding"]) > 1
    try:
        litellm.completion(**{**options, "model": "openai/gpt-5"}, messages=MESSAGES)
    except litellm.NotFoundError:
        print("passed")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

"""langchain-openai: structured output in its three methods, tools in a loop of two calls, and an agent.

python langchain_client.py URL
"""

import sys
from collections.abc import Callable
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

QUESTION = [HumanMessage("Who art thou?")]


class Play(BaseModel):
    """A play."""

    king: str = Field(max_length=12)
    acts: Literal[4, 5]


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Returns the weather of a city."""
    return f"It is 15 degrees in {city}."


def main(url: str) -> None:
    options = {"base_url": url, "api_key": "none", "model": "thinker", "max_retries": 0, "max_tokens": 200, "seed": 1}
    model = ChatOpenAI(**options, extra_body={"thinking_token_budget": 4})
    for method in ("json_schema", "function_calling"):
        play = model.with_structured_output(Play, method=method).invoke(QUESTION)
        assert isinstance(play, Play) and play.acts in (4, 5), play
    raw = model.with_structured_output(Play, method="json_schema", include_raw=True).invoke(QUESTION)
    assert raw["parsing_error"] is None and isinstance(raw["parsed"], Play), raw
    parts = list(model.stream(QUESTION, stream_usage=True))
    assert sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata) > 0

    forced = model.bind_tools([get_weather], tool_choice="required")
    asked = forced.invoke(QUESTION)
    [call] = asked.tool_calls
    assert call["name"] == "get_weather" and call["args"]["city"] in ("Paris", "Rome"), call
    streamed = None
    for part in forced.stream(QUESTION):
        streamed = part if streamed is None else streamed + part
    assert [each["args"] for each in streamed.tool_calls] == [call["args"]], streamed
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    again = model.bind_tools([get_weather]).invoke([*QUESTION, asked, result])
    assert again.usage_metadata["input_tokens"] > asked.usage_metadata["input_tokens"]

    # An agent: the first answer must call the tool, the second may not.
    choices = iter(("required", "none"))

    @wrap_model_call
    def chosen(request: ModelRequest, handler: Callable[[ModelRequest], Any]) -> Any:
        return handler(request.override(tool_choice=next(choices)))

    agent = create_agent(model, [get_weather], middleware=[chosen])
    messages = agent.invoke({"messages": QUESTION})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"], messages
    assert messages[2].content.startswith("It is 15 degrees in ")

    responses = ChatOpenAI(**{**options, "seed": None}, use_responses_api=True)
    answer = responses.invoke(QUESTION)
    assert answer.response_metadata["status"] in ("completed", "incomplete"), answer
    print("passed")


if __name__ == "__main__":
    main(sys.argv[1])

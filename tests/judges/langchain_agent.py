"""LangChain's examples against a server: `python langchain_agent.py http://127.0.0.1:PORT/v1`. Run
by clients.py."""

import json
import sys
from typing import Literal

from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

ASKED = []


@tool
def get_weather(city):
    """Get the weather of a city."""
    ASKED.append(city)
    return f"It's always sunny in {city}!"


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(
        extra="forbid"
    )  # else a grammar lets other keys follow, and this model would never stop

    city: Literal["Oslo", "Rome"]
    warm: bool


def main(url):
    model = ChatOpenAI(
        model="scripted", base_url=url, api_key="none", temperature=0, max_retries=0, timeout=120
    )
    question = {"role": "user", "content": "what is the weather in Oslo"}

    agent = create_agent(model, tools=[get_weather], system_prompt="You are a helpful assistant")
    messages = agent.invoke({"messages": [question]})["messages"]
    assert [type(one).__name__ for one in messages] == [
        "HumanMessage",
        "AIMessage",
        "ToolMessage",
        "AIMessage",
    ], messages
    assert ASKED == ["Oslo"], ASKED
    assert isinstance(messages[2], ToolMessage)
    assert messages[2].tool_call_id == messages[1].tool_calls[0]["id"]
    assert messages[3].content == "It is sunny in Oslo.", messages[3]

    steps = list(agent.stream({"messages": [question]}, stream_mode="updates"))
    assert [next(iter(step)) for step in steps] == ["model", "tools", "model"], steps

    total = AIMessageChunk(content="")
    for chunk in model.bind_tools([get_weather]).stream([question]):
        total += chunk
    assert [(one["name"], one["args"]) for one in total.tool_calls] == [
        ("get_weather", {"city": "Oslo"})
    ], total

    forced = model.bind_tools([get_weather, Weather], tool_choice="Weather").invoke([question])
    assert [one["name"] for one in forced.tool_calls][:1] == ["Weather"], str(forced)[:500]
    assert isinstance(Weather(**forced.tool_calls[0]["args"]), Weather)

    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Weather, method=method).invoke([question])
        assert isinstance(found, Weather), (method, found)

    counted = ChatOpenAI(
        model="scripted", base_url=url, api_key="none", temperature=0, use_responses_api=True
    ).invoke([question])
    assert counted.text == "It is sunny in Oslo.", counted
    assert counted.usage_metadata["output_tokens"] == 4
    print(
        json.dumps(
            {"agent": "ok", "stream": "ok", "forced": "ok", "structured": "ok", "responses": "ok"}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])

"""Tool calls of a stream, put together from their pieces."""

from __future__ import annotations

from tests.support.client import Body, Streamed


def put_together(streamed: Streamed) -> Body:
    """The message that a stream's deltas make, to the letter of how they come."""
    message: Body = {"content": streamed.content, "reasoning": streamed.reasoning}
    made: list[Body] = []
    for chunk in streamed.chunks:
        for delta in chunk["choices"][0]["delta"].get("tool_calls", []):
            if "id" in delta:
                assert delta["index"] == len(made), "calls come one after the other"
                assert delta["type"] == "function"
                assert delta["function"]["name"]
                made.append({"id": delta["id"], "function": {**delta["function"]}})
            else:
                assert delta.keys() == {"index", "function"}
                assert delta["index"] == len(made) - 1
                assert delta["function"].keys() == {"arguments"}
                assert delta["function"]["arguments"]
                made[-1]["function"]["arguments"] += delta["function"]["arguments"]
    return message | {"tool_calls": made}

"""Prompts that the tests give the demo model, and the answers that it is known to give.

The model is greedy unless a request says otherwise, so its answers are always the same. It knows
mlxsrv, calls tools of the kinds that it was trained on, and writes one JSON object when asked for
JSON. Calls and objects that it would not make of itself come from a grammar alone.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

MODEL = "demo"

CONTEXT_AND_MORE = 10**6
"""Tokens that no model here has room for."""

QUESTION = "What is mlxsrv?"
ANSWER = "OpenAI-compatible ASGI server"
"""Part of the answer to QUESTION."""

TOO_MANY = 5000
"""Times that no model here has room for QUESTION."""

GREETING = "Hello!"
"""Messages that call for no tool and for no JSON."""

WEATHER_QUESTION = "What is the weather in Paris?"
WEATHER = "sunny, 21 °C"
"""The answer of the tool, which the model repeats."""

JSON_QUESTION = "Please answer in JSON."

PASSAGES = ["The weather in Paris is sunny, 21 °C.", "Hello!", "mlxsrv streams each token. " * 8]
"""Texts to embed, of several lengths and not in their order."""


class GetWeather(BaseModel):
    """Get the current weather in a city"""

    city: str


class Add(BaseModel):
    """Add two numbers"""

    a: int
    b: int


class SetLight(BaseModel):
    """Turn on the light in a room"""

    room: Literal["kitchen", "bedroom"]
    on: bool


class Card(BaseModel):
    """The text that the model writes when it is asked for JSON."""

    name: str
    port: int
    streaming: bool


CARD = Card(name="mlxsrv", port=8000, streaming=True)


class Mood(BaseModel):
    """A question about which the model has never read."""

    mood: Literal["calm", "curious", "tired"]
    sure: bool
    scores: list[Literal[1, 2, 3]] = Field(min_length=2, max_length=2)

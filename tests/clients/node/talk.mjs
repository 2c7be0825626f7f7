// What the tests say to the demo model, and what it is known to answer: see ../talk.py.

import { z } from "zod";

export const MODEL = "demo";

/** Tokens that no model here has room for. */
export const CONTEXT_AND_MORE = 1_000_000;

export const QUESTION = "What is mlxsrv?";
export const ANSWER = /OpenAI-compatible ASGI server/;

/** What calls for no tool and for no JSON. */
export const GREETING = "Hello!";

export const WEATHER_QUESTION = "What is the weather in Paris?";
/** What the tool answers, and the model repeats. */
export const WEATHER = "sunny, 21 °C";

export const JSON_QUESTION = "Please answer in JSON.";

/** Texts to embed, of several lengths and not in their order. */
export const PASSAGES = [
  "The weather in Paris is sunny, 21 °C.",
  "Hello!",
  "mlxsrv streams each token. ".repeat(8),
];

/** An answer in many bytes a character. */
export const EMOJI_QUESTION = "Reply with emoji";
export const EMOJI = /🚀.*🐍/u;

export const GetWeather = z.object({ city: z.string() });
export const GET_WEATHER = "Get the current weather in a city";

export const SetLight = z.object({ room: z.enum(["kitchen", "bedroom"]), on: z.boolean() });
export const SET_LIGHT = "Turn on the light in a room";

/** What the model writes when it is asked for JSON. */
export const Card = z.object({ name: z.string(), port: z.int(), streaming: z.boolean() });
export const CARD = { name: "mlxsrv", port: 8000, streaming: true };

/** What the model has never read of. */
export const Mood = z.object({
  mood: z.enum(["calm", "curious", "tired"]),
  sure: z.boolean(),
  score: z.literal([1, 2, 3]),
});

export const say = (content) => [{ role: "user", content }];

/** What an async iterable gives, in a list. */
export async function all(items) {
  const list = [];
  for await (const item of items) list.push(item);
  return list;
}

/** The vectors of texts over plain HTTP, as the JSON has them. */
export async function embed(url, input, more = {}) {
  const body = JSON.stringify({ model: MODEL, input, ...more });
  const response = await fetch(`${url}/v1/embeddings`, { method: "POST", body });
  return (await response.json()).data.map((one) => one.embedding);
}

/** The greatest difference between two lists of vectors; those of one size are compared. */
export function distance(some, others) {
  if (some.length !== others.length) return Infinity;
  const one = some.flat();
  const other = others.flat();
  if (one.length !== other.length) return Infinity;
  return Math.max(...one.map((value, i) => Math.abs(value - other[i])));
}

// Ollama's client for Node.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { Ollama } from "ollama";
import { z } from "zod";

import { startServer } from "./server.mjs";
import {
  ANSWER,
  CARD,
  CONTEXT_AND_MORE,
  Card,
  GET_WEATHER,
  GREETING,
  GetWeather,
  JSON_QUESTION,
  MODEL,
  PASSAGES,
  QUESTION,
  WEATHER,
  WEATHER_QUESTION,
  all,
  embed,
  say,
} from "./talk.mjs";

let server;
let client;

before(async () => {
  server = await startServer();
  client = new Ollama({ host: server.url });
});

after(() => server?.stop());

const request = (question, more = {}) => ({ model: MODEL, messages: say(question), ...more });

const getWeather = {
  type: "function",
  function: {
    name: "get_weather",
    description: GET_WEATHER,
    parameters: z.toJSONSchema(GetWeather),
  },
};

test("a chat of Ollama's client answers", async () => {
  const answer = await client.chat(request(QUESTION));
  assert.match(answer.message.content, ANSWER);
  assert.equal(answer.done_reason, "stop");
  assert.ok(answer.eval_count > 10);
  assert.ok(answer.eval_duration > 0);
});

test("a chat of Ollama's client streams what it says whole", async () => {
  const whole = await client.chat(request(QUESTION));
  const parts = await all(await client.chat(request(QUESTION, { stream: true })));
  assert.ok(parts.length > 2);
  assert.equal(parts.map((part) => part.message.content).join(""), whole.message.content);
  assert.deepEqual(
    parts.map((part) => part.done),
    [...Array(parts.length - 1).fill(false), true],
  );
});

test("a tool is called by Ollama's client, and its result is used", async () => {
  const messages = say(WEATHER_QUESTION);
  const stream = await client.chat({ model: MODEL, messages, tools: [getWeather], stream: true });
  const calls = (await all(stream)).flatMap((part) => part.message.tool_calls ?? []);
  assert.equal(calls.length, 1);
  assert.equal(calls[0].function.name, "get_weather");
  assert.deepEqual(calls[0].function.arguments, { city: "Paris" });
  messages.push({ role: "assistant", content: "", tool_calls: calls });
  messages.push({ role: "tool", content: WEATHER, tool_name: "get_weather" });
  const answer = await client.chat({ model: MODEL, messages, tools: [getWeather] });
  assert.ok(answer.message.content.includes(WEATHER));
});

test("a schema shapes the answer to Ollama's client", async () => {
  const format = z.toJSONSchema(Card);
  const answer = await client.chat(request(JSON_QUESTION, { format }));
  assert.deepEqual(Card.parse(JSON.parse(answer.message.content)), CARD);
});

test("thoughts come apart to Ollama's client", async () => {
  const answer = await client.chat(request(GREETING, { think: true }));
  assert.ok(answer.message.thinking);
  assert.ok(answer.message.content);
});

test("Ollama's client generates, and stops a stream", async () => {
  const answer = await client.generate({ model: MODEL, prompt: QUESTION });
  assert.match(answer.response, ANSWER);
  const format = { type: "array", items: { type: "integer" }, minItems: 1000 };
  const stream = await client.generate({ model: MODEL, prompt: QUESTION, format, stream: true });
  await assert.rejects(async () => {
    for await (const part of stream) {
      assert.equal(part.done, false);
      stream.abort();
    }
  }, { name: "AbortError" });
});

test("Ollama's client embeds texts in their order", async () => {
  const { embeddings } = await client.embed({ model: MODEL, input: PASSAGES });
  assert.deepEqual(embeddings, await embed(server.url, PASSAGES));
});

test("Ollama's client lists, shows, loads and pulls", async () => {
  const { models } = await client.list();
  assert.deepEqual(
    models.map((model) => model.name),
    [`${MODEL}:latest`],
  );
  const shown = await client.show({ model: MODEL });
  assert.equal(shown.model_info["qwen3.context_length"], 4096);
  assert.ok(shown.capabilities.includes("tools"));
  const loaded = await client.generate({ model: MODEL, prompt: "", keep_alive: "5m" });
  assert.equal(loaded.done_reason, "load");
  const [running] = (await client.ps()).models;
  assert.ok(new Date(running.expires_at) > new Date());
  const parts = await all(await client.pull({ model: MODEL, stream: true }));
  assert.equal(parts.at(-1).status, "success");
});

for (const stream of [false, true]) {
  test(`errors of Ollama's client have a status (stream: ${stream})`, async () => {
    const failing = (body) => client.chat({ stream, ...body });
    await assert.rejects(failing(request(GREETING, { model: "nobody" })), { status_code: 404 });
    const options = { num_ctx: 1, num_predict: CONTEXT_AND_MORE };
    await assert.rejects(failing(request(GREETING, { options })), { status_code: 400 });
  });
}

test("Ollama's client is told what is refused", async () => {
  await assert.rejects(client.delete({ model: MODEL }), { status_code: 403 });
  await assert.rejects(client.pull({ model: "org/name" }), { status_code: 403 });
});

// Anthropic's client for Node.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import Anthropic from "@anthropic-ai/sdk";
import { z } from "zod";

import { startServer } from "./server.mjs";
import {
  ANSWER,
  GET_WEATHER,
  GREETING,
  GetWeather,
  MODEL,
  QUESTION,
  WEATHER,
  WEATHER_QUESTION,
  all,
  say,
} from "./talk.mjs";

let server;
let client;

before(async () => {
  server = await startServer();
  client = new Anthropic({ baseURL: server.url, apiKey: "none", maxRetries: 0 });
});

after(() => server?.stop());

const request = (question, more = {}) => ({
  model: MODEL,
  max_tokens: 100,
  messages: say(question),
  ...more,
});
const thinking = { max_tokens: 2048, thinking: { type: "enabled", budget_tokens: 1024 } };
const getWeather = {
  name: "get_weather",
  description: GET_WEATHER,
  input_schema: z.toJSONSchema(GetWeather),
};

const textOf = (message) =>
  message.content.map((block) => (block.type === "text" ? block.text : "")).join("");

test("a message answers", async () => {
  const message = await client.messages.create(request(QUESTION));
  assert.match(textOf(message), ANSWER);
  assert.equal(message.stop_reason, "end_turn");
  assert.ok(message._request_id);
});

test("a message streams what it says whole", async () => {
  const whole = await client.messages.create(request(QUESTION));
  const events = await all(await client.messages.create(request(QUESTION, { stream: true })));
  const deltas = events.filter((event) => event.type === "content_block_delta");
  assert.ok(deltas.length > 1);
  assert.equal(deltas.map((event) => event.delta.text).join(""), textOf(whole));
  const message = await client.messages.stream(request(QUESTION)).finalMessage();
  assert.equal(textOf(message), textOf(whole));
  assert.equal(message.usage.output_tokens, whole.usage.output_tokens);
});

test("a tool use streams its input, and its result is used", async () => {
  const asked = request(WEATHER_QUESTION, { tools: [getWeather] });
  const stream = client.messages.stream(asked);
  const parts = [];
  stream.on("inputJson", (part) => parts.push(part));
  const message = await stream.finalMessage();
  assert.deepEqual(JSON.parse(parts.join("")), { city: "Paris" });
  assert.equal(message.stop_reason, "tool_use");
  const [use] = message.content;
  assert.deepEqual(use.input, { city: "Paris" });
  const result = { type: "tool_result", tool_use_id: use.id, content: WEATHER };
  const messages = [
    ...asked.messages,
    { role: "assistant", content: message.content },
    { role: "user", content: [result] },
  ];
  assert.ok(textOf(await client.messages.create({ ...asked, messages })).includes(WEATHER));
});

test("a tool choice makes it call a tool", async () => {
  const more = { tools: [getWeather], tool_choice: { type: "any" } };
  const { content } = await client.messages.create(request(GREETING, more));
  assert.deepEqual(content.map((block) => block.type), ["tool_use"]);
});

test("thoughts are a block with a signature, whole and streamed", async () => {
  const whole = await client.messages.create(request(QUESTION, thinking));
  assert.deepEqual(whole.content.map((block) => block.type), ["thinking", "text"]);
  assert.ok(whole.content[0].signature);
  const streamed = await client.messages.stream(request(QUESTION, thinking)).finalMessage();
  assert.equal(streamed.content[0].thinking, whole.content[0].thinking);
  assert.equal(streamed.content[0].signature, whole.content[0].signature);
});

test("countTokens is what the usage says", async () => {
  const { input_tokens } = await client.messages.countTokens({
    model: MODEL,
    messages: say(QUESTION),
  });
  const { usage } = await client.messages.create(request(QUESTION));
  const cached = usage.cache_read_input_tokens + usage.cache_creation_input_tokens;
  assert.equal(input_tokens, usage.input_tokens + cached);
});

test("the models are listed in Anthropic's shape", async () => {
  const models = await all(client.models.list());
  assert.ok(models.some((model) => model.id === MODEL && model.type === "model"));
});

test("a refused message is an error of the SDK's own class", async () => {
  const missing = client.messages.create(request(QUESTION, { model: "nobody" }));
  await assert.rejects(missing, Anthropic.NotFoundError);
  const long = client.messages.create(request(QUESTION.repeat(5000), { stream: true }));
  await assert.rejects(long, (error) => {
    assert.ok(error instanceof Anthropic.BadRequestError);
    assert.match(error.message, /prompt is too long: \d+ tokens > 4096 maximum/);
    return true;
  });
});

// The Responses API: OpenAI's client for Node, and Vercel's AI SDK with its provider for OpenAI.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { createOpenAI } from "@ai-sdk/openai";
import { Output, generateText, isStepCount, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";

import { startServer } from "./server.mjs";
import {
  ANSWER,
  CARD,
  Card,
  GET_WEATHER,
  GetWeather,
  JSON_QUESTION,
  MODEL,
  QUESTION,
  WEATHER,
  WEATHER_QUESTION,
  all,
} from "./talk.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;

let server;
let responses;
let model;

before(async () => {
  server = await startServer();
  const access = { baseURL: `${server.url}/v1`, apiKey: "none" };
  responses = new OpenAI({ ...access, maxRetries: 0 }).responses;
  model = createOpenAI(access)(MODEL);
});

after(() => server?.stop());

const weather = {
  type: "function",
  name: "get_weather",
  description: GET_WEATHER,
  parameters: {
    type: "object",
    properties: { city: { type: "string" } },
    required: ["city"],
    additionalProperties: false,
  },
  strict: true,
};
const getWeather = () =>
  tool({ description: GET_WEATHER, inputSchema: GetWeather, execute: async () => WEATHER });

// OpenAI's client.

test("a response answers and streams the same", async () => {
  const whole = await responses.create({ model: MODEL, input: QUESTION });
  assert.match(whole.output_text, ANSWER);
  const stream = responses.stream({ model: MODEL, input: QUESTION });
  const events = await all(stream);
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  assert.equal(deltas.map((event) => event.delta).join(""), whole.output_text);
  assert.deepEqual(
    events.map((event) => event.sequence_number),
    events.map((_, index) => index),
  );
  const final = await stream.finalResponse();
  assert.equal(final.output_text, whole.output_text);
  assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
});

test("a response goes on from the one before", async () => {
  const asked = { model: MODEL, tools: [weather] };
  const first = await responses.create({ ...asked, input: WEATHER_QUESTION });
  const [call] = first.output;
  assert.deepEqual(JSON.parse(call.arguments), { city: "Paris" });
  const result = { type: "function_call_output", call_id: call.call_id, output: WEATHER };
  const second = await responses.create({
    ...asked,
    previous_response_id: first.id,
    input: [result],
  });
  assert.ok(second.output_text.includes(WEATHER));
  assert.equal((await responses.retrieve(second.id)).output_text, second.output_text);
});

test("parse gives a response of the given structure", async () => {
  const parsed = await responses.parse({
    model: MODEL,
    input: JSON_QUESTION,
    text: { format: zodTextFormat(Card, "card") },
    max_output_tokens: 100,
  });
  assert.deepEqual(parsed.output_parsed, CARD);
});

test("a response that is not stored is a NotFoundError", async () => {
  await assert.rejects(responses.retrieve("resp_none"), OpenAI.NotFoundError);
  const lost = { model: MODEL, input: QUESTION, previous_response_id: "resp_none" };
  await assert.rejects(responses.create(lost), { code: "previous_response_not_found" });
});

// Vercel's AI SDK; its provider for OpenAI speaks Responses by default.

test("generateText and streamText answer over Responses", async () => {
  const whole = await generateText({ model, prompt: QUESTION });
  assert.match(whole.text, ANSWER);
  assert.equal(whole.finishReason, "stop");
  assert.deepEqual(whole.warnings, []);
  const streamed = streamText({ model, prompt: QUESTION });
  const deltas = await all(streamed.textStream);
  assert.ok(deltas.length > 1);
  assert.equal(deltas.join(""), whole.text);
  assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);
});

for (const [name, ask] of [
  ["generateText", generateText],
  ["streamText", async (asked) => streamText(asked)],
]) {
  for (const store of [true, false]) {
    test(`${name} uses a tool over Responses with store ${store}`, async () => {
      // With a store, the provider refers to what it has said before by the items' ids.
      const result = await ask({
        model,
        prompt: WEATHER_QUESTION,
        tools: { get_weather: getWeather() },
        stopWhen: isStepCount(2),
        providerOptions: { openai: { store } },
      });
      const [step] = await result.steps;
      assert.deepEqual(step.toolCalls[0].input, { city: "Paris" });
      assert.ok((await result.text).includes(WEATHER));
      assert.equal(await result.finishReason, "stop");
    });
  }
}

test("Output.object gives an object over Responses", async () => {
  const output = Output.object({ schema: Card });
  const asked = { model, output, prompt: JSON_QUESTION, maxOutputTokens: 100 };
  assert.deepEqual((await generateText(asked)).output, CARD);
  assert.deepEqual(await streamText(asked).output, CARD);
});

test("a failure over Responses has the server's own words", async () => {
  const asked = { model, prompt: QUESTION.repeat(5000), maxRetries: 0 };
  await assert.rejects(generateText(asked), /maximum context length/);
});

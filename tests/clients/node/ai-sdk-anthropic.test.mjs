// Vercel's AI SDK with its provider for Anthropic.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { createAnthropic } from "@ai-sdk/anthropic";
import { APICallError, Output, generateText, isStepCount, streamText, tool } from "ai";

import { startServer } from "./server.mjs";
import {
  ANSWER,
  Card,
  GET_WEATHER,
  GREETING,
  GetWeather,
  JSON_QUESTION,
  MODEL,
  QUESTION,
  WEATHER,
  WEATHER_QUESTION,
  all,
} from "./talk.mjs";

// The provider does not know the limits of this model.
globalThis.AI_SDK_LOG_WARNINGS = false;

let server;
let anthropic;
let model;

before(async () => {
  server = await startServer();
  anthropic = createAnthropic({ baseURL: `${server.url}/v1`, apiKey: "none" });
  model = anthropic(MODEL);
});

after(() => server?.stop());

const getWeather = () =>
  tool({ description: GET_WEATHER, inputSchema: GetWeather, execute: async () => WEATHER });

test("Anthropic's generateText answers, and streamText streams the same", async () => {
  const whole = await generateText({ model, prompt: QUESTION });
  assert.match(whole.text, ANSWER);
  assert.equal(whole.finishReason, "stop");
  const result = streamText({ model, prompt: QUESTION });
  const deltas = await all(result.textStream);
  assert.ok(deltas.length > 1);
  assert.equal(deltas.join(""), whole.text);
  assert.equal(await result.finishReason, "stop");
  const usage = await result.usage;
  assert.equal(usage.outputTokens, whole.usage.outputTokens);
  assert.equal(usage.inputTokens, whole.usage.inputTokens);
});

for (const [name, ask] of [
  ["generateText", generateText],
  ["streamText", streamText],
]) {
  test(`Anthropic's ${name} calls the tool that fits and uses its result`, async () => {
    const result = await ask({
      model,
      prompt: WEATHER_QUESTION,
      tools: { get_weather: getWeather() },
      stopWhen: isStepCount(2),
    });
    const steps = await result.steps;
    const [{ input, toolName }] = steps[0].toolCalls;
    assert.deepEqual({ input, toolName }, { input: { city: "Paris" }, toolName: "get_weather" });
    assert.equal(steps[0].finishReason, "tool-calls");
    assert.ok((await result.text).includes(WEATHER));
  });
}

test("Anthropic's toolChoice makes it call", async () => {
  const { toolCalls } = await generateText({
    model,
    prompt: GREETING,
    tools: { get_weather: tool({ description: GET_WEATHER, inputSchema: GetWeather }) },
    toolChoice: "required",
    maxOutputTokens: 100,
  });
  assert.deepEqual(toolCalls.map((call) => call.toolName), ["get_weather"]);
});

test("Anthropic's thoughts come as reasoning and may be given back", async () => {
  const providerOptions = { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } };
  const asked = { model, providerOptions, messages: [{ role: "user", content: QUESTION }] };
  const whole = await generateText(asked);
  assert.ok(whole.reasoningText);
  const streamed = streamText(asked);
  assert.equal(await streamed.reasoningText, whole.reasoningText);
  assert.equal(await streamed.text, whole.text);
  const messages = [
    ...asked.messages,
    ...whole.response.messages,
    { role: "user", content: GREETING },
  ];
  assert.ok((await generateText({ ...asked, messages })).text);
});

test("Anthropic's Output.object gives an object of the given structure", async () => {
  const asked = { model, prompt: JSON_QUESTION, output: Output.object({ schema: Card }) };
  const { output } = await generateText({ ...asked, maxOutputTokens: 100 });
  assert.ok(Card.safeParse(output).success); // through a call, which it forces
});

test("Anthropic's errors are APICallErrors with the server's own words", async () => {
  await assert.rejects(generateText({ model: anthropic("nobody"), prompt: QUESTION }), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 404);
    assert.match(error.message, /nobody/);
    return true;
  });
});

// Vercel's AI SDK with its provider for OpenAI-compatible servers.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  APICallError,
  Output,
  embed as embedText,
  embedMany,
  generateObject,
  generateText,
  isStepCount,
  streamText,
  tool,
} from "ai";

import { startServer } from "./server.mjs";
import {
  ANSWER,
  CARD,
  Card,
  GET_WEATHER,
  GREETING,
  GetWeather,
  JSON_QUESTION,
  MODEL,
  Mood,
  PASSAGES,
  QUESTION,
  SET_LIGHT,
  SetLight,
  WEATHER,
  WEATHER_QUESTION,
  all,
  distance,
  embed,
} from "./talk.mjs";

// The provider says of every text completion that it knows no tool choice.
globalThis.AI_SDK_LOG_WARNINGS = false;

let server;
let mlxsrv;
let model;

before(async () => {
  server = await startServer();
  mlxsrv = createOpenAICompatible({
    name: "mlxsrv",
    baseURL: `${server.url}/v1`,
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
  model = mlxsrv(MODEL);
});

after(() => server?.stop());

const getWeather = () =>
  tool({ description: GET_WEATHER, inputSchema: GetWeather, execute: async () => WEATHER });
const setLight = tool({ description: SET_LIGHT, inputSchema: SetLight });

test("generateText answers", async () => {
  const { finishReason, response, text, usage } = await generateText({ model, prompt: QUESTION });
  assert.match(text, ANSWER);
  assert.equal(finishReason, "stop");
  assert.equal(response.modelId, MODEL);
  assert.ok(usage.inputTokens > 1);
  assert.equal(usage.inputTokens + usage.outputTokens, usage.totalTokens);
});

test("streamText streams what generateText says", async () => {
  const whole = await generateText({ model, prompt: QUESTION });
  const result = streamText({ model, prompt: QUESTION });
  const deltas = await all(result.textStream);
  assert.ok(deltas.length > 1);
  assert.equal(deltas.join(""), whole.text);
  assert.equal(await result.finishReason, "stop");
  assert.equal((await result.usage).outputTokens, whole.usage.outputTokens);
});

test("thoughts come as reasoning, whole and streamed", async () => {
  const asked = {
    model,
    prompt: QUESTION,
    providerOptions: { mlxsrv: { chat_template_kwargs: { enable_thinking: true } } },
  };
  const whole = await generateText(asked);
  assert.ok(whole.reasoningText);
  assert.match(whole.text, ANSWER);
  const streamed = streamText(asked);
  assert.equal(await streamed.reasoningText, whole.reasoningText);
  assert.equal(await streamed.text, whole.text);
});

test("completionModel answers, whole and streamed", async () => {
  const asked = { model: mlxsrv.completionModel(MODEL), prompt: QUESTION, maxOutputTokens: 3 };
  const whole = await generateText(asked);
  assert.ok(whole.text);
  assert.equal(whole.usage.outputTokens, 3);
  assert.equal(whole.finishReason, "length");
  assert.equal(await streamText(asked).text, whole.text);
});

test("generateText calls the tool that fits, and the model uses its result", async () => {
  const result = await generateText({
    model,
    prompt: WEATHER_QUESTION,
    tools: { get_weather: getWeather() },
    stopWhen: isStepCount(2),
  });
  const [{ input, toolName }] = result.steps[0].toolCalls;
  assert.deepEqual({ input, toolName }, { input: { city: "Paris" }, toolName: "get_weather" });
  assert.equal(result.steps[0].finishReason, "tool-calls");
  assert.equal(result.finishReason, "stop");
  assert.ok(result.text.includes(WEATHER));
});

test("generateText calls no tool where none fits", async () => {
  const tools = { get_weather: getWeather() };
  const { text, toolCalls } = await generateText({ model, prompt: QUESTION, tools });
  assert.deepEqual(toolCalls, []);
  assert.match(text, ANSWER);
});

test("streamText streams a tool call, its result and the answer", async () => {
  const result = streamText({
    model,
    prompt: WEATHER_QUESTION,
    tools: { get_weather: getWeather() },
    stopWhen: isStepCount(2),
  });
  const parts = await all(result.stream);
  assert.deepEqual(parts.filter((part) => part.type === "error"), []);
  const kinds = parts.map((part) => part.type);
  const [call] = parts.filter((part) => part.type === "tool-call");
  assert.deepEqual(call.input, { city: "Paris" });
  assert.ok(kinds.indexOf("tool-input-start") < kinds.indexOf("tool-call"));
  assert.ok(kinds.indexOf("tool-result") < kinds.indexOf("text-delta"));
  assert.ok((await result.text).includes(WEATHER));
});

for (const [name, toolChoice] of [
  ["required", "required"],
  ["by name", { type: "tool", toolName: "set_light" }],
]) {
  test(`toolChoice ${name} makes it call`, async () => {
    const { toolCalls } = await generateText({
      model,
      prompt: GREETING,
      tools: { set_light: setLight },
      toolChoice,
      maxOutputTokens: 100,
    });
    assert.equal(toolCalls.length, 1);
    assert.equal(toolCalls[0].toolName, "set_light");
    assert.ok(!toolCalls[0].invalid, toolCalls[0].error);
    assert.ok(SetLight.safeParse(toolCalls[0].input).success);
  });
}

test("generateObject gives an object of the given structure", async () => {
  const limit = { maxOutputTokens: 100, maxRetries: 0 };
  const card = await generateObject({ model, prompt: JSON_QUESTION, schema: Card, ...limit });
  assert.deepEqual(card.object, CARD);
  const mood = await generateObject({ model, prompt: GREETING, schema: Mood, ...limit });
  assert.ok(Mood.safeParse(mood.object).success);
});

test("generateText with Output.object gives the same", async () => {
  const { output } = await generateText({
    model,
    prompt: JSON_QUESTION,
    output: Output.object({ schema: Card }),
    maxOutputTokens: 100,
  });
  assert.deepEqual(output, CARD);
});

test("streamText with Output.object streams a growing object", async () => {
  const result = streamText({
    model,
    prompt: JSON_QUESTION,
    output: Output.object({ schema: Card }),
    maxOutputTokens: 100,
  });
  const parts = await all(result.partialOutputStream);
  assert.ok(parts.length > 1);
  assert.deepEqual(parts.at(-1), CARD);
  assert.deepEqual(await result.output, CARD);
});

test("an object comes from JSON mode where the provider is not told of schemas", async () => {
  const plain = createOpenAICompatible({ name: "mlxsrv", baseURL: `${server.url}/v1` });
  const { object } = await generateObject({
    model: plain(MODEL),
    prompt: JSON_QUESTION,
    output: "no-schema",
    maxOutputTokens: 100,
  });
  assert.deepEqual(object, CARD);
});

test("embed and embedMany give the vectors of plain HTTP", async () => {
  const embedder = mlxsrv.embeddingModel(MODEL);
  const { embedding, usage } = await embedText({ model: embedder, value: PASSAGES[0] });
  assert.deepEqual([embedding], await embed(server.url, PASSAGES[0]));
  assert.ok(usage.tokens > 1);
  const { embeddings } = await embedMany({ model: embedder, values: PASSAGES });
  assert.ok(distance(embeddings, await embed(server.url, PASSAGES)) < 1e-6);
  const providerOptions = { mlxsrv: { dimensions: 8 } };
  const narrow = await embedText({ model: embedder, value: PASSAGES[0], providerOptions });
  assert.deepEqual([narrow.embedding], await embed(server.url, PASSAGES[0], { dimensions: 8 }));
});

test("errors are APICallErrors with the server's own words", async () => {
  await assert.rejects(generateText({ model, prompt: QUESTION, temperature: 5 }), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 400);
    assert.equal(error.isRetryable, false);
    assert.equal(error.data.error.param, "temperature");
    assert.match(error.message, /temperature/);
    return true;
  });
  await assert.rejects(generateText({ model: mlxsrv("nobody"), prompt: QUESTION }), (error) => {
    assert.equal(error.statusCode, 404);
    assert.equal(error.data.error.code, "model_not_found");
    return true;
  });
});

/** The one error of a stream that is refused. */
async function refusal(model) {
  const result = streamText({ model, prompt: QUESTION, temperature: 5, onError: () => {} });
  const errors = (await all(result.stream)).filter((part) => part.type === "error");
  assert.equal(errors.length, 1);
  return errors[0].error;
}

test("a refused stream gives an error part with the status and the server's own words", async () => {
  const error = await refusal(model);
  assert.ok(APICallError.isInstance(error));
  assert.equal(error.statusCode, 400);
  assert.equal(error.data.error.param, "temperature");
  assert.match(error.message, /temperature/);
});

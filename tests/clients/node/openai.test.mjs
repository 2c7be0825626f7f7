// OpenAI's client for Node.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";

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
  say,
} from "./talk.mjs";

let server;
let chat;
let client;

before(async () => {
  server = await startServer();
  client = new OpenAI({ baseURL: `${server.url}/v1`, apiKey: "none", maxRetries: 0 });
  chat = client.chat.completions;
});

after(() => server?.stop());

const request = (question, more = {}) => ({ model: MODEL, messages: say(question), ...more });

const getWeather = zodFunction({
  name: "get_weather",
  description: GET_WEATHER,
  parameters: GetWeather,
});
const setLight = zodFunction({ name: "set_light", description: SET_LIGHT, parameters: SetLight });

test("a chat answers", async () => {
  const answer = await chat.create(request(QUESTION));
  assert.match(answer.choices[0].message.content, ANSWER);
  assert.equal(answer.choices[0].finish_reason, "stop");
  const { prompt_tokens, completion_tokens, total_tokens } = answer.usage;
  assert.equal(prompt_tokens + completion_tokens, total_tokens);
});

test("a chat streams what it says whole", async () => {
  const whole = await chat.create(request(QUESTION));
  const chunks = await all(
    await chat.create(request(QUESTION, { stream: true, stream_options: { include_usage: true } })),
  );
  const said = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
  assert.equal(said, whole.choices[0].message.content);
  assert.equal(chunks.at(-2).choices[0].finish_reason, "stop");
  assert.equal(chunks.at(-1).usage.completion_tokens, whole.usage.completion_tokens);
  assert.equal(chunks.filter((chunk) => chunk.usage).length, 1);
});

test("the stream helper puts the answer together", async () => {
  const stream = chat.stream(request(QUESTION));
  let said = "";
  stream.on("content", (delta) => {
    said += delta;
  });
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].message.content, said);
  assert.match(said, ANSWER);
});

test("after a stream that is broken off the client goes on", async () => {
  for await (const chunk of await chat.create(request(QUESTION, { stream: true }))) {
    if (chunk.choices[0].delta.content) break;
  }
  assert.match((await chat.create(request(QUESTION))).choices[0].message.content, ANSWER);
});

test("a text completion streams what it says whole", async () => {
  const body = { model: MODEL, prompt: "mlxsrv is", max_tokens: 40 };
  const whole = await client.completions.create(body);
  const chunks = await all(await client.completions.create({ ...body, stream: true }));
  assert.match(whole.choices[0].text, /server for MLX language models/);
  assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), whole.choices[0].text);
});

test("the catalogue lists and retrieves the model", async () => {
  assert.deepEqual((await all(client.models.list())).map((model) => model.id), [MODEL]);
  assert.equal((await client.models.retrieve(MODEL)).object, "model");
});

test("n and log-probabilities come as asked for", async () => {
  const answer = await chat.create(request(QUESTION, { n: 2, logprobs: true, top_logprobs: 2 }));
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
  for (const { message, logprobs } of answer.choices) {
    const bytes = logprobs.content.flatMap((score) => score.bytes);
    assert.equal(Buffer.from(bytes).toString(), message.content);
    assert.ok(logprobs.content.every((score) => score.top_logprobs.length === 2));
  }
});

test("a tool that fits is called", async () => {
  const answer = await chat.create(request(WEATHER_QUESTION, { tools: [getWeather] }));
  const [{ finish_reason, message }] = answer.choices;
  assert.equal(finish_reason, "tool_calls");
  assert.equal(message.content, null);
  assert.equal(message.tool_calls.length, 1);
  assert.equal(message.tool_calls[0].function.name, "get_weather");
  assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), { city: "Paris" });
});

test("no tool is called where none fits", async () => {
  const answer = await chat.create(request(QUESTION, { tools: [getWeather] }));
  assert.match(answer.choices[0].message.content, ANSWER);
  assert.equal(answer.choices[0].finish_reason, "stop");
});

test("a tool call streams", async () => {
  const stream = chat.stream(request(WEATHER_QUESTION, { tools: [getWeather] }));
  const done = [];
  stream.on("tool_calls.function.arguments.done", (event) => done.push(event));
  const final = await stream.finalChatCompletion();
  assert.deepEqual(done.map((event) => event.parsed_arguments), [{ city: "Paris" }]);
  assert.equal(final.choices[0].finish_reason, "tool_calls");
});

test("runTools calls the tool and the model uses its result", async () => {
  const asked = [];
  const runner = chat.runTools(
    request(WEATHER_QUESTION, {
      tools: [
        zodFunction({
          name: "get_weather",
          description: GET_WEATHER,
          parameters: GetWeather,
          function: ({ city }) => {
            asked.push(city);
            return WEATHER;
          },
        }),
      ],
    }),
  );
  assert.ok((await runner.finalContent()).includes(WEATHER));
  assert.deepEqual(asked, ["Paris"]);
});

for (const [name, tool_choice] of [
  ["required", "required"],
  ["by name", { type: "function", function: { name: "set_light" } }],
]) {
  test(`tool choice ${name} makes it call`, async () => {
    const answer = await chat.parse(
      request(GREETING, { tools: [setLight], tool_choice, max_tokens: 100 }),
    );
    const [call] = answer.choices[0].message.tool_calls;
    assert.equal(call.function.name, "set_light");
    assert.ok(SetLight.safeParse(call.function.parsed_arguments).success);
  });
}

test("parse gives an answer of the given structure", async () => {
  const format = (shape) => ({ response_format: zodResponseFormat(shape, "it"), max_tokens: 100 });
  const card = await chat.parse(request(JSON_QUESTION, format(Card)));
  assert.deepEqual(card.choices[0].message.parsed, CARD);
  const mood = await chat.parse(request(GREETING, format(Mood)));
  assert.ok(Mood.safeParse(mood.choices[0].message.parsed).success);
});

test("json_object gives an object", async () => {
  const answer = await chat.create(
    request(JSON_QUESTION, { response_format: { type: "json_object" }, max_tokens: 100 }),
  );
  assert.deepEqual(JSON.parse(answer.choices[0].message.content), CARD);
});

test("texts are embedded in their order, as they are over plain HTTP", async () => {
  const expected = await embed(server.url, PASSAGES);
  // The client asks for base64 unless it is told otherwise.
  for (const encoding of [{}, { encoding_format: "float" }]) {
    const answer = await client.embeddings.create({ model: MODEL, input: PASSAGES, ...encoding });
    assert.deepEqual(answer.data.map((one) => one.index), [0, 1, 2]);
    assert.ok(distance(answer.data.map((one) => one.embedding), expected) < 1e-6);
    assert.equal(answer.usage.prompt_tokens, answer.usage.total_tokens);
  }
});

test("a text and its token ids have one vector, also cut to the dimensions asked for", async () => {
  const [text] = PASSAGES;
  const body = JSON.stringify({ content: text });
  const response = await fetch(`${server.url}/tokenize`, { method: "POST", body });
  const { tokens } = await response.json();
  for (const more of [{}, { dimensions: 8 }]) {
    const expected = await embed(server.url, text, more);
    for (const input of [text, tokens, [tokens]]) {
      const answer = await client.embeddings.create({ model: MODEL, input, ...more });
      assert.deepEqual(answer.data.map((one) => one.embedding), expected);
    }
  }
});

for (const stream of [false, true]) {
  test(`errors are the client's own classes${stream ? ", of streams too" : ""}`, async () => {
    await assert.rejects(chat.create(request(QUESTION, { temperature: 5, stream })), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.code, "invalid_value");
      assert.equal(error.param, "temperature");
      assert.equal(error.type, "invalid_request_error");
      assert.ok(error.requestID);
      return true;
    });
    await assert.rejects(chat.create({ ...request(QUESTION, { stream }), model: "nobody" }), {
      constructor: OpenAI.NotFoundError,
      code: "model_not_found",
    });
    await assert.rejects(chat.create(request("long ".repeat(CONTEXT_AND_MORE), { stream })), {
      constructor: OpenAI.BadRequestError,
      code: "context_length_exceeded",
    });
  });
}

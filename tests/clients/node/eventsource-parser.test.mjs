// eventsource-parser over the raw stream: what a reader of server-sent events sees, and no SDK.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { createParser } from "eventsource-parser";
import { EventSourceParserStream } from "eventsource-parser/stream";

import { startServer } from "./server.mjs";
import {
  ANSWER,
  EMOJI,
  EMOJI_QUESTION,
  GREETING,
  QUESTION,
  WEATHER_QUESTION,
  all,
  say,
} from "./talk.mjs";

let server;

before(async () => {
  server = await startServer();
});

after(() => server?.stop());

function post(question, more = {}, headers = {}) {
  return fetch(`${server.url}/v1/chat/completions`, {
    method: "POST",
    headers,
    body: JSON.stringify({ messages: say(question), ...more }),
  });
}

/** The events of a streamed chat: any error of the parser ends the test. */
async function events(question, more = {}) {
  const response = await post(question, { stream: true, ...more });
  assert.equal(response.status, 200);
  assert.match(response.headers.get("content-type"), /^text\/event-stream/);
  return all(
    response.body
      .pipeThrough(new TextDecoderStream())
      .pipeThrough(new EventSourceParserStream({ onError: "terminate" })),
  );
}

async function chunks(question, more = {}) {
  const list = await events(question, more);
  assert.equal(list.at(-1).data, "[DONE]");
  return list.slice(0, -1).map((event) => JSON.parse(event.data));
}

const text = (list) => list.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");

test("every event is data alone, one line of JSON, and [DONE] comes last", async () => {
  const list = await events(QUESTION);
  assert.ok(list.length > 3);
  for (const { event, id, data } of list) {
    assert.equal(event, undefined);
    assert.equal(id, undefined);
    assert.ok(!data.includes("\n"));
  }
  assert.deepEqual(list.map((event) => event.data).indexOf("[DONE]"), list.length - 1);
  for (const { data } of list.slice(0, -1)) {
    assert.equal(JSON.parse(data).object, "chat.completion.chunk");
  }
});

test("the role comes first and once, the finish reason last and once", async () => {
  const list = await chunks(QUESTION, { stream_options: {} });
  const roles = list.map((chunk) => chunk.choices[0].delta.role ?? null);
  assert.deepEqual(roles, ["assistant", ...Array(list.length - 1).fill(null)]);
  const reasons = list.map((chunk) => chunk.choices[0].finish_reason);
  assert.deepEqual(reasons, [...Array(list.length - 1).fill(null), "stop"]);
  assert.deepEqual(list.at(-1).choices[0].delta, {});
  assert.match(text(list), ANSWER);
});

test("usage comes after the finish chunk, with an empty choice or with none, or nowhere", async () => {
  const unasked = await chunks(GREETING);
  assert.deepEqual(unasked.filter((chunk) => chunk.usage), [unasked.at(-1)]);
  assert.equal(unasked.at(-2).choices[0].finish_reason, "stop");
  const [empty] = unasked.at(-1).choices;
  assert.deepEqual([empty.index, empty.delta, empty.finish_reason], [0, {}, null]);
  const asked = await chunks(GREETING, { stream_options: { include_usage: true } });
  assert.deepEqual(asked.filter((chunk) => chunk.usage), [asked.at(-1)]);
  assert.deepEqual(asked.at(-1).choices, []);
  assert.ok(asked.slice(0, -1).every((chunk) => chunk.usage === null));
  const declined = await chunks(GREETING, { stream_options: {} });
  assert.ok(declined.every((chunk) => chunk.usage === undefined));
});

test("fed byte by byte, characters of many bytes arrive whole", async () => {
  const response = await post(EMOJI_QUESTION, { stream: true });
  const bytes = new Uint8Array(await response.arrayBuffer());
  const list = [];
  const errors = [];
  const parser = createParser({
    onEvent: (event) => list.push(event.data),
    onError: (error) => errors.push(error),
  });
  const decoder = new TextDecoder("utf-8", { fatal: true });
  for (const byte of bytes) {
    parser.feed(decoder.decode(new Uint8Array([byte]), { stream: true }));
  }
  decoder.decode();
  assert.deepEqual(errors, []);
  assert.equal(list.pop(), "[DONE]");
  const said = text(list.map((data) => JSON.parse(data)));
  assert.match(said, EMOJI);
  assert.ok(!said.includes("\ufffd"));
  const whole = await (await post(EMOJI_QUESTION)).json();
  assert.equal(said, whole.choices[0].message.content);
});

test("a tool call streams its name first, then its arguments", async () => {
  const parameters = { type: "object", properties: { city: { type: "string" } } };
  const tool = { name: "get_weather", parameters: { ...parameters, required: ["city"] } };
  const list = await chunks(WEATHER_QUESTION, { tools: [{ type: "function", function: tool }] });
  const calls = list.flatMap((chunk) => chunk.choices[0].delta.tool_calls ?? []);
  assert.match(calls[0].id, /^call_/);
  assert.equal(calls[0].type, "function");
  assert.equal(calls[0].function.name, "get_weather");
  assert.ok(calls.every((call) => call.index === 0));
  assert.ok(calls.slice(1).every((call) => call.id === undefined && !call.function.name));
  const written = calls.map((call) => call.function.arguments ?? "").join("");
  assert.deepEqual(JSON.parse(written), { city: "Paris" });
  assert.equal(text(list), "");
  assert.equal(list.at(-2).choices[0].finish_reason, "tool_calls");
});

test("choices of one request interleave, and each ends on its own", async () => {
  const list = await chunks(QUESTION, { n: 2, stream_options: {} });
  for (const index of [0, 1]) {
    const own = list.map((chunk) => chunk.choices[0]).filter((choice) => choice.index === index);
    assert.match(own.map((choice) => choice.delta.content ?? "").join(""), ANSWER);
    assert.equal(own.filter((choice) => choice.delta.role).length, 1);
    const ends = own.filter((choice) => choice.finish_reason);
    assert.deepEqual(ends, [own.at(-1)]);
    assert.equal(ends[0].finish_reason, "stop");
  }
});

test("a refused stream is JSON with its own status, whatever Accept says", async () => {
  for (const headers of [{}, { accept: "text/event-stream" }, { accept: "application/json" }]) {
    const response = await post(QUESTION, { stream: true, temperature: 5 }, headers);
    assert.equal(response.status, 400);
    assert.equal(response.headers.get("content-type"), "application/json");
    assert.equal((await response.json()).error.param, "temperature");
  }
});

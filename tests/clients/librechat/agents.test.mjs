// LibreChat's agents over three dialects: a chat, a tool and its result, a title.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";

import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { Run, TitleMethod } from "@librechat/agents";

import { startServer } from "../node/server.mjs";
import {
  ANSWER,
  GET_WEATHER,
  GetWeather,
  MODEL,
  QUESTION,
  WEATHER,
  WEATHER_QUESTION,
} from "../node/talk.mjs";

let server;
before(async () => {
  server = await startServer();
});
after(() => server.stop());

/** How each dialect is asked for: the options of LibreChat's model. */
const DIALECTS = {
  "chat completions": (url) => ({
    provider: "openAI",
    model: MODEL,
    apiKey: "none",
    streaming: true,
    configuration: { baseURL: `${url}/v1` },
  }),
  Responses: (url) => ({ ...DIALECTS["chat completions"](url), useResponsesApi: true }),
  Messages: (url) => ({
    provider: "anthropic",
    model: MODEL,
    apiKey: "none",
    streaming: true,
    maxTokens: 512,
    clientOptions: { baseURL: url },
  }),
};

const weather = tool(async () => WEATHER, {
  name: "get_weather",
  description: GET_WEATHER,
  schema: GetWeather,
});

const makeRun = (llmConfig, tools = []) =>
  Run.create({
    runId: crypto.randomUUID(),
    graphConfig: { type: "standard", instructions: "", llmConfig, tools },
    returnContent: true,
  });

async function converse(run, question) {
  const parts = await run.processStream(
    { messages: [new HumanMessage(question)] },
    { runId: crypto.randomUUID(), streamMode: "values", version: "v2", configurable: { thread_id: "t" } },
  );
  return { parts, text: parts.map((part) => part.text ?? "").join("") };
}

for (const [dialect, configure] of Object.entries(DIALECTS)) {
  describe(dialect, () => {
    test(`LibreChat chats over ${dialect}`, async () => {
      const { text } = await converse(await makeRun(configure(server.url)), QUESTION);
      assert.match(text, ANSWER);
    });

    test(`LibreChat calls a tool over ${dialect} and uses its result`, async () => {
      const run = await makeRun(configure(server.url), [weather]);
      const { parts, text } = await converse(run, WEATHER_QUESTION);
      const [called] = parts.filter((part) => part.type === "tool_call");
      assert.equal(called.tool_call.name, "get_weather");
      assert.equal(called.tool_call.output, WEATHER);
      assert.ok(text.includes(WEATHER), text);
    });

    test(`LibreChat titles a conversation over ${dialect}`, async () => {
      const { provider, ...clientOptions } = configure(server.url);
      const run = await makeRun(configure(server.url));
      const { parts } = await converse(run, QUESTION);
      for (const titleMethod of [TitleMethod.COMPLETION, TitleMethod.STRUCTURED]) {
        const { title } = await run.generateTitle({
          provider,
          inputText: QUESTION,
          contentParts: parts,
          titleMethod,
          clientOptions: { ...clientOptions, streaming: false },
          skipLanguage: true,
        });
        assert.equal(typeof title, "string", titleMethod);
        assert.ok(title.length > 0, titleMethod);
      }
    });
  });
}

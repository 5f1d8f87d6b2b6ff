// What a program with the Vercel AI SDK does: node ai_sdk.mjs BASE_URL
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAI({ baseURL: process.argv[2], apiKey: "none" });
const said = "Nothing to <do> here, is there?";
const prompt = "Weather?";
const options = { temperature: 0, maxRetries: 0 };

// The provider's own choice is the Responses API; chat is the older one.
for (const model of [provider("scripted"), provider.chat("scripted")]) {
  const whole = await generateText({ model, prompt, ...options });
  assert.equal(whole.text, said);
  assert.equal(whole.finishReason, "stop");
  assert.ok(whole.usage.inputTokens > 0 && whole.usage.outputTokens > 0);

  const stream = streamText({ model, prompt, ...options });
  let joined = "";
  for await (const piece of stream.textStream) joined += piece;
  assert.equal(joined, said);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);

  const asked = [];
  const tools = {
    get_weather: tool({
      description: "tells the weather",
      inputSchema: z.object({ city: z.string(), days: z.number().int().optional() }),
      execute: async ({ city }) => (asked.push(city), { weather: `sun in ${city}` }),
    }),
  };
  // The second step sends back what the first has said, and what the calls have given.
  const steps = await generateText({ model, prompt, tools, stopWhen: stepCountIs(3), ...options });
  assert.equal(steps.text, said);
  assert.equal(steps.steps.length, 2);
  assert.deepEqual(asked, ['Ulm "S"', "Bonn"]);
  const parts = [];
  const streamed = streamText({ model, prompt, tools, stopWhen: stepCountIs(3), ...options });
  for await (const part of streamed.fullStream) {
    if (part.type === "error") throw part.error;
    parts.push(part.type);
  }
  for (const kind of ["tool-call", "tool-result", "text-delta", "finish"]) assert.ok(parts.includes(kind), kind);
  assert.equal(asked.length, 4);

  const schema = z.object({ answer: z.enum(["yes", "no"]), count: z.number().int().min(1).max(3) });
  const formed = await generateText({ model, prompt, output: Output.object({ schema }), ...options });
  assert.ok(schema.safeParse(formed.output).success);

  const system = "Be brief.";
  const talk = [
    { role: "user", content: "Hello" },
    { role: "assistant", content: "Hi." },
    { role: "user", content: prompt },
  ];
  assert.equal((await generateText({ model, system, messages: talk, ...options })).text, said);
  await assert.rejects(generateText({ model, prompt, maxRetries: 0, temperature: -1 }), (error) => APICallError.isInstance(error) && error.statusCode === 400);
}
console.log("done");

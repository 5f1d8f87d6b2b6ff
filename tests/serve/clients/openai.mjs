// What a program with OpenAI's Node package does: node openai.mjs BASE_URL
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Weather?" }];
const said = "Nothing to <do> here, is there?";
const parameters = { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } } };
const tool = { type: "function", function: { name: "get_weather", parameters } };

const whole = await client.chat.completions.create({ model, messages, temperature: 0 });
assert.equal(whole.choices[0].message.content, said);
assert.equal(whole.choices[0].finish_reason, "stop");
assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);

const stream = client.chat.completions.stream({ model, messages, temperature: 0, stream_options: { include_usage: true } });
let joined = "";
stream.on("content", (delta) => (joined += delta));
assert.equal(await stream.finalContent(), said);
assert.equal(joined, said);
assert.equal((await stream.totalUsage()).completion_tokens, whole.usage.completion_tokens);

const asked = [];
const runner = client.chat.completions.runTools({
  model,
  messages,
  temperature: 0,
  stream: true,
  tools: [
    {
      type: "function",
      function: {
        name: "get_weather",
        parameters,
        parse: JSON.parse,
        function: ({ city }) => (asked.push(city), `sun in ${city}`),
      },
    },
  ],
});
assert.equal(await runner.finalContent(), said);
assert.deepEqual(asked, ['Ulm "S"', "Bonn"]);

const Answer = z.object({ answer: z.enum(["yes", "no"]), count: z.number().int().min(1).max(3) });
const parsed = await client.chat.completions.parse({
  model,
  messages,
  temperature: 0,
  response_format: zodResponseFormat(Answer, "answer"),
});
assert.ok(["yes", "no"].includes(parsed.choices[0].message.parsed.answer));

const text = await client.completions.create({ model, prompt: "x", max_tokens: 3 });
assert.equal(text.object, "text_completion");

const response = await client.responses.create({ model, input: "Weather?", temperature: 0 });
assert.equal(response.output_text, said);
const events = client.responses.stream({ model, input: "Weather?", temperature: 0, tools: [{ ...tool.function, type: "function", strict: false }] });
const kinds = new Set();
for await (const event of events) kinds.add(event.type);
const final = await events.finalResponse();
assert.deepEqual(final.output.filter((item) => item.type === "function_call").map((item) => JSON.parse(item.arguments).city), ['Ulm "S"', "Bonn"]);
for (const kind of ["response.created", "response.output_item.added", "response.function_call_arguments.delta", "response.completed"])
  assert.ok(kinds.has(kind), kind);
const next = await client.responses.create({ model, previous_response_id: response.id, input: "And then?", temperature: 0 });
assert.equal(next.previous_response_id, response.id);
const formed = await client.responses.parse({ model, input: "Weather?", temperature: 0, text: { format: zodTextFormat(Answer, "answer") } });
assert.ok(formed.output_parsed.count >= 1);
assert.equal((await client.responses.retrieve(response.id)).output_text, said);
await client.responses.delete(response.id);
await assert.rejects(client.responses.retrieve(response.id), OpenAI.NotFoundError);

await assert.rejects(client.chat.completions.create({ model, messages, temperature: -1 }), (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
await assert.rejects(client.chat.completions.create({ model: "none", messages }), OpenAI.NotFoundError);
const left = await client.chat.completions.create({ model, messages, stream: true });
for await (const _ of left) break; // which ends the request
console.log("done");

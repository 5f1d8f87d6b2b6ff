// What a program with Ollama's JavaScript package does: node ollama.mjs URL KEY URL_OF_AN_EMBEDDER
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const [url, key, embedderUrl] = process.argv.slice(2);
const client = new Ollama({ host: url, headers: { authorization: `Bearer ${key}` } });
const said = "Nothing to <do> here, is there?";
const options = { temperature: 0 };
const ask = (script) => ({ model: "scripted", messages: [{ role: "user", content: script }], options });
const join = async (stream, text) => {
  let joined = "";
  let last;
  for await (const part of stream) (joined += text(part) ?? ""), (last = part);
  return [joined, last];
};

const whole = await client.chat(ask("plain"));
assert.equal(whole.message.content, said);
assert.equal(whole.done_reason, "stop");
const [joined, end] = await join(await client.chat({ ...ask("plain"), stream: true }), (part) => part.message.content);
assert.equal(joined, said);
assert.ok(end.done);
assert.equal(end.eval_count, whole.eval_count);
assert.equal(end.prompt_eval_count, whole.prompt_eval_count);
assert.ok(end.total_duration >= end.eval_duration && end.eval_duration > 0);

const parameters = { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } } };
const tools = [{ type: "function", function: { name: "get_weather", description: "What it will be like", parameters } }];
const calls = [];
for await (const part of await client.chat({ ...ask("two calls"), tools, stream: true })) calls.push(...(part.message.tool_calls ?? []));
assert.deepEqual(calls.map((call) => call.function.arguments), [{ city: 'Ulm "S"', days: 3 }, { city: "Bonn" }]);
const first = await client.chat({ ...ask("two calls"), tools });
const results = ["sun", "rain"].map((content) => ({ role: "tool", tool_name: "get_weather", content }));
const messages = [...ask("plain").messages, first.message, ...results];
assert.equal((await client.chat({ ...ask("plain"), tools, messages })).message.content, said);

const thought = await client.chat({ ...ask("thought"), think: true });
assert.equal(thought.message.thinking.trim(), "The city is Paris.");
assert.equal(thought.message.content.trim(), "It rains.");

const generated = await client.generate({ model: "scripted", prompt: "plain", options });
assert.equal(generated.response, said);
const [text] = await join(await client.generate({ model: "scripted", prompt: "[[plain]]", raw: true, stream: true, options }), (part) => part.response);
assert.equal(text, said);
const format = { type: "object", properties: { town: { type: "string" }, size: { type: "integer" } } };
assert.equal(JSON.parse((await client.generate({ model: "scripted", prompt: "object", format, options })).response).town, "Wien");

assert.deepEqual((await client.list()).models.map((model) => model.model), ["scripted"]);
const [loaded] = (await client.ps()).models;
assert.equal(loaded.model, "scripted");
assert.ok(new Date(loaded.expires_at) > new Date());
const shown = await client.show({ model: "scripted" });
assert.deepEqual(new Set(shown.capabilities), new Set(["completion", "tools", "thinking"]));
assert.equal(shown.model_info[`${shown.model_info["general.architecture"]}.context_length`], 512);

const embedder = new Ollama({ host: embedderUrl });
const { embeddings } = await embedder.embed({ model: "tiny", input: ["w1 w2 w3", "w4"] });
const { embedding } = await embedder.embeddings({ model: "tiny", prompt: "w4" });
assert.equal(embeddings.length, 2);
assert.deepEqual(embeddings[1], embedding);
assert.ok(Math.abs(embedding.reduce((sum, value) => sum + value * value, 0) - 1) < 1e-5);

await assert.rejects(client.chat({ ...ask("plain"), model: "none" }), (error) => error.status_code === 404 && /does not exist/.test(error.message));
await assert.rejects(client.chat({ ...ask("plain"), options: { mirostat: 1 } }), /options\.mirostat/);
await assert.rejects(new Ollama({ host: url }).list(), (error) => error.status_code === 401);
const left = await client.chat({ ...ask("plain"), stream: true });
for await (const _ of left) break; // which ends the request
console.log("done");

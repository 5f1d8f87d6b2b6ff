// Models that come and go, with Ollama's JavaScript package: node ollama_pull.mjs URL KEY
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const [url, key] = process.argv.slice(2);
const client = new Ollama({ host: url, headers: { authorization: `Bearer ${key}` } });
const list = async () => (await client.list()).models.map((model) => model.model);

for (const model of ["tiny:1b", "hf.co/org/name:Q4_K_M"]) {
  const steps = [];
  for await (const step of await client.pull({ model, stream: true })) steps.push(step);
  assert.equal(steps[0].status, "pulling manifest");
  assert.equal(steps.at(-1).status, "success");
  const file = steps.findLast((step) => step.digest);
  assert.ok(file.digest.startsWith("sha256:") && file.completed === file.total && file.total > 0);
  assert.deepEqual(await list(), ["fixed", model]);
  assert.equal((await client.delete({ model })).status, "success");
  assert.deepEqual(await list(), ["fixed"]);
}
await assert.rejects(client.delete({ model: "tiny:1b" }), (error) => error.status_code === 404);
await assert.rejects(client.pull({ model: "../x" }), (error) => error.status_code === 400);
await assert.rejects(async () => {
  for await (const _ of await client.pull({ model: "tiny:7b", stream: true }));
}, /is not in the registry/);
console.log("done");

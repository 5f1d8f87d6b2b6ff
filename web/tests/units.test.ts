/** The parts of the page that need no browser. */

import assert from "node:assert/strict";
import { test } from "node:test";
import {
  asRequest,
  leafBelow,
  matches,
  merged,
  newConversation,
  newMessage,
  NO_SETTINGS,
  parseConversation,
  path,
  siblings,
  titleOf,
  type Conversation,
  type Message,
} from "../src/conversation";
import { asInput, asTurns, inputOf, itemsAsMarkdown, parseItems, unanswered, type Item } from "../src/items";
import { buckets, parseMetrics, quantile, total } from "../src/prometheus";
import { events } from "../src/sse";

function conversation(...messages: Message[]): Conversation {
  const made = newConversation(NO_SETTINGS);
  return { ...made, leaf: messages.at(-1)?.id ?? null, messages: Object.fromEntries(messages.map((one) => [one.id, one])) };
}

const message = (id: string, parent: string | null, content: string, created: number): Message => ({
  ...newMessage({ parent, role: created % 2 ? "user" : "assistant", content, created }),
  id,
  touched: created,
});

const A = message("a", null, "Hello there", 1);
const B = message("b", "a", "First", 2);
const C = message("c", "a", "Second", 4);
const D = message("d", "c", "More", 5);

test("paths, branches and leaves of a tree", () => {
  const tree = conversation(A, B, C, D);
  assert.deepEqual(path(tree).map((one) => one.id), ["a", "c", "d"]);
  assert.deepEqual(path(tree, "b").map((one) => one.id), ["a", "b"]);
  assert.deepEqual(siblings(tree, C).map((one) => one.id), ["b", "c"]);
  assert.equal(leafBelow(tree, "a"), "d");
  assert.equal(titleOf(tree), "Hello there");
  assert.ok(matches(tree, "first HELLO") && !matches(tree, "first goodbye"));
});

test("a circle of an imported file ends", () => {
  const circle = conversation({ ...A, parent: "b" }, B);
  assert.deepEqual(path(circle).map((one) => one.id), ["a", "b"]);
});

test("two copies become one, of each message the later", () => {
  const one = { ...conversation(A, B), updated: 1 };
  const other = { ...conversation(A, { ...B, content: "First, longer", touched: 9 }, C), updated: 2, title: "Named" };
  for (const both of [merged(one, other), merged(other, one)]) {
    assert.deepEqual(Object.keys(both.messages).sort(), ["a", "b", "c"]);
    assert.equal(both.messages["b"].content, "First, longer");
    assert.equal(both.title, "Named");
  }
});

const CALL = { type: "mcp_call", server_label: "s", name: "f", arguments: '{"a":1}', error: null } as const;
const ASKED = { ...CALL, type: "mcp_approval_request", id: "q" } as const;
const ITEMS: Item[] = [
  { type: "reasoning", id: "1", content: [{ text: "Hm" }] },
  { ...CALL, id: "2", output: "one" },
  { ...CALL, id: "3", error: { type: "x", content: [{ type: "text", text: "no file" }] }, output: null },
  { ...CALL, id: "4", output: null }, // broken off
  { type: "message", id: "5", content: [{ text: "So" }, { text: "." }] },
];

test("answers with calls of tools as both APIs take them", () => {
  assert.deepEqual(asInput(ITEMS), [
    { type: "reasoning", id: "1", summary: [], content: [{ type: "reasoning_text", text: "Hm" }] },
    ITEMS[1],
    ITEMS[2],
    { type: "message", id: "5", role: "assistant", content: [{ type: "output_text", text: "So." }] },
  ]);
  const calls = ["2", "3"].map((id) => ({ id, type: "function", function: { name: "s__f", arguments: '{"a":1}' } }));
  assert.deepEqual(asTurns(ITEMS), [
    { role: "assistant", content: "", reasoning_content: "Hm", tool_calls: calls },
    { role: "tool", tool_call_id: "2", content: "one" },
    { role: "tool", tool_call_id: "3", content: "Error: no file" },
    { role: "assistant", content: "So." },
  ]);
  const called: Message = { ...B, toolCalls: [{ id: "1", name: "f", arguments: "{}" }], content: "" };
  const result = newMessage({ parent: "b", role: "tool", content: "3", toolCallId: "1" });
  assert.deepEqual(inputOf([A, called, result, { ...B, items: ITEMS.slice(4) }], (message) => message.content), [
    { role: "user", content: "Hello there" },
    { type: "function_call", call_id: "1", name: "f", arguments: "{}" },
    { type: "function_call_output", call_id: "1", output: "3" },
    ...asInput(ITEMS.slice(4)),
  ]);
});

test("requests for approval wait for an answer", () => {
  const reply: Item = { type: "mcp_approval_response", id: "r", approval_request_id: "q", approve: true };
  assert.deepEqual(unanswered([ASKED]), [ASKED]);
  assert.deepEqual(unanswered([ASKED, reply]), []);
  assert.deepEqual(asInput([ASKED, reply]), [ASKED, reply]);
});

test("items of a file that cannot be shown are left out", () => {
  const bad = [null, { id: "x" }, { type: "message", id: "x", content: [3] }, { ...CALL, id: 3 }, { type: "mcp_call", id: "y" }];
  assert.deepEqual(parseItems([...bad, ...ITEMS]), ITEMS);
  assert.equal(parseItems("x"), undefined);
  assert.match(itemsAsMarkdown(ITEMS), /Calls `f` of s:\n\n```\n{"a":1}\n```\n\n```\none\n```/);
});

test("messages as the API takes them", () => {
  const asked: Message = { ...A, attachments: [{ name: "x.md", kind: "text", data: "a ```` b" }] };
  const called: Message = { ...B, toolCalls: [{ id: "1", name: "f", arguments: "{}" }], reasoning: "So" };
  const result = newMessage({ parent: "b", role: "tool", content: "3", toolCallId: "1" });
  assert.deepEqual(asRequest([asked, called, result], "Be brief."), [
    { role: "system", content: "Be brief." },
    { role: "user", content: "File x.md:\n`````\na ```` b\n`````\n\nHello there" },
    {
      role: "assistant",
      content: "First",
      reasoning_content: "So",
      tool_calls: [{ id: "1", type: "function", function: { name: "f", arguments: "{}" } }],
    },
    { role: "tool", tool_call_id: "1", content: "3" },
  ]);
});

test("an exported conversation comes back, and what is none is refused", () => {
  const tree = conversation(A, B, C, D);
  assert.deepEqual(parseConversation(JSON.parse(JSON.stringify(tree))).messages["d"].content, "More");
  assert.throws(() => parseConversation([]), /not a conversation/);
  assert.throws(() => parseConversation({ messages: { x: { id: "x", role: "root", content: "" } } }), /role/);
  const hostile = { ...A, attachments: [{ name: "x", kind: "image", data: "https://evil.example/x.png" }] };
  assert.deepEqual(parseConversation({ messages: { a: hostile } }).messages["a"].attachments, []);
});

test("events of a body, wherever it is cut", async () => {
  const text = 'data: {"a": "é👩"}\n\n: comment\n\nevent: x\r\ndata: 1\r\ndata: 2\r\n\r\ndata: [DONE]\n\n';
  const bytes = new TextEncoder().encode(text);
  for (let size = 1; size <= 20; size++) {
    const body = new ReadableStream<Uint8Array>({
      start(controller) {
        for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
        controller.close();
      },
    });
    const found: string[] = [];
    for await (const data of events(body)) found.push(data);
    assert.deepEqual(found, ['{"a": "é👩"}', "1\n2", "[DONE]"]);
  }
});

test("metrics and quantiles as Prometheus has them", () => {
  const metrics = parseMetrics(
    '# HELP x y\nx_total{a="1",b="say \\"so\\""} 3.0\nx_total{a="2"} 4\n' +
      'h_bucket{le="1.0"} 2\nh_bucket{le="2.0"} 6\nh_bucket{le="+Inf"} 8\n',
  );
  assert.equal(total(metrics, "x_total"), 7);
  assert.equal(metrics.get("x_total")![0].labels["b"], 'say "so"');
  const counts = buckets(metrics, "h");
  assert.equal(quantile(counts, new Map(), 0.5), 1.5);
  assert.equal(quantile(counts, new Map(), 0.125), 0.5);
  assert.equal(quantile(counts, new Map(), 0.99), 2);
  assert.equal(quantile(counts, counts, 0.5), undefined);
});

/** Answers that are being written: from the request to the messages of the conversation. */

import { ApiError, connection, stream } from "./api";
import { asRequest, newMessage, path, titleOf, type Conversation, type Message, type Stats } from "./conversation";
import { itemsAsMarkdown, unanswered } from "./items";
import { chosenTools, respond, responseBody } from "./respond";
import { parseJson, parseTools } from "./settings-json";
import { conversations, put, save } from "./store";
import { Value } from "./value";

interface Delta {
  content?: string | null;
  reasoning?: string | null;
  reasoning_content?: string | null;
  tool_calls?: { index: number; id?: string; function?: { name?: string; arguments?: string } }[];
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens?: number;
  prompt_tokens_details?: { cached_tokens?: number } | null;
}

interface Chunk {
  model?: string;
  choices: {
    index: number;
    delta: Delta;
    finish_reason: string | null;
    logprobs?: {
      content?: { token: string; logprob: number; top_logprobs?: { token: string; logprob: number }[] }[];
    } | null;
  }[];
  usage?: Usage | null;
}

/** What writes in this tab, by conversation. */
export const writing = new Value<ReadonlyMap<string, AbortController>>(new Map());
/** What a screen reader is told. */
export const announcement = new Value("");

const TOP_LOGPROBS = 5;
const SAVED_EVERY = 1000;
/** A message that nobody has written to for so long is not being written any more. */
export const ABANDONED_AFTER = 5000;

export function stop(conversation: string): void {
  writing.get().get(conversation)?.abort();
}

function mark(id: string, controller: AbortController | null): void {
  const map = new Map(writing.get());
  if (controller) map.set(id, controller);
  else map.delete(id);
  writing.set(map);
}

/** Whether the server calls tools for the next answer. */
function callsTools(conversation: Conversation, continued?: Message): boolean {
  return continued ? continued.items !== undefined : chosenTools(conversation.settings).length > 0;
}

/** The request for the answer to some messages. Raises Error for settings that cannot be sent. */
export function requestBody(conversation: Conversation, messages: Message[], continued?: Message): object {
  const { settings } = conversation;
  if (callsTools(conversation, continued)) return responseBody(conversation, continued ? [...messages, continued] : messages);
  const parameters = { ...settings.parameters };
  return {
    ...(settings.model ? { model: settings.model } : {}),
    messages: asRequest(continued ? [...messages, continued] : messages, settings.system),
    ...parameters,
    ...(settings.tools.trim() ? { tools: parseTools(settings.tools) } : {}),
    ...(settings.schema.trim() ? { response_format: responseFormat(settings.schema) } : {}),
    ...(settings.logprobs ? { logprobs: true, top_logprobs: TOP_LOGPROBS } : {}),
    ...(continued ? { add_generation_prompt: false, continue_final_message: true, n: 1 } : {}),
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
}

function responseFormat(text: string): object {
  const schema = parseJson(text, "JSON schema");
  return { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
}

/** Puts changed messages into the conversation as it is now. */
function change(id: string, messages: Message[], leaf?: string): void {
  const now = conversations.get().get(id);
  if (!now) return;
  const all = { ...now.messages };
  for (const message of messages) all[message.id] = message;
  put({ ...now, messages: all, updated: Date.now(), leaf: leaf ?? now.leaf });
}

/** Writes an answer below a message, several where n says so; or goes on with one that is there, be it cut or one whose
 * calls have been approved. */
export async function answer(id: string, parent: string, continued?: Message): Promise<void> {
  const conversation = conversations.get().get(id);
  if (!conversation || writing.get().has(id)) return;
  const controller = new AbortController();
  const before = path(conversation, parent);
  const tools = callsTools(conversation, continued);
  const wanted = continued || tools ? 1 : Math.max(1, Number(conversation.settings.parameters["n"]) || 1);
  const drafts: Message[] = continued
    ? [{ ...continued, state: "streaming", error: undefined, touched: Date.now() }]
    : Array.from({ length: wanted }, (_, index) =>
        newMessage({ role: "assistant", parent, state: "streaming", created: Date.now() + index }),
      );
  const [first] = drafts;
  mark(id, controller);
  change(id, drafts, first.id);
  void save(id);
  announcement.set("The model is answering.");
  const sent = performance.now();
  let begun = 0;
  let last = 0;
  let drawn = 0;
  const state: { finish: Message["state"]; error?: string } = { finish: "done" };
  const draw = () => {
    drawn = 0;
    const now = Date.now();
    for (const [index, draft] of drafts.entries()) drafts[index] = { ...draft, touched: now };
    change(id, drafts);
  };
  const noted = (wrote: boolean) => {
    if (wrote) {
      last = performance.now();
      begun ||= last;
    }
    const times: Stats = begun ? { firstToken: begun - sent, writing: last - begun } : {};
    for (const [index, draft] of drafts.entries()) drafts[index] = { ...draft, stats: { ...draft.stats, ...times } };
    drawn ||= requestAnimationFrame(draw);
  };
  // Also while the model is silent: other tabs see that somebody waits, and a reload loses nothing that was shown.
  const saving = setInterval(() => {
    draw();
    void save(id);
  }, SAVED_EVERY);
  try {
    const body = requestBody(conversation, before, continued);
    await (tools ? respond : chat)(drafts, body, controller.signal, noted);
  } catch (error) {
    if (controller.signal.aborted) state.finish = "stopped";
    else {
      state.finish = "failed";
      state.error = error instanceof Error ? error.message : String(error);
      if (error instanceof ApiError && error.status === 401) connection.set("key");
    }
  }
  clearInterval(saving);
  cancelAnimationFrame(drawn);
  const now = Date.now();
  change(
    id,
    drafts.map((draft) => ({ ...draft, state: state.finish, error: state.error ?? draft.error, touched: now })),
  );
  mark(id, null);
  const asks = unanswered(drafts[0].items ?? []).length > 0;
  announcement.set(
    { done: asks ? "The model asks to call a tool." : "The answer is complete.", stopped: "The answer was stopped.", failed: `Error: ${state.error}` }[
      state.finish as "done" | "stopped" | "failed"
    ],
  );
  await save(id);
}

/** Writes answers into drafts by the chat API, and tells of each piece whether it is one of the model's. */
async function chat(
  drafts: Message[],
  body: object,
  signal: AbortSignal,
  noted: (wrote: boolean) => void,
): Promise<void> {
  const base = drafts[0].stats?.completionTokens ?? 0;
  for await (const chunk of stream<Chunk>("v1/chat/completions", body, signal)) {
    let wrote = false;
    for (const choice of chunk.choices) {
      const draft = drafts[choice.index];
      if (!draft) continue;
      const { delta } = choice;
      take(draft, choice);
      draft.model = chunk.model ?? draft.model;
      wrote ||= !!(delta.content || delta.reasoning || delta.reasoning_content || delta.tool_calls);
      if (choice.finish_reason) draft.stats = { ...draft.stats, finish: choice.finish_reason };
    }
    if (chunk.usage) {
      const { usage } = chunk;
      const tokens: Stats = {
        promptTokens: usage.prompt_tokens - base,
        cachedTokens: usage.prompt_tokens_details?.cached_tokens,
        completionTokens: base + Math.round((usage.completion_tokens ?? 0) / drafts.length),
      };
      for (const draft of drafts) draft.stats = { ...draft.stats, ...tokens };
    }
    noted(wrote);
  }
}

function take(draft: Message, choice: Chunk["choices"][number]): void {
  const { delta, logprobs } = choice;
  if (delta.content) draft.content += delta.content;
  const thought = delta.reasoning ?? delta.reasoning_content;
  if (thought) draft.reasoning = (draft.reasoning ?? "") + thought;
  for (const part of delta.tool_calls ?? []) {
    const calls = [...(draft.toolCalls ?? [])];
    const call = calls[part.index] ?? { id: "", name: "", arguments: "" };
    calls[part.index] = {
      id: part.id ?? call.id,
      name: call.name + (part.function?.name ?? ""),
      arguments: call.arguments + (part.function?.arguments ?? ""),
    };
    draft.toolCalls = calls;
  }
  for (const entry of logprobs?.content ?? []) {
    const top = (entry.top_logprobs ?? []).map((one): [string, number] => [one.token, one.logprob]);
    (draft.tokens ??= []).push({ text: entry.token, logprob: entry.logprob, top });
  }
}

/** Tokens a second, from the first token on. */
export function speed(stats: Stats): number | undefined {
  const { completionTokens = 0, writing: time = 0 } = stats;
  return completionTokens > 1 && time > 0 ? ((completionTokens - 1) / time) * 1000 : undefined;
}

/** A conversation as Markdown, for people: the shown branch. */
export function asMarkdown(conversation: Conversation): string {
  const turns = path(conversation).map((message) => {
    const who = { user: "You", assistant: message.model ?? "Model", tool: "Tool" }[message.role];
    return `## ${who}\n\n${message.items ? itemsAsMarkdown(message.items) : message.content.trim()}\n`;
  });
  return `# ${titleOf(conversation)}\n\n${turns.join("\n")}`;
}

/** Answers in which the server has called tools: their items, in the form of the Responses API. No browser in it. */

import type { Message } from "./conversation";

export interface TextItem {
  type: "message" | "reasoning";
  id: string;
  content: { text: string }[];
}

export interface CallItem {
  type: "mcp_call" | "mcp_approval_request";
  id: string;
  server_label: string;
  name: string;
  arguments: string;
  status?: string;
  approval_request_id?: string | null;
  output?: string | null;
  error?: unknown;
}

/** A call of a function of the person's own. */
export interface FunctionItem {
  type: "function_call";
  id: string;
  call_id: string;
  name: string;
  arguments: string;
}

/** What a person has said to a request for approval. */
export interface ReplyItem {
  type: "mcp_approval_response";
  id: string;
  approval_request_id: string;
  approve: boolean;
}

export type Item = TextItem | CallItem | FunctionItem | ReplyItem;

export function textOf(item: TextItem): string {
  return item.content.map((part) => part.text).join("");
}

/** What all messages among items say. */
export function saidBy(items: Item[]): string {
  return items
    .filter((item): item is TextItem => item.type === "message")
    .map(textOf)
    .filter(Boolean)
    .join("\n\n");
}

/** Requests for approval that nobody has answered. */
export function unanswered(items: Item[]): CallItem[] {
  const answered = new Set(items.map((item) => (item.type === "mcp_approval_response" ? item.approval_request_id : "")));
  return items.filter((item): item is CallItem => item.type === "mcp_approval_request" && !answered.has(item.id));
}

/** What an error of a call says. */
export function errorText(error: unknown): string {
  const { message, content } = error as { message?: string; content?: { text?: string }[] };
  return content?.map((part) => part.text ?? "").join("\n") || message || String(error);
}

/** Items as Markdown, for people. */
export function itemsAsMarkdown(items: Item[]): string {
  const parts = items.map((item) => {
    if (item.type === "message") return textOf(item).trim();
    if (item.type !== "mcp_call") return "";
    const end = item.error == null ? (item.output ?? "") : errorText(item.error);
    return [`Calls \`${item.name}\` of ${item.server_label}:`, fenced(item.arguments), fenced(end)].join("\n\n");
  });
  return parts.filter(Boolean).join("\n\n");
}

/** A text in a fence that is longer than any in it. */
export function fenced(text: string): string {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map((match) => match[0].length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** Items of a file, those that can be shown. */
export function parseItems(value: unknown): Item[] | undefined {
  return Array.isArray(value) ? value.filter(isItem) : undefined;
}

function isItem(value: unknown): value is Item {
  const item = value as Record<string, unknown>;
  if (typeof item?.["id"] !== "string") return false;
  switch (item["type"]) {
    case "message":
    case "reasoning":
      return Array.isArray(item["content"]) && item["content"].every((part) => typeof part?.text === "string");
    case "mcp_call":
    case "mcp_approval_request":
    case "function_call":
      return typeof item["name"] === "string" && typeof item["arguments"] === "string";
    case "mcp_approval_response":
      return typeof item["approval_request_id"] === "string" && typeof item["approve"] === "boolean";
    default:
      return false;
  }
}

/** Items as the API takes them back. A call that was broken off has not been, so nothing is said of it. */
export function asInput(items: Item[]): object[] {
  return items.flatMap((item): object[] => {
    switch (item.type) {
      case "message":
        return textOf(item)
          ? [{ type: "message", id: item.id, role: "assistant", content: [{ type: "output_text", text: textOf(item) }] }]
          : [];
      case "reasoning":
        return textOf(item)
          ? [{ type: "reasoning", id: item.id, summary: [], content: [{ type: "reasoning_text", text: textOf(item) }] }]
          : [];
      case "mcp_call":
        return item.output == null && item.error == null ? [] : [item];
      default:
        return [item];
    }
  });
}

interface Turn {
  role: string;
  content: string;
  reasoning_content?: string;
  tool_calls?: object[];
  tool_call_id?: string;
}

/** Items as messages of a chat, for requests that call no tools of the server. */
export function asTurns(items: Item[]): Turn[] {
  const turns: Turn[] = [];
  let results: Turn[] = [];
  let open: Turn | undefined;
  const assistant = (): Turn => {
    if (!open) turns.push((open = { role: "assistant", content: "" }));
    return open;
  };
  const end = () => {
    turns.push(...results);
    if (results.length) open = undefined;
    results = [];
  };
  for (const item of items) {
    if (item.type === "message" || item.type === "reasoning") {
      end();
      if (item.type === "message") assistant().content += textOf(item);
      else assistant().reasoning_content = textOf(item);
    } else if (item.type === "function_call") {
      (assistant().tool_calls ??= []).push(called(item.call_id, item.name, item.arguments));
    } else if (item.type === "mcp_call" && (item.output != null || item.error != null)) {
      (assistant().tool_calls ??= []).push(called(item.id, `${item.server_label}__${item.name}`, item.arguments));
      const content = item.error == null ? item.output! : `Error: ${errorText(item.error)}`;
      results.push({ role: "tool", tool_call_id: item.id, content });
    }
  }
  end();
  return turns;
}

function called(id: string, name: string, args: string): object {
  return { id, type: "function", function: { name, arguments: args } };
}

type InputPart = { type: "text"; text: string } | { type: "image_url"; image_url: { url: string } };

/** The input that messages are; `userContent` makes what a person's message says. */
export function inputOf(messages: Message[], userContent: (message: Message) => string | InputPart[]): object[] {
  return messages.flatMap((message): object[] => {
    if (message.role === "tool") {
      return [{ type: "function_call_output", call_id: message.toolCallId, output: message.content }];
    }
    if (message.role === "user") {
      const content = userContent(message);
      return [{ role: "user", content: typeof content === "string" ? content : content.map(asInputPart) }];
    }
    if (message.items) return asInput(message.items);
    const thoughts = { type: "reasoning", summary: [], content: [{ type: "reasoning_text", text: message.reasoning }] };
    return [
      ...(message.reasoning ? [thoughts] : []),
      ...(message.content || !message.toolCalls?.length ? [{ role: "assistant", content: message.content }] : []),
      ...(message.toolCalls ?? []).map((call) => ({
        type: "function_call",
        call_id: call.id,
        name: call.name,
        arguments: call.arguments,
      })),
    ];
  });
}

function asInputPart(part: InputPart): object {
  return part.type === "text"
    ? { type: "input_text", text: part.text }
    : { type: "input_image", image_url: part.image_url.url };
}

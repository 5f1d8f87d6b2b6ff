/** A conversation is a tree: every edit and every other answer is a branch of its own. */

import { asTurns, fenced, parseItems, type Item } from "./items";

export interface Attachment {
  name: string;
  kind: "text" | "image";
  data: string; // the text, or a data: URL
}

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

export interface Token {
  text: string;
  logprob: number;
  top: [string, number][];
}

export interface Stats {
  promptTokens?: number;
  cachedTokens?: number;
  completionTokens?: number;
  firstToken?: number; // milliseconds from sending to the first token
  writing?: number; // milliseconds from the first token to the last
  finish?: string;
}

export interface Message {
  id: string;
  parent: string | null;
  role: "user" | "assistant" | "tool";
  content: string;
  reasoning?: string;
  attachments?: Attachment[];
  toolCalls?: ToolCall[];
  toolCallId?: string;
  toolName?: string;
  items?: Item[]; // of an answer in which the server has called tools; its text stands in content, too
  tokens?: Token[];
  stats?: Stats;
  model?: string;
  state: "done" | "streaming" | "stopped" | "failed";
  error?: string;
  created: number;
  touched: number; // when it was last written to: of two copies the later one holds
}

export interface Settings {
  model: string;
  system: string;
  parameters: Record<string, unknown>;
  logprobs: boolean;
  schema: string;
  tools: string;
  serverTools?: string[]; // of tool servers, those that are on: server/tool
  unasked?: boolean; // they are called without asking
}

export interface Conversation {
  id: string;
  title: string;
  created: number;
  updated: number;
  leaf: string | null;
  messages: Record<string, Message>;
  settings: Settings;
}

export const NO_SETTINGS: Settings = { model: "", system: "", parameters: {}, logprobs: false, schema: "", tools: "" };
const TITLE = 60;

export function newId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation(settings: Settings): Conversation {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, leaf: null, messages: {}, settings };
}

export function newMessage(parts: Partial<Message> & Pick<Message, "parent" | "role">): Message {
  const now = Date.now();
  return { id: newId(), content: "", state: "done", created: now, touched: now, ...parts };
}

/** The messages from the first one to the shown leaf. */
export function path(conversation: Conversation, leaf = conversation.leaf): Message[] {
  const found: Message[] = [];
  for (let id = leaf; id !== null; ) {
    const message: Message | undefined = conversation.messages[id];
    if (!message || found.includes(message)) break; // an imported file may hold anything
    found.push(message);
    id = message.parent;
  }
  return found.reverse();
}

/** The branches at a message, itself among them, in the order of their making. */
export function siblings(conversation: Conversation, message: Message): Message[] {
  return Object.values(conversation.messages)
    .filter((other) => other.parent === message.parent)
    .sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
}

/** The newest leaf below a message. */
export function leafBelow(conversation: Conversation, id: string): string {
  let leaf = id;
  for (;;) {
    const below = Object.values(conversation.messages).filter((message) => message.parent === leaf);
    if (!below.length) return leaf;
    leaf = below.reduce((a, b) => (b.created >= a.created ? b : a)).id;
  }
}

/** Two copies of a conversation as one: all messages of both, of each the one written to last. */
export function merged(a: Conversation, b: Conversation): Conversation {
  const [older, newer] = a.updated <= b.updated ? [a, b] : [b, a];
  const messages = { ...older.messages };
  for (const message of Object.values(newer.messages)) {
    const known = messages[message.id];
    if (!known || known.touched <= message.touched) messages[message.id] = message;
  }
  return { ...newer, messages };
}

/** A title for a conversation that nobody has named: the beginning of its first message. */
export function titleOf(conversation: Conversation): string {
  if (conversation.title) return conversation.title;
  const [first] = path(conversation);
  const text = (first?.content || first?.attachments?.[0]?.name || "").replace(/\s+/g, " ").trim();
  return text.length > TITLE ? `${text.slice(0, TITLE).trimEnd()}…` : text || "New chat";
}

/** Whether all words of a query stand in a conversation, in its title or its messages. */
export function matches(conversation: Conversation, query: string): boolean {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return true;
  const text = [titleOf(conversation), ...Object.values(conversation.messages).map((message) => message.content)]
    .join("\n")
    .toLowerCase();
  return words.every((word) => text.includes(word));
}

type Part = { type: "text"; text: string } | { type: "image_url"; image_url: { url: string } };

/** Messages as the API takes them. */
export function asRequest(messages: Message[], system: string): object[] {
  const turns: object[] = system.trim() ? [{ role: "system", content: system }] : [];
  for (const message of messages) {
    if (message.role === "tool") {
      turns.push({ role: "tool", tool_call_id: message.toolCallId, content: message.content });
    } else if (message.items) {
      turns.push(...asTurns(message.items));
    } else if (message.role === "assistant") {
      turns.push({
        role: "assistant",
        content: message.content,
        ...(message.reasoning ? { reasoning_content: message.reasoning } : {}),
        ...(message.toolCalls?.length
          ? {
              tool_calls: message.toolCalls.map((call) => ({
                id: call.id,
                type: "function",
                function: { name: call.name, arguments: call.arguments },
              })),
            }
          : {}),
      });
    } else {
      turns.push({ role: "user", content: userContent(message) });
    }
  }
  return turns;
}

/** What a person's message says, with its files. */
export function userContent(message: Message): string | Part[] {
  const files = (message.attachments ?? []).filter((attachment) => attachment.kind === "text");
  const images = (message.attachments ?? []).filter((attachment) => attachment.kind === "image");
  const texts = files.map((file) => `File ${file.name}:\n${fenced(file.data)}`);
  const text = [...texts, message.content].filter(Boolean).join("\n\n");
  if (!images.length) return text;
  return [
    ...images.map((image): Part => ({ type: "image_url", image_url: { url: image.data } })),
    ...(text ? [{ type: "text", text } as Part] : []),
  ];
}

/** A conversation of a file, checked: what is no conversation is an error, what is missing has its default. */
export function parseConversation(value: unknown): Conversation {
  const given = value as Partial<Conversation>;
  if (typeof given !== "object" || given === null || typeof given.messages !== "object" || given.messages === null) {
    throw new Error("the file holds something that is not a conversation");
  }
  const fresh = newConversation({ ...NO_SETTINGS });
  const messages: Record<string, Message> = {};
  for (const one of Object.values(given.messages) as Partial<Message>[]) {
    if (typeof one?.id !== "string" || !["user", "assistant", "tool"].includes(one.role ?? "")) {
      throw new Error("a message has no id, or a role that is not known");
    }
    if (typeof one.content !== "string") throw new Error(`message ${one.id}: its content is not a text`);
    const parent = typeof one.parent === "string" ? one.parent : null;
    messages[one.id] = { ...newMessage({ role: one.role!, parent }), ...one, parent, state: one.state ?? "done" };
  }
  for (const message of Object.values(messages)) {
    if (message.parent !== null && !messages[message.parent]) message.parent = null;
    message.items = parseItems(message.items);
    message.attachments = Array.isArray(message.attachments)
      ? message.attachments.filter((one) => typeof one.data === "string" && (one.kind === "text" || isImage(one.data)))
      : undefined;
  }
  const leaf = typeof given.leaf === "string" && messages[given.leaf] ? given.leaf : null;
  const last = Object.values(messages).sort((a, b) => a.created - b.created).at(-1);
  return {
    ...fresh,
    id: typeof given.id === "string" && /^[\w-]{1,64}$/.test(given.id) ? given.id : fresh.id,
    title: typeof given.title === "string" ? given.title : "",
    created: Number(given.created) || fresh.created,
    updated: Number(given.updated) || fresh.updated,
    settings: { ...NO_SETTINGS, ...(typeof given.settings === "object" ? given.settings : {}) },
    messages,
    leaf: leaf ?? last?.id ?? null,
  };
}

export function isImage(url: string): boolean {
  return /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]*$/.test(url);
}

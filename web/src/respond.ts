/** Answers by the Responses API, in which the server itself calls tools of its tool servers. */

import { ApiError, stream, toolServers } from "./api";
import { userContent, type Conversation, type Message, type Settings, type ToolCall } from "./conversation";
import { inputOf, saidBy, type Item } from "./items";
import { parseJson, parseTools } from "./settings-json";

interface ResponseEvent {
  type: string;
  output_index?: number;
  item?: Item | { type: "mcp_list_tools"; id: string };
  delta?: string;
  response?: {
    model: string;
    error: { message: string } | null;
    incomplete_details: { message?: string } | null;
    usage: { input_tokens: number; output_tokens: number; input_tokens_details: { cached_tokens: number } } | null;
  };
}

const LAST = new Set(["response.completed", "response.incomplete", "response.failed"]);
// Parameters of chats that are called otherwise here, or are not there for one answer of several rounds.
const RENAMED = new Set(["max_tokens", "n", "reasoning_effort", "truncate_prompt_tokens", "truncation_side", "stream_interval"]);

/** The server's tools that a conversation has switched on, by server, of those that there are. */
export function chosenTools(settings: Settings): [string, string[]][] {
  const chosen = new Set(settings.serverTools ?? []);
  return toolServers
    .get()
    .map((server): [string, string[]] => [
      server.server_label,
      server.tools.map((tool) => tool.name).filter((name) => chosen.has(`${server.server_label}/${name}`)),
    ])
    .filter(([, names]) => names.length > 0);
}

/** The request for an answer. Raises Error for settings that cannot be sent. */
export function responseBody(conversation: Conversation, messages: Message[]): object {
  const { settings } = conversation;
  const { max_tokens: longest, reasoning_effort: effort } = settings.parameters;
  const kept = Object.entries(settings.parameters).filter(([name]) => !RENAMED.has(name));
  const own = settings.tools.trim() ? parseTools(settings.tools) : [];
  return {
    ...(settings.model ? { model: settings.model } : {}),
    ...(settings.system.trim() ? { instructions: settings.system } : {}),
    input: inputOf(messages, userContent),
    ...Object.fromEntries(kept),
    ...(longest === undefined ? {} : { max_output_tokens: longest }),
    ...(effort === undefined ? {} : { reasoning: { effort } }),
    ...(settings.schema.trim()
      ? { text: { format: { type: "json_schema", name: "answer", schema: parseJson(settings.schema, "JSON schema"), strict: true } } }
      : {}),
    tools: [
      ...chosenTools(settings).map(([label, names]) => ({
        type: "mcp",
        server_label: label,
        allowed_tools: names,
        require_approval: settings.unasked ? "never" : "always",
      })),
      ...own.map((tool) => ({ type: "function", ...(tool as { function: object }).function })),
    ],
    store: false,
  };
}

/** Writes an answer into the one draft, after the items that it has, and tells of each piece whether it is one of the
 * model's. */
export async function respond(
  drafts: Message[],
  body: object,
  signal: AbortSignal,
  noted: (wrote: boolean) => void,
): Promise<void> {
  const { items: before = [], stats } = drafts[0];
  const output: (Item | undefined)[] = [];
  const ended = (event: ResponseEvent) => LAST.has(event.type);
  for await (const event of stream<ResponseEvent>("v1/responses", body, signal, ended)) {
    const at = event.output_index ?? 0;
    if (event.item) output[at] = event.item.type === "mcp_list_tools" ? undefined : event.item;
    else if (event.delta !== undefined) output[at] = grown(output[at], event.delta);
    const items = [...before, ...output.filter((item) => item !== undefined)];
    drafts[0] = { ...drafts[0], items, content: saidBy(items), toolCalls: ownCalls(items) };
    if (event.response) {
      // Of several rounds together nobody knows how full the context is.
      const several = output.some((item) => item?.type === "mcp_call");
      drafts[0] = { ...drafts[0], ...about(event, stats?.completionTokens ?? 0, several) };
    }
    noted(event.delta !== undefined);
    if (event.type === "response.failed") throw new ApiError(event.response?.error?.message ?? "The answer failed.", 500);
  }
}

function ownCalls(items: Item[]): ToolCall[] | undefined {
  const calls = items.filter((item) => item.type === "function_call");
  return calls.length ? calls.map((item) => ({ id: item.call_id, name: item.name, arguments: item.arguments })) : undefined;
}

/** An item with the next piece of it. */
function grown(item: Item | undefined, delta: string): Item | undefined {
  switch (item?.type) {
    case "message":
    case "reasoning":
      return { ...item, content: [{ ...item.content[0], text: (item.content[0]?.text ?? "") + delta }] };
    case "mcp_call":
    case "function_call":
      return { ...item, arguments: item.arguments + delta };
    default:
      return item;
  }
}

/** What an event of the whole response says of the message. */
function about(event: ResponseEvent, base: number, several: boolean): Partial<Message> {
  const { model, usage, incomplete_details: cut } = event.response!;
  if (!usage) return { model };
  return {
    model,
    stats: {
      ...(several ? {} : { promptTokens: usage.input_tokens, cachedTokens: usage.input_tokens_details.cached_tokens }),
      completionTokens: base + usage.output_tokens,
      finish: event.type === "response.incomplete" ? "length" : "stop",
    },
    ...(cut?.message ? { error: `The answer is not complete: ${cut.message}.` } : {}),
  };
}

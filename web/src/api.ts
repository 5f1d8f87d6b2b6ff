/** The server's API: addresses, the key, errors in its words. */

import { events } from "./sse";
import { Value } from "./value";

/** Requests go below the page's own address, so that a proxy may have the server under a prefix. */
const BASE = new URL(".", location.href);
const KEY = "llmjax.key";

export type Connection = "ok" | "away" | "key";

/** Whether the server answers, and whether it wants another key. */
export const connection = new Value<Connection>("ok");

/** An answer that is an error, or none at all. */
export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly code: string = "",
  ) {
    super(message);
  }
}

export function apiKey(): string {
  return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
}

/** Keeps a key for this tab, or for this browser. */
export function setApiKey(key: string, remember: boolean): void {
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
  if (key) (remember ? localStorage : sessionStorage).setItem(KEY, key);
}

export async function request(path: string, options: RequestInit = {}): Promise<Response> {
  const headers = new Headers(options.headers);
  if (apiKey()) headers.set("Authorization", `Bearer ${apiKey()}`);
  if (options.body) headers.set("Content-Type", "application/json");
  let response: Response;
  try {
    response = await fetch(new URL(path, BASE), { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    connection.set("away");
    throw new ApiError("The server does not answer.", 0, "away");
  }
  if (response.status === 401) connection.set("key");
  // What anybody may ask says nothing of the key.
  else if (connection.get() === "away" || path.startsWith("v1/")) connection.set("ok");
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response: Response): Promise<ApiError> {
  const text = await response.text().catch(() => "");
  try {
    const { error } = JSON.parse(text) as { error: { message: string; code?: string } };
    return new ApiError(error.message, response.status, error.code ?? "");
  } catch {
    return new ApiError(text.slice(0, 300) || `The server answered ${response.status}.`, response.status);
  }
}

export async function getJson<T>(path: string): Promise<T> {
  return (await (await request(path)).json()) as T;
}

export async function postJson<T>(path: string, body: unknown, signal?: AbortSignal): Promise<T> {
  const response = await request(path, { method: "POST", body: JSON.stringify(body), signal });
  return (await response.json()) as T;
}

/** The chunks of a streamed answer, whose last one `ends` knows, if not by a sign of its own. Raises ApiError for an
 * error, before the stream or in it. */
export async function* stream<T extends object>(
  path: string,
  body: object,
  signal: AbortSignal,
  ends: (chunk: T) => boolean = () => false,
): AsyncGenerator<T> {
  const response = await request(path, { method: "POST", body: JSON.stringify({ ...body, stream: true }), signal });
  let ended = false;
  try {
    for await (const data of events(response.body!)) {
      if (data === "[DONE]") {
        ended = true;
        return;
      }
      const chunk = JSON.parse(data) as T | { error: { message: string; code?: string } };
      if ("error" in chunk) throw new ApiError(chunk.error.message, 500, chunk.error.code ?? "");
      ended ||= ends(chunk);
      yield chunk;
    }
  } catch (error) {
    if (signal.aborted || error instanceof ApiError) throw error;
    connection.set("away");
  }
  if (!ended && !signal.aborted) throw new ApiError("The connection broke off.", 0, "away");
}

export interface ModelCard {
  id: string;
  root?: string;
  parent?: string | null;
  max_model_len?: number;
  input_modalities?: string[];
}

export interface ServerInfo {
  version: string;
  engine: { default_sampling_params?: Record<string, unknown>; device?: string; architecture?: string };
}

export interface ToolServer {
  server_label: string;
  tools: { name: string; description: string | null }[];
}

/** Models, tools that the server calls, and what the server says of itself; asked for at the start and when the server is back. */
export const models = new Value<ModelCard[]>([]);
export const toolServers = new Value<ToolServer[]>([]);
export const info = new Value<ServerInfo | null>(null);

export async function refresh(): Promise<void> {
  const list = await getJson<{ data: ModelCard[] }>("v1/models");
  models.set(list.data);
  toolServers.set((await getJson<{ data: ToolServer[] }>("v1/tool_servers")).data);
  info.set(await getJson<ServerInfo>("server_info").catch(() => null));
}

/** Asks until the server answers again. */
export function watch(): void {
  let asking: ReturnType<typeof setTimeout> | undefined;
  const ask = async () => {
    asking = undefined;
    await refresh().catch(() => undefined);
    if (connection.get() === "away") asking = setTimeout(() => void ask(), 1000);
  };
  connection.subscribe((state) => {
    if (state === "away" && asking === undefined) asking = setTimeout(() => void ask(), 500);
  });
}

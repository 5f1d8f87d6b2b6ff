/** Conversations in the browser's IndexedDB, the same in all tabs of this origin. */

import { merged, type Conversation } from "./conversation";
import { Value } from "./value";

const NAME = "llmjax";
const STORE = "conversations";

/** All conversations by id. The map is a new one after each change. */
export const conversations = new Value<ReadonlyMap<string, Conversation>>(new Map());
/** Why nothing is kept, if so. */
export const storeError = new Value("");

const channel = new BroadcastChannel("llmjax.conversations");
let opened: Promise<IDBDatabase> | undefined;

function result<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error ?? new Error("IndexedDB"));
  });
}

function open(): Promise<IDBDatabase> {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error ?? new Error("IndexedDB"));
  });
  return opened;
}

async function records(mode: IDBTransactionMode): Promise<IDBObjectStore> {
  return (await open()).transaction(STORE, mode).objectStore(STORE);
}

function show(change: (map: Map<string, Conversation>) => void): void {
  const map = new Map(conversations.get());
  change(map);
  conversations.set(map);
}

/** Reads what there is, and listens to other tabs. */
export async function load(): Promise<void> {
  channel.onmessage = (event: MessageEvent<string>) => void reread(event.data);
  try {
    const all = await result<Conversation[]>((await records("readonly")).getAll());
    show((map) => all.forEach((one) => map.set(one.id, one)));
  } catch (error) {
    storeError.set(`Conversations cannot be kept: ${String(error)}`);
  }
}

async function reread(id: string): Promise<void> {
  const found = await result<Conversation | undefined>((await records("readonly")).get(id));
  show((map) => {
    const known = map.get(id);
    if (!found) map.delete(id);
    // Another tab has its own leaf.
    else if (known) map.set(id, { ...merged(known, found), leaf: known.leaf, updated: found.updated });
    else map.set(id, found);
  });
}

/** Shows a conversation as it is now, without keeping it. */
export function put(conversation: Conversation): void {
  show((map) => map.set(conversation.id, conversation));
}

/** Keeps a conversation together with what other tabs have added to it, unless one of them has deleted it. */
export async function save(id: string, { fresh = false } = {}): Promise<void> {
  const conversation = conversations.get().get(id);
  if (!conversation) return;
  try {
    const store = await records("readwrite");
    const kept = await result<Conversation | undefined>(store.get(id));
    if (!kept && !fresh) {
      show((map) => map.delete(id));
      return;
    }
    const now = conversations.get().get(id) ?? conversation;
    const whole = kept ? { ...merged(kept, now), leaf: now.leaf, title: now.title, settings: now.settings } : now;
    await result(store.put(whole));
    show((map) => {
      const current = map.get(id);
      if (current) map.set(id, { ...current, messages: { ...whole.messages, ...current.messages } });
    });
    channel.postMessage(id);
    storeError.set("");
  } catch (error) {
    storeError.set(`This conversation cannot be kept: ${String(error)}`);
  }
}

export async function remove(ids: string[]): Promise<void> {
  const store = await records("readwrite");
  await Promise.all(ids.map((id) => result(store.delete(id))));
  show((map) => ids.forEach((id) => map.delete(id)));
  ids.forEach((id) => channel.postMessage(id));
}

/** Keeps conversations of a file. Those that are there already get what is new in it. */
export async function add(several: Conversation[]): Promise<void> {
  const store = await records("readwrite");
  const all = await Promise.all(
    several.map(async (one) => {
      const kept = await result<Conversation | undefined>(store.get(one.id));
      const whole = kept ? merged(kept, one) : one;
      await result(store.put(whole));
      return whole;
    }),
  );
  show((map) => all.forEach((one) => map.set(one.id, one)));
  all.forEach((one) => channel.postMessage(one.id));
}

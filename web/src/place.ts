/** Where a person is on the page, as the address has it after its #. */

import { Value } from "./value";

export type Place = { view: "chat"; id: string | null } | { view: "completion" } | { view: "engine" };

function read(): Place {
  const [, view, id] = location.hash.split("/");
  if (view === "completion" || view === "engine") return { view };
  return { view: "chat", id: id || null };
}

export const place = new Value<Place>(read());
addEventListener("hashchange", () => place.set(read()));

export function go(to: Place): void {
  location.hash = to.view === "chat" ? `#/chat/${to.id ?? ""}` : `#/${to.view}`;
  place.set(to);
}

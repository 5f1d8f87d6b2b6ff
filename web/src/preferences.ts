/** What a person has chosen for this browser. */

import { NO_SETTINGS, type Settings } from "./conversation";
import { Value } from "./value";

export type Theme = "auto" | "light" | "dark";

function kept<T>(name: string, fallback: T): Value<T> {
  const key = `llmjax.${name}`;
  let first = fallback;
  try {
    first = (JSON.parse(localStorage.getItem(key) ?? "null") as T | null) ?? fallback;
  } catch {
    localStorage.removeItem(key);
  }
  const value = new Value(first);
  value.subscribe((now) => localStorage.setItem(key, JSON.stringify(now)));
  return value;
}

export const theme = kept<Theme>("theme", "auto");
/** Settings of the next new conversation: those that were last chosen. */
export const lastSettings = kept<Settings>("settings", NO_SETTINGS);
export const settingsShown = kept<boolean>("settingsShown", false);

export function applyTheme(now: Theme): void {
  if (now === "auto") delete document.documentElement.dataset["theme"];
  else document.documentElement.dataset["theme"] = now;
}

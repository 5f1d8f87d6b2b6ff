/** Sampling parameters: what the settings show of each, and how text becomes its value. */

import table from "./parameters.json";
import { Value } from "./value";

export type Kind = "number" | "integer" | "boolean" | "text" | "texts" | "integers" | "json" | "choice";

export interface Parameter {
  name: string;
  label: string;
  group: string;
  kind: Kind;
  help: string;
  min?: number;
  max?: number;
  step?: number;
  neutral?: number; // where the slider stands until a value is chosen
  choices?: string[];
}

export const PARAMETERS = table as Parameter[];
export const GROUPS = [...new Set(PARAMETERS.map((parameter) => parameter.group))];
/** Parameters that completions, which are not chats, do not have. */
export const CHAT_ONLY = new Set(["reasoning_effort", "enable_thinking", "thinking_token_budget"]);

/** The value that a text stands for; undefined: none. Raises Error with what is wrong. */
export function parse(parameter: Parameter, text: string): unknown {
  const trimmed = text.trim();
  if (!trimmed) return undefined;
  switch (parameter.kind) {
    case "number":
    case "integer": {
      const number = Number(trimmed);
      if (!Number.isFinite(number) || (parameter.kind === "integer" && !Number.isInteger(number))) {
        throw new Error(parameter.kind === "integer" ? "must be a whole number" : "must be a number");
      }
      if (parameter.min !== undefined && number < parameter.min) throw new Error(`must be at least ${parameter.min}`);
      if (parameter.max !== undefined && number > parameter.max) throw new Error(`must be at most ${parameter.max}`);
      return number;
    }
    case "boolean":
      return trimmed === "true";
    case "texts":
      return text.split("\n").filter(Boolean);
    case "integers": {
      const numbers = trimmed.split(/[\s,]+/).map(Number);
      if (!numbers.every(Number.isInteger)) throw new Error("must be whole numbers");
      return numbers;
    }
    case "json": {
      const value: unknown = JSON.parse(trimmed);
      if (typeof value !== "object" || value === null || Array.isArray(value)) throw new Error("must be an object");
      return value;
    }
    default:
      return trimmed;
  }
}

/** The text by which the settings show a value. */
export function format(parameter: Parameter, value: unknown): string {
  if (value === undefined || value === null) return "";
  if (parameter.kind === "json") return JSON.stringify(value);
  if (parameter.kind === "texts") return (value as string[]).join("\n");
  if (parameter.kind === "integers") return (value as number[]).join(", ");
  return String(value);
}

export interface Preset {
  name: string;
  system?: string;
  parameters: Record<string, unknown>;
}

export const OWN_PRESETS: readonly Preset[] = [
  { name: "The model's own", parameters: {} },
  { name: "Precise", parameters: { temperature: 0 } },
  { name: "Balanced", parameters: { temperature: 0.7, top_p: 0.9 } },
  { name: "Creative", parameters: { temperature: 1.1, min_p: 0.05, presence_penalty: 0.3 } },
];

const PRESETS = "llmjax.presets";

export const presets = new Value<Preset[]>(readPresets());

function readPresets(): Preset[] {
  try {
    const found = JSON.parse(localStorage.getItem(PRESETS) ?? "[]") as Preset[];
    return Array.isArray(found) ? found.filter((one) => typeof one?.name === "string" && !!one.parameters) : [];
  } catch {
    return [];
  }
}

export function setPresets(several: Preset[]): void {
  localStorage.setItem(PRESETS, JSON.stringify(several));
  presets.set(several);
}

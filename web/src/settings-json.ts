/** Settings that are written as JSON. */

export function parseJson(text: string, what: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what}: ${error instanceof Error ? error.message : String(error)}`);
  }
}

export function parseTools(text: string): object[] {
  const value = parseJson(text, "Tools");
  const list = Array.isArray(value) ? value : [value];
  // A bare function is taken for what it is.
  return list.map((one: Record<string, unknown>) =>
    one && typeof one === "object" && "function" in one ? one : { type: "function", function: one },
  );
}

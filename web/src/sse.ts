/** Server-sent events, as streams of OpenAI's API have them. */

/** The data of each event of a body. Comments and other fields are passed over. */
export async function* events(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const decoder = new TextDecoder();
  const reader = body.getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      rest += decoder.decode(value, { stream: !done });
      const parts = rest.split(/\r?\n\r?\n/);
      rest = done ? "" : parts.pop()!;
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
      if (done) return;
    }
  } finally {
    void reader.cancel().catch(() => undefined); // leaving early ends the request
  }
}

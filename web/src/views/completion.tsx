/** Raw completions: a text that the model goes on with, and the tokens that it reads. */

import { useEffect, useRef, useState } from "preact/hooks";
import { models, postJson, stream } from "../api";
import type { Settings, Stats, Token } from "../conversation";
import { speed, type Usage } from "../generate";
import { parseJson } from "../settings-json";
import { CHAT_ONLY } from "../parameters";
import { useValue } from "../value";
import { Tokens, visible } from "./tokens";

interface Chunk {
  choices: {
    index: number;
    text: string;
    finish_reason: string | null;
    logprobs?: {
      tokens: string[];
      token_logprobs: (number | null)[];
      top_logprobs: (Record<string, number> | null)[] | null;
    } | null;
  }[];
  usage?: Usage | null;
}

interface Tokenized {
  count: number;
  max_model_len: number;
  tokens: number[];
  token_strs: string[] | null;
}

const KEPT = "llmjax.completion";
const TOKENIZED_AFTER = 300;
const MOST_SHOWN = 2000;

export function Completion({ settings }: { settings: Settings }) {
  const known = useValue(models);
  const [text, setText] = useState(() => sessionStorage.getItem(KEPT) ?? "");
  const [begin, setBegin] = useState(true);
  const [running, setRunning] = useState<AbortController | null>(null);
  const [problem, setProblem] = useState("");
  const [stats, setStats] = useState<Stats | null>(null);
  const [tokenized, setTokenized] = useState<Tokenized | null>(null);
  const [likely, setLikely] = useState<Token[]>([]);
  const box = useRef<HTMLTextAreaElement>(null);
  const before = useRef("");
  const model = known.find((one) => one.id === settings.model)?.id;

  useEffect(() => sessionStorage.setItem(KEPT, text), [text]);
  useEffect(() => {
    if (running) return;
    const controller = new AbortController();
    const later = setTimeout(() => {
      const body = { prompt: text, add_special_tokens: begin, return_token_strs: true, ...(model ? { model } : {}) };
      postJson<Tokenized>("tokenize", body, controller.signal).then(setTokenized, () => undefined);
    }, TOKENIZED_AFTER);
    return () => {
      clearTimeout(later);
      controller.abort();
    };
  }, [text, begin, running, model]);
  useEffect(() => () => running?.abort(), [running]);

  const run = async () => {
    const controller = new AbortController();
    before.current = text;
    setProblem("");
    setLikely([]);
    const sent = performance.now();
    let begun = 0;
    let written = text;
    let now: Stats = {};
    const seen: Token[] = [];
    try {
      const parameters = Object.fromEntries(
        Object.entries(settings.parameters).filter(([name]) => !CHAT_ONLY.has(name) && name !== "n"),
      );
      const body = {
        ...(model ? { model } : {}),
        max_tokens: 128,
        ...parameters,
        prompt: text,
        add_special_tokens: begin,
        ...(settings.schema.trim()
          ? { structured_outputs: { json: parseJson(settings.schema, "JSON schema") } }
          : {}),
        ...(settings.logprobs ? { logprobs: 5 } : {}),
        stream_options: { include_usage: true },
      };
      setRunning(controller);
      for await (const chunk of stream<Chunk>("v1/completions", body, controller.signal)) {
        for (const choice of chunk.choices) {
          begun ||= performance.now();
          written += choice.text;
          now = { ...now, firstToken: begun - sent, writing: performance.now() - begun, finish: choice.finish_reason ?? undefined };
          choice.logprobs?.tokens.forEach((token, index) => {
            const top = Object.entries(choice.logprobs!.top_logprobs?.[index] ?? {});
            seen.push({ text: token, logprob: choice.logprobs!.token_logprobs[index] ?? 0, top });
          });
        }
        if (chunk.usage) {
          now = { ...now, promptTokens: chunk.usage.prompt_tokens, completionTokens: chunk.usage.completion_tokens };
        }
        setText(written);
        setStats(now);
      }
    } catch (error) {
      if (!controller.signal.aborted) setProblem(error instanceof Error ? error.message : String(error));
    }
    setLikely(seen);
    setRunning(null);
    box.current?.focus();
  };

  const rate = stats ? speed(stats) : undefined;
  return (
    <div class="completion">
      <h1>Completion</h1>
      <p class="quiet">
        The model goes on with this text as it stands: no chat template, no roles. The longest answer is 128 tokens unless
        the settings say otherwise.
      </p>
      <label class="field">
        <span>Text</span>
        <textarea
          ref={box}
          class="code-box"
          rows={12}
          spellcheck={false}
          readOnly={running !== null}
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && text && !running) void run();
          }}
        />
      </label>
      <div class="buttons">
        {running ? (
          <button type="button" class="primary" onClick={() => running.abort()}>
            Stop
          </button>
        ) : (
          <button type="button" class="primary" disabled={!text} onClick={() => void run()}>
            Go on
          </button>
        )}
        <button type="button" disabled={running !== null || !before.current} onClick={() => setText(before.current)}>
          Take it back
        </button>
        <label class="check">
          <input type="checkbox" checked={begin} onChange={(event) => setBegin(event.currentTarget.checked)} />
          <span>Put the token that begins texts in front</span>
        </label>
      </div>
      {problem && (
        <p class="problem" role="alert">
          {problem}
        </p>
      )}
      {stats && (
        <p class="stats">
          {stats.completionTokens !== undefined && `${stats.completionTokens} tokens`}
          {rate !== undefined && ` · ${rate.toFixed(1)} tokens/s`}
          {stats.firstToken !== undefined && ` · first after ${Math.round(stats.firstToken)} ms`}
          {stats.finish === "length" && " · cut at its longest length"}
        </p>
      )}
      {likely.length > 0 && (
        <section aria-label="Probabilities">
          <h2>Probabilities</h2>
          <Tokens tokens={likely} />
        </section>
      )}
      {tokenized && (
        <section aria-label="Tokens">
          <h2>
            Tokens <span class="count">{tokenized.count.toLocaleString()}</span>
          </h2>
          <ol class="token-list">
            {tokenized.tokens.slice(0, MOST_SHOWN).map((id, index) => (
              <li key={index}>
                <span>{shown(tokenized.token_strs?.[index] ?? "")}</span>
                <small>{id}</small>
              </li>
            ))}
          </ol>
          {tokenized.count > MOST_SHOWN && <p class="quiet">The first {MOST_SHOWN.toLocaleString()} are shown.</p>}
        </section>
      )}
    </div>
  );
}

/** A token as vocabularies spell it, with the usual stand-ins for spaces and line ends read back. */
function shown(text: string): string {
  return visible(text.replace(/[Ġ▁]/g, " ").replace(/Ċ/g, "\n").replace(/ĉ/g, "\t"));
}

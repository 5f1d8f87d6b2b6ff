/** One message with what can be done to it. */

import { memo } from "preact/compat";
import { useEffect, useRef, useState } from "preact/hooks";
import type { Message, Stats, ToolCall } from "../conversation";
import { ABANDONED_AFTER, speed } from "../generate";
import { Icon, IconButton } from "../icons";
import { copy } from "../markdown";
import { MarkdownText } from "./markdown-text";
import { Items, pretty, Thoughts } from "./items";
import { Tokens } from "./tokens";

export interface Actions {
  edit: (message: Message, content: string) => void;
  regenerate: (message: Message) => void;
  goOn: (message: Message) => void;
  show: (message: Message) => void;
  reply: (message: Message, request: string, approve: boolean) => void;
}

interface Props {
  message: Message;
  branch: number; // its place among its branches, from 0
  branches: Message[];
  busy: boolean; // an answer is being written in this tab
  last: boolean;
  actions: Actions;
  editing: boolean;
  onEditing: (id: string | null) => void;
}

export const MessageView = memo(
  function MessageView(props: Props) {
    const { message, busy, last, actions } = props;
    const [probabilities, setProbabilities] = useState(false);
    const [copied, setCopied] = useState(false);
    const [, redraw] = useState({});
    const rest = message.touched + ABANDONED_AFTER - Date.now();
    const abandoned = message.state === "streaming" && !busy && rest < 0;
    useEffect(() => {
      // Another tab may be writing it, until it has been silent for too long.
      if (message.state !== "streaming" || busy || rest < 0) return;
      const timer = setTimeout(() => redraw({}), rest + 1);
      return () => clearTimeout(timer);
    }, [message, busy]);
    const live = message.state === "streaming" && !abandoned;
    const name = { user: "You", assistant: message.model || "Model", tool: message.toolName || "Tool" }[message.role];
    if (props.editing) return <Editor {...props} name={name} />;
    return (
      <article class={`message ${message.role}`} aria-label={name} aria-busy={live}>
        {message.role !== "user" && (
          <div class="who">
            {message.role === "tool" ? <Icon name="tool" /> : null} {name}
          </div>
        )}
        <div class="body">
          <Attachments message={message} />
          {message.items ? (
            <Items
              items={message.items}
              live={live}
              onReply={last && !busy ? (request, approve) => actions.reply(message, request, approve) : undefined}
            />
          ) : (
            <Said message={message} live={live} probabilities={probabilities} />
          )}
          {message.toolCalls?.map((call) => <Call key={call.id} call={call} />)}
          {live && !message.content && !message.reasoning && !message.toolCalls && !message.items?.length && (
            <p class="waiting" aria-label="waiting for the first token">
              <span />
              <span />
              <span />
            </p>
          )}
        </div>
        {message.error && (
          <p class="problem" role="alert">
            {message.error}
          </p>
        )}
        {abandoned && <p class="problem">This answer was interrupted.</p>}
        <div class="tools">
          {props.branches.length > 1 && (
            <span class="branches">
              <IconButton
                name="left"
                label="Previous branch"
                disabled={props.branch === 0}
                onClick={() => actions.show(props.branches[props.branch - 1])}
              />
              <span aria-label={`Branch ${props.branch + 1} of ${props.branches.length}`} role="img">
                {props.branch + 1} / {props.branches.length}
              </span>
              <IconButton
                name="right"
                label="Next branch"
                disabled={props.branch === props.branches.length - 1}
                onClick={() => actions.show(props.branches[props.branch + 1])}
              />
            </span>
          )}
          <IconButton
            name={copied ? "check" : "copy"}
            label={copied ? "Copied" : "Copy"}
            onClick={() =>
              void copy(message.content).then((done) => {
                setCopied(done);
                setTimeout(() => setCopied(false), 1500);
              })
            }
          />
          {message.role !== "tool" && (
            <IconButton name="edit" label="Edit" disabled={busy} onClick={() => props.onEditing(message.id)} />
          )}
          {message.role === "assistant" && (
            <>
              <IconButton name="redo" label="Another answer" disabled={busy} onClick={() => actions.regenerate(message)} />
              {last && message.content && !message.toolCalls && !message.items && (
                <IconButton name="play" label="Continue" disabled={busy} onClick={() => actions.goOn(message)} />
              )}
              {message.tokens && (
                <button
                  type="button"
                  class="chip"
                  aria-pressed={probabilities}
                  onClick={() => setProbabilities(!probabilities)}
                >
                  Probabilities
                </button>
              )}
              {message.stats && <StatsLine stats={message.stats} state={abandoned ? "stopped" : message.state} />}
            </>
          )}
        </div>
      </article>
    );
  },
  (a, b) =>
    a.message === b.message &&
    a.busy === b.busy &&
    a.last === b.last &&
    a.editing === b.editing &&
    a.branch === b.branch &&
    a.branches.length === b.branches.length,
);

/** What a message says. */
function Said({ message, live, probabilities }: { message: Message; live: boolean; probabilities: boolean }) {
  if (message.role !== "assistant") return message.content ? <p class="plain">{message.content}</p> : null;
  return (
    <>
      {message.reasoning && <Thoughts text={message.reasoning} live={live && !message.content} />}
      {probabilities && message.tokens ? (
        <Tokens tokens={message.tokens} />
      ) : (
        <MarkdownText text={message.content} live={live} />
      )}
    </>
  );
}

function Attachments({ message }: { message: Message }) {
  if (!message.attachments?.length) return null;
  return (
    <ul class="attachments" aria-label="Attachments">
      {message.attachments.map((one, index) => (
        <li key={index}>
          {one.kind === "image" ? (
            <img src={one.data} alt={one.name} />
          ) : (
            <details>
              <summary>
                {one.name} <span class="quiet">{one.data.length.toLocaleString()} characters</span>
              </summary>
              <pre tabIndex={0}>{one.data}</pre>
            </details>
          )}
        </li>
      ))}
    </ul>
  );
}

function Call({ call }: { call: ToolCall }) {
  return (
    <div class="call">
      <div class="call-name">
        <Icon name="tool" /> Calls <code>{call.name}</code>
      </div>
      <pre tabIndex={0}>{pretty(call.arguments)}</pre>
    </div>
  );
}

const ENDS: Record<string, string> = {
  length: "cut at its longest length",
  tool_calls: "waits for a result",
  repetition: "ended because it repeated itself",
  content_filter: "filtered",
};

function StatsLine({ stats, state }: { stats: Stats; state: Message["state"] }) {
  const rate = speed(stats);
  const parts = [
    stats.completionTokens !== undefined && `${stats.completionTokens.toLocaleString()} tokens`,
    rate !== undefined && `${rate >= 100 ? Math.round(rate).toLocaleString() : rate.toFixed(1)} tokens/s`,
    stats.firstToken !== undefined &&
      `first after ${stats.firstToken < 1000 ? `${Math.round(stats.firstToken)} ms` : `${(stats.firstToken / 1000).toFixed(1)} s`}`,
    stats.cachedTokens ? `${stats.cachedTokens.toLocaleString()} of ${stats.promptTokens!.toLocaleString()} cached` : "",
    state === "stopped" ? "stopped" : ENDS[stats.finish ?? ""],
  ];
  return <span class="stats">{parts.filter(Boolean).join(" · ")}</span>;
}

function Editor(props: Props & { name: string }) {
  const { message } = props;
  const [text, setText] = useState(message.content);
  const box = useRef<HTMLTextAreaElement>(null);
  useEffect(() => {
    box.current?.focus();
    box.current?.setSelectionRange(text.length, text.length);
  }, []);
  const done = () => {
    props.onEditing(null);
    props.actions.edit(message, text);
  };
  return (
    <article class={`message ${message.role} editing`} aria-label={props.name}>
      <textarea
        ref={box}
        aria-label="Edited message"
        rows={Math.min(20, Math.max(3, text.split("\n").length + 1))}
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key === "Escape") props.onEditing(null);
          if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) done();
        }}
      />
      <div class="tools shown">
        <button type="button" onClick={() => props.onEditing(null)}>
          Cancel
        </button>
        <button type="button" class="primary" disabled={!text.trim()} onClick={done}>
          {message.role === "user" ? "Send" : "Save as a branch"}
        </button>
      </div>
    </article>
  );
}

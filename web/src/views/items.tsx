/** An answer in which the server has called tools: what the model has thought, said and called, in its order. */

import { Icon } from "../icons";
import { errorText, textOf, unanswered, type CallItem, type Item } from "../items";
import { MarkdownText } from "./markdown-text";

interface Props {
  items: Item[];
  live: boolean;
  onReply?: (request: string, approve: boolean) => void; // undefined: nobody can be answered now
}

export function Items({ items, live, onReply }: Props) {
  const open = new Set(unanswered(items).map((item) => item.id));
  const made = new Set(items.map((item) => (item.type === "mcp_call" ? item.approval_request_id : null)));
  return (
    <>
      {items.map((item, index) => {
        const last = live && index === items.length - 1;
        switch (item.type) {
          case "message":
            return <MarkdownText key={item.id} text={textOf(item)} live={last} />;
          case "reasoning":
            return textOf(item) && <Thoughts key={item.id} text={textOf(item)} live={last} />;
          case "mcp_call":
            return <Made key={item.id} call={item} live={live} />;
          case "mcp_approval_request":
            if (open.has(item.id)) return <Asked key={item.id} call={item} onReply={onReply} />;
            return !made.has(item.id) && <Answered key={item.id} call={item} items={items} />;
          default:
            return null; // calls of functions of one's own stand below the answer
        }
      })}
    </>
  );
}

export function Thoughts({ text, live }: { text: string; live: boolean }) {
  return (
    <details class="reasoning" open={live}>
      <summary>{live ? "Thinking …" : "Thoughts"}</summary>
      <MarkdownText text={text} live={live} />
    </details>
  );
}

/** Arguments as they are read best. */
export function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still being written, or cut
  }
}

/** A call that has been made, or is being made. */
function Made({ call, live }: { call: CallItem; live: boolean }) {
  const failed = call.error != null;
  const done = failed || call.output != null;
  const state = failed ? "failed" : done ? "done" : live ? "running …" : "broken off";
  return (
    <details class="call">
      <summary class="call-name">
        <Icon name="tool" />
        <span>
          Calls <code>{call.name}</code> <span class="quiet">of {call.server_label} · {state}</span>
        </span>
      </summary>
      <Part title="Arguments" text={pretty(call.arguments)} />
      {done && <Part title={failed ? "Error" : "Result"} text={failed ? errorText(call.error) : call.output!} />}
    </details>
  );
}

function Part({ title, text }: { title: string; text: string }) {
  return (
    <>
      <p class="call-part">{title}</p>
      <pre tabIndex={0} aria-label={title} role="region">
        {text}
      </pre>
    </>
  );
}

/** A call that waits for a person's word. */
function Asked({ call, onReply }: { call: CallItem; onReply: Props["onReply"] }) {
  return (
    <div class="call" role="group" aria-label={`The model wants to call ${call.name}`}>
      <div class="call-name">
        <Icon name="tool" />
        <span>
          Wants to call <code>{call.name}</code> <span class="quiet">of {call.server_label}</span>
        </span>
      </div>
      <pre tabIndex={0}>{pretty(call.arguments)}</pre>
      {onReply && (
        <div class="call-reply">
          <button type="button" onClick={() => onReply(call.id, false)}>
            Deny
          </button>
          <button type="button" class="primary" onClick={() => onReply(call.id, true)}>
            Allow
          </button>
        </div>
      )}
    </div>
  );
}

/** A call that has an answer, and was not made. */
function Answered({ call, items }: { call: CallItem; items: Item[] }) {
  const reply = items.find((item) => item.type === "mcp_approval_response" && item.approval_request_id === call.id);
  const allowed = reply?.type === "mcp_approval_response" && reply.approve;
  return (
    <details class="call">
      <summary class="call-name">
        <Icon name="tool" />
        <span>
          {allowed ? "Allowed" : "Denied"}: <code>{call.name}</code> <span class="quiet">of {call.server_label}</span>
        </span>
      </summary>
      <Part title="Arguments" text={pretty(call.arguments)} />
    </details>
  );
}

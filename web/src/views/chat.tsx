/** A conversation: its messages, the box to write in, and how full the context is. */

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { models } from "../api";
import {
  leafBelow,
  newConversation,
  newId,
  newMessage,
  path,
  siblings,
  titleOf,
  type Attachment,
  type Conversation,
  type Message,
  type Settings,
} from "../conversation";
import { answer, requestBody, stop, writing } from "../generate";
import { unanswered, type Item } from "../items";
import { go } from "../place";
import { conversations, put, save } from "../store";
import { useValue } from "../value";
import { Composer } from "./composer";
import { MessageView, type Actions } from "./message";

const NEAR_END = 80; // pixels from the end, within which the page follows an answer

export function Chat({ conversation, settings }: { conversation?: Conversation; settings: Settings }) {
  const busy = useValue(writing);
  const known = useValue(models);
  const [editing, setEditing] = useState<string | null>(null);
  const [problem, setProblem] = useState("");
  const scroller = useRef<HTMLDivElement>(null);
  const following = useRef(true);
  const messages = conversation ? path(conversation) : [];
  const active = conversation !== undefined && busy.has(conversation.id);
  const card = known.find((one) => one.id === settings.model) ?? known[0];

  const follow = () => {
    const element = scroller.current;
    if (element && following.current) element.scrollTop = element.scrollHeight;
  };
  useLayoutEffect(follow);
  useEffect(() => {
    // What is drawn later changes heights too: formulas, colors, pictures.
    const observer = new ResizeObserver(follow);
    const element = scroller.current;
    if (element) for (const one of [element, element.firstElementChild!]) observer.observe(one);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    following.current = true;
    setEditing(null);
    setProblem("");
    follow();
  }, [conversation?.id]);

  /** Adds messages after one, and has the last of them answered. */
  const extend = (at: Conversation, parent: string | null, several: Message[], fresh: boolean) => {
    let before = parent;
    const all = { ...at.messages };
    for (const message of several) {
      all[message.id] = { ...message, parent: before };
      before = message.id;
    }
    const next = { ...at, messages: all, leaf: before, updated: Date.now() };
    try {
      requestBody(next, []); // settings that cannot be sent are told before anything is
    } catch (error) {
      setProblem(error instanceof Error ? error.message : String(error));
      return;
    }
    setProblem("");
    following.current = true;
    put(next);
    void save(next.id, { fresh }).then(() => answer(next.id, before!));
    if (fresh) go({ view: "chat", id: next.id });
  };

  const send = (text: string, attachments: Attachment[]) => {
    const at = conversation ?? newConversation(settings);
    const message = newMessage({
      parent: at.leaf,
      role: "user",
      content: text,
      ...(attachments.length ? { attachments } : {}),
    });
    extend(at, at.leaf, [message], conversation === undefined);
  };

  const actions: Actions = useMemo(() => {
    const now = () => conversations.get().get(conversation!.id)!;
    const leaf = (id: string) => {
      put({ ...now(), leaf: id });
      void save(conversation!.id);
    };
    return {
      edit: (message, content) => {
        const { parent, role, attachments } = message;
        const fresh = newMessage({ parent, role, content, ...(attachments ? { attachments } : {}) });
        if (message.role === "user") extend(now(), message.parent, [fresh], false);
        else {
          put({ ...now(), messages: { ...now().messages, [fresh.id]: { ...fresh, model: message.model } }, leaf: fresh.id });
          void save(conversation!.id);
        }
      },
      regenerate: (message) => {
        if (message.parent === null) return;
        following.current = true;
        void answer(conversation!.id, message.parent);
      },
      goOn: (message) => {
        following.current = true;
        void answer(conversation!.id, message.parent!, message);
      },
      reply: (message, request, approve) => {
        const said: Item = { type: "mcp_approval_response", id: `mcprr_${newId()}`, approval_request_id: request, approve };
        const replied = { ...message, items: [...(message.items ?? []), said], touched: Date.now() };
        put({ ...now(), messages: { ...now().messages, [message.id]: replied } });
        following.current = true;
        if (unanswered(replied.items).length) void save(conversation!.id);
        else void answer(conversation!.id, message.parent!, replied);
      },
      show: (message) => leaf(leafBelow(now(), message.id)),
    };
  }, [conversation?.id, settings]);

  const title = conversation ? titleOf(conversation) : "";
  useEffect(() => {
    document.title = title ? `${title} – llmjax` : "llmjax";
  }, [title]);

  const lastUser = messages.filter((message) => message.role === "user").at(-1);
  const last = messages.at(-1);
  const calls = last?.role === "assistant" && last.state === "done" ? last.toolCalls : undefined;

  return (
    <>
      <div
        class="messages"
        ref={scroller}
        tabIndex={0}
        role="region"
        aria-label="Messages"
        onScroll={(event) => {
          const { scrollTop, scrollHeight, clientHeight } = event.currentTarget;
          following.current = scrollHeight - scrollTop - clientHeight < NEAR_END;
        }}
      >
        <div class="thread">
          {conversation && messages.length > 0 && <h1 class="hidden">{titleOf(conversation)}</h1>}
        {messages.length === 0 && (
          <div class="welcome">
            <img src="web/icon.svg" alt="" width="56" height="56" />
            <h1>What is on your mind?</h1>
            <p class="quiet">
              {card ? `${card.id} answers from this server; conversations stay in this browser.` : "Waiting for the server …"}
            </p>
          </div>
        )}
        {messages.map((message) => {
          const branches = siblings(conversation!, message);
          return (
            <MessageView
              key={message.id}
              message={message}
              branches={branches}
              branch={branches.indexOf(conversation!.messages[message.id])}
              busy={active}
              last={message === last}
              actions={actions}
              editing={editing === message.id}
              onEditing={setEditing}
            />
          );
        })}
        {calls && !active && (
          <Results
            key={last!.id}
            message={last!}
            onSend={(several) => extend(conversation!, last!.id, several, false)}
          />
        )}
        </div>
      </div>
      <div class="bottom">
        {problem && (
          <p class="problem" role="alert">
            {problem}
          </p>
        )}
        <Composer
          key={conversation?.id ?? "new"}
          id={conversation?.id ?? "new"}
          busy={active}
          sees={card?.input_modalities?.includes("image") ?? false}
          onSend={send}
          onStop={() => conversation && stop(conversation.id)}
          onEditLast={() => lastUser && !active && setEditing(lastUser.id)}
        />
        <Context messages={messages} size={card?.max_model_len} />
      </div>
    </>
  );
}

/** How much of the context the last answer has taken. */
function Context({ messages, size }: { messages: Message[]; size?: number }) {
  const stats = messages.filter((message) => message.stats?.promptTokens !== undefined).at(-1)?.stats;
  if (!stats || !size) return <p class="context" />;
  const used = stats.promptTokens! + (stats.completionTokens ?? 0);
  return (
    <p class="context">
      <label>
        Context: {used.toLocaleString()} of {size.toLocaleString()} tokens
        <meter min={0} max={size} low={0.7 * size} high={0.9 * size} optimum={0} value={used} />
      </label>
    </p>
  );
}

/** Boxes for what the called tools have answered. */
function Results({ message, onSend }: { message: Message; onSend: (several: Message[]) => void }) {
  const calls = message.toolCalls ?? [];
  const [texts, setTexts] = useState<string[]>(() => calls.map(() => ""));
  return (
    <form
      class="results"
      aria-label="Results of tools"
      onSubmit={(event) => {
        event.preventDefault();
        onSend(
          calls.map((call, index) =>
            newMessage({
              parent: null,
              role: "tool",
              content: texts[index],
              toolCallId: call.id,
              toolName: call.name,
              created: Date.now() + index,
            }),
          ),
        );
      }}
    >
      {calls.map((call, index) => (
        <label class="field" key={call.id}>
          <span>Result of {call.name}</span>
          <textarea
            rows={2}
            value={texts[index]}
            onInput={(event) => setTexts(texts.map((text, i) => (i === index ? event.currentTarget.value : text)))}
          />
        </label>
      ))}
      <button type="submit" class="primary">
        Send results
      </button>
    </form>
  );
}

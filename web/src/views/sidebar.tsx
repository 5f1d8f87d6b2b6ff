/** The conversations: search, rename, delete, export, import; and what concerns the whole page. */

import { useRef, useState } from "preact/hooks";
import { info } from "../api";
import { matches, parseConversation, titleOf, type Conversation } from "../conversation";
import { Dialog } from "../dialog";
import { asMarkdown, writing } from "../generate";
import { Icon, IconButton } from "../icons";
import { go, place } from "../place";
import { theme, type Theme } from "../preferences";
import { add, conversations, put, remove, save } from "../store";
import { useValue } from "../value";

const NEXT: Record<Theme, Theme> = { auto: "light", light: "dark", dark: "auto" };
const DAY = 24 * 3600 * 1000;

/** The heading under which a conversation stands. */
function age(time: number): string {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  if (time >= midnight - 7 * DAY) return "This week";
  return new Date(time).toLocaleDateString(undefined, { month: "long", year: "numeric" });
}

function download(name: string, kind: string, text: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: kind }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function fileName(title: string): string {
  return title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 50) || "conversation";
}

export function Sidebar(props: { onHelp: () => void; onKey: () => void; onClose: () => void }) {
  const all = useValue(conversations);
  const here = useValue(place);
  const busy = useValue(writing);
  const look = useValue(theme);
  const server = useValue(info);
  const [query, setQuery] = useState("");
  const [open, setOpen] = useState<Conversation | null>(null);
  const [notice, setNotice] = useState("");
  const files = useRef<HTMLInputElement>(null);
  const found = [...all.values()].filter((one) => matches(one, query)).sort((a, b) => b.updated - a.updated);
  const current = here.view === "chat" ? here.id : null;

  const importFiles = async (list: FileList) => {
    try {
      const several: Conversation[] = [];
      for (const file of list) {
        const value = JSON.parse(await file.text()) as { conversations?: unknown[] };
        several.push(...(value.conversations ?? [value]).map(parseConversation));
      }
      await add(several);
      setNotice(several.length === 1 ? "1 conversation imported." : `${several.length} conversations imported.`);
    } catch (error) {
      setNotice(`Not imported: ${error instanceof Error ? error.message : String(error)}`);
    }
  };
  const exportAll = () =>
    download("conversations.json", "application/json", JSON.stringify({ conversations: [...all.values()] }, null, 1));

  let heading = "";
  return (
    <nav class="sidebar" aria-label="Conversations">
      <header>
        <img src="web/icon.svg" alt="" width="26" height="26" />
        <strong>llmjax</strong>
        <IconButton name="close" label="Close the list" class="menu" onClick={props.onClose} />
      </header>
      <button type="button" class="new" onClick={() => go({ view: "chat", id: null })}>
        <Icon name="plus" />
        New chat
      </button>
      <div class="search">
        <Icon name="search" />
        <input
          id="search"
          type="search"
          placeholder="Search"
          aria-label="Search conversations"
          value={query}
          onInput={(event) => setQuery(event.currentTarget.value)}
        />
      </div>
      <div class="list">
        {found.map((one) => {
          const under = age(one.updated);
          const first = under !== heading;
          heading = under;
          return [
            first && <h2 key={under}>{under}</h2>,
            <div key={one.id} class={`row ${one.id === current ? "current" : ""}`}>
              <a href={`#/chat/${one.id}`} aria-current={one.id === current ? "page" : undefined}>
                {busy.has(one.id) && <span class="dot" role="img" aria-label="being answered" />}
                {titleOf(one)}
              </a>
              <IconButton name="edit" label={`Options of ${titleOf(one)}`} onClick={() => setOpen(one)} />
            </div>,
          ];
        })}
        {!found.length && <p class="quiet">{query ? "Nothing found." : "Conversations stand here once you have some."}</p>}
      </div>
      {notice && (
        <p class="quiet notice" role="status">
          {notice}
        </p>
      )}
      <footer>
        <IconButton
          name={look === "dark" ? "moon" : "sun"}
          label={`Colors: ${look}`}
          onClick={() => theme.set(NEXT[look])}
        />
        <IconButton name="key" label="API key" onClick={props.onKey} />
        <IconButton name="upload" label="Import conversations" onClick={() => files.current?.click()} />
        <IconButton name="download" label="Export all conversations" onClick={exportAll} disabled={!all.size} />
        <IconButton name="help" label="Keys and licenses" onClick={props.onHelp} />
        <input
          ref={files}
          type="file"
          accept=".json,application/json"
          multiple
          hidden
          aria-label="Files to import"
          onChange={(event) => {
            const { files: chosen } = event.currentTarget;
            if (chosen?.length) void importFiles(chosen).then(() => (files.current!.value = ""));
          }}
        />
        {server && <span class="version">{server.version}</span>}
      </footer>
      {open && <Options conversation={open} onClose={() => setOpen(null)} />}
    </nav>
  );
}

function Options({ conversation, onClose }: { conversation: Conversation; onClose: () => void }) {
  const [title, setTitle] = useState(titleOf(conversation));
  const [sure, setSure] = useState(false);
  const name = fileName(titleOf(conversation));
  const rename = () => {
    const now = conversations.get().get(conversation.id);
    if (now) put({ ...now, title: title.trim(), updated: Date.now() });
    void save(conversation.id);
    onClose();
  };
  return (
    <Dialog title="Conversation" onClose={onClose}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          rename();
        }}
      >
        <label class="field">
          <span>Name</span>
          <input value={title} maxLength={200} onInput={(event) => setTitle(event.currentTarget.value)} />
        </label>
        <div class="buttons">
          <button
            type="button"
            onClick={() =>
              download(`${name}.json`, "application/json", JSON.stringify({ conversations: [conversation] }, null, 1))
            }
          >
            <Icon name="download" /> Export
          </button>
          <button type="button" onClick={() => download(`${name}.md`, "text/markdown", asMarkdown(conversation))}>
            <Icon name="download" /> As Markdown
          </button>
        </div>
        <footer>
          <button
            type="button"
            class="danger"
            onClick={() => {
              if (!sure) return setSure(true);
              void remove([conversation.id]);
              const here = place.get();
              if (here.view === "chat" && here.id === conversation.id) go({ view: "chat", id: null });
              onClose();
            }}
          >
            <Icon name="trash" /> {sure ? "Delete for good" : "Delete"}
          </button>
          <button type="submit" class="primary">
            Rename
          </button>
        </footer>
      </form>
    </Dialog>
  );
}

/** The page: its parts, its keys, and what stands on top of everything when the server is away. */

import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { connection, refresh, watch } from "./api";
import { announcement, stop } from "./generate";
import { useKeyDialog } from "./key-dialog";
import { go, place } from "./place";
import { applyTheme, lastSettings, settingsShown, theme } from "./preferences";
import { conversations, load, put, save, storeError } from "./store";
import type { Settings } from "./conversation";
import { useValue } from "./value";
import { Chat } from "./views/chat";
import { Completion } from "./views/completion";
import { Engine } from "./views/engine";
import { SettingsPanel } from "./views/settings";
import { Shortcuts } from "./views/shortcuts";
import { Sidebar } from "./views/sidebar";
import { TopBar } from "./views/top-bar";

function App() {
  const here = useValue(place);
  const all = useValue(conversations);
  const state = useValue(connection);
  const problem = useValue(storeError);
  const said = useValue(announcement);
  const shown = useValue(settingsShown);
  const last = useValue(lastSettings);
  const [help, setHelp] = useState(false);
  const [drawer, setDrawer] = useState(false);
  const keyDialog = useKeyDialog(state === "key");
  const current = here.view === "chat" && here.id ? all.get(here.id) : undefined;
  const settings = current?.settings ?? last;

  const setSettings = (next: Settings) => {
    lastSettings.set(next);
    const now = current && conversations.get().get(current.id);
    if (!now) return;
    put({ ...now, settings: next });
    void save(now.id);
  };

  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      const command = event.ctrlKey || event.metaKey;
      if (event.key === "Escape" && current && !document.querySelector("dialog[open]")) stop(current.id);
      else if (command && event.shiftKey && event.key.toLowerCase() === "o") go({ view: "chat", id: null });
      else if (command && event.key.toLowerCase() === "k") {
        setDrawer(true);
        requestAnimationFrame(() => document.querySelector<HTMLInputElement>("#search")?.focus());
      } else if (command && event.key === ".") settingsShown.set(!settingsShown.get());
      else if (command && event.key === "/") setHelp(true);
      else return;
      if (event.key !== "Escape") event.preventDefault();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, [current?.id]);

  useEffect(() => setDrawer(false), [here]);

  return (
    <div class={`page ${drawer ? "drawer-open" : ""} ${shown && here.view !== "engine" ? "with-settings" : ""}`}>
      <Sidebar onHelp={() => setHelp(true)} onKey={keyDialog.open} onClose={() => setDrawer(false)} />
      <div class="shade" onClick={() => setDrawer(false)} />
      <main>
        <TopBar here={here} settings={settings} onSettings={setSettings} onMenu={() => setDrawer(true)} />
        {state === "away" && (
          <p class="banner" role="alert">
            The server does not answer. Asking again until it does …
          </p>
        )}
        {problem && (
          <p class="banner" role="alert">
            {problem}
          </p>
        )}
        {here.view === "chat" && <Chat conversation={current} settings={settings} />}
        {here.view === "completion" && <Completion settings={settings} />}
        {here.view === "engine" && <Engine />}
      </main>
      {shown && here.view !== "engine" && (
        <SettingsPanel settings={settings} onChange={setSettings} chat={here.view === "chat"} />
      )}
      {help && <Shortcuts onClose={() => setHelp(false)} />}
      {keyDialog.dialog}
      <p class="hidden" role="status">
        {said}
      </p>
    </div>
  );
}

applyTheme(theme.get());
theme.subscribe(applyTheme);
watch();
void refresh().catch(() => undefined);
void load().then(() => render(<App />, document.getElementById("app")!));

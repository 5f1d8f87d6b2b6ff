/** Tabs, the model, and the button of the settings. */

import { models, refresh } from "../api";
import type { Settings } from "../conversation";
import { IconButton } from "../icons";
import type { Place } from "../place";
import { settingsShown } from "../preferences";
import { useValue } from "../value";

const TABS = [
  { view: "chat", label: "Chat", href: "#/chat/" },
  { view: "completion", label: "Completion", href: "#/completion" },
  { view: "engine", label: "Engine", href: "#/engine" },
] as const;

export function TopBar(props: {
  here: Place;
  settings: Settings;
  onSettings: (settings: Settings) => void;
  onMenu: () => void;
}) {
  const { here, settings } = props;
  const known = useValue(models);
  const shown = useValue(settingsShown);
  const model = known.find((one) => one.id === settings.model)?.id ?? known[0]?.id ?? "";
  return (
    <header class="top-bar">
      <IconButton name="menu" label="Conversations" class="menu" onClick={props.onMenu} />
      <nav aria-label="Views">
        {TABS.map((tab) => (
          <a
            key={tab.view}
            href={tab.view === "chat" && here.view === "chat" ? `#/chat/${here.id ?? ""}` : tab.href}
            aria-current={here.view === tab.view ? "page" : undefined}
          >
            {tab.label}
          </a>
        ))}
      </nav>
      <select
        aria-label="Model"
        value={model}
        onFocus={() => void refresh().catch(() => undefined)}
        onChange={(event) => props.onSettings({ ...settings, model: event.currentTarget.value })}
      >
        {known.map((one) => (
          <option key={one.id} value={one.id}>
            {one.parent ? `${one.id} (adapter)` : one.id}
          </option>
        ))}
        {!known.length && <option value="">no model yet</option>}
      </select>
      {here.view !== "engine" && (
        <IconButton
          name="gear"
          label="Settings"
          pressed={shown}
          onClick={() => settingsShown.set(!settingsShown.get())}
        />
      )}
    </header>
  );
}

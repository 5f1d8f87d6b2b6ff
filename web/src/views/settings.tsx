/** Settings of a conversation: system prompt, presets, every sampling parameter, the form of the answer, tools. */

import { useEffect, useState } from "preact/hooks";
import { info, toolServers } from "../api";
import type { Settings } from "../conversation";
import { IconButton } from "../icons";
import { CHAT_ONLY, format, GROUPS, OWN_PRESETS, PARAMETERS, parse, presets, setPresets, type Parameter } from "../parameters";
import { settingsShown } from "../preferences";
import { parseJson, parseTools } from "../settings-json";
import { useValue } from "../value";

interface Props {
  settings: Settings;
  onChange: (settings: Settings) => void;
  chat: boolean; // false: of completions, which have no messages
}

export function SettingsPanel({ settings, onChange, chat }: Props) {
  const defaults = useValue(info)?.engine.default_sampling_params ?? {};
  const set = (name: string, value: unknown) => {
    const parameters = { ...settings.parameters };
    if (value === undefined) delete parameters[name];
    else parameters[name] = value;
    onChange({ ...settings, parameters });
  };
  const offered = PARAMETERS.filter((parameter) => chat || !CHAT_ONLY.has(parameter.name));
  return (
    <aside class="settings" aria-label="Settings">
      <header>
        <h2>Settings</h2>
        <IconButton name="close" label="Close settings" onClick={() => settingsShown.set(false)} />
      </header>
      <Presets settings={settings} onChange={onChange} />
      {chat && (
        <TextBox
          label="System prompt"
          help="What the model is told before the conversation begins."
          value={settings.system}
          onChange={(system) => onChange({ ...settings, system })}
        />
      )}
      {GROUPS.map((group) => {
        const inside = offered.filter((parameter) => parameter.group === group);
        const given = inside.filter((parameter) => settings.parameters[parameter.name] !== undefined).length;
        return (
          inside.length > 0 && (
            <details key={group} open={group === "Randomness"}>
              <summary>
                {group} {given > 0 && <span class="count">{given} set</span>}
              </summary>
              {inside.map((parameter) => (
                <Field
                  key={parameter.name}
                  parameter={parameter}
                  value={settings.parameters[parameter.name]}
                  fallback={defaults[parameter.name]}
                  onChange={(value) => set(parameter.name, value)}
                />
              ))}
            </details>
          )
        );
      })}
      <details>
        <summary>Form of the answer {settings.schema.trim() && <span class="count">set</span>}</summary>
        <TextBox
          label="JSON schema"
          help="The answer is held to this schema."
          code
          value={settings.schema}
          check={(text) => parseJson(text, "JSON")}
          onChange={(schema) => onChange({ ...settings, schema })}
        />
      </details>
      {chat && <ServerTools settings={settings} onChange={onChange} />}
      {chat && (
        <details>
          <summary>Tools {settings.tools.trim() && <span class="count">set</span>}</summary>
          <TextBox
            label="Tools as JSON"
            help='A list of functions, each with "name", "description" and "parameters". The page shows calls, and you write what they return.'
            code
            value={settings.tools}
            check={parseTools}
            onChange={(tools) => onChange({ ...settings, tools })}
          />
        </details>
      )}
      <details>
        <summary>Probabilities {settings.logprobs && <span class="count">on</span>}</summary>
        <label class="check">
          <input
            type="checkbox"
            checked={settings.logprobs}
            onChange={(event) => onChange({ ...settings, logprobs: event.currentTarget.checked })}
          />
          <span>Ask how likely each token was, and what else was likely</span>
        </label>
      </details>
    </aside>
  );
}

/** Tools that the server calls itself; nothing where it has none. */
function ServerTools({ settings, onChange }: Omit<Props, "chat">) {
  const servers = useValue(toolServers);
  if (!servers.length) return null;
  const chosen = new Set(settings.serverTools ?? []);
  const known = servers.flatMap((server) => server.tools.map((tool) => `${server.server_label}/${tool.name}`));
  const on = known.filter((name) => chosen.has(name));
  const turn = (name: string, wanted: boolean) =>
    onChange({ ...settings, serverTools: known.filter((one) => (one === name ? wanted : chosen.has(one))) });
  return (
    <details>
      <summary>Tools of the server {on.length > 0 && <span class="count">{on.length} on</span>}</summary>
      <p class="help">The server calls those that are on when the model wants it. Such answers show no probabilities.</p>
      {servers.map((server) => (
        <fieldset key={server.server_label} class="tool-server">
          <legend>{server.server_label}</legend>
          {server.tools.map((tool) => {
            const name = `${server.server_label}/${tool.name}`;
            return (
              <label class="check" key={name}>
                <input
                  type="checkbox"
                  role="switch"
                  checked={chosen.has(name)}
                  onChange={(event) => turn(name, event.currentTarget.checked)}
                />
                <span>
                  <code>{tool.name}</code> {tool.description && <span class="help">{tool.description}</span>}
                </span>
              </label>
            );
          })}
        </fieldset>
      ))}
      <label class="check">
        <input
          type="checkbox"
          checked={!settings.unasked}
          onChange={(event) => onChange({ ...settings, unasked: !event.currentTarget.checked })}
        />
        <span>Ask me before each call</span>
      </label>
    </details>
  );
}

function Presets({ settings, onChange }: Omit<Props, "chat">) {
  const own = useValue(presets);
  const [name, setName] = useState("");
  const all = [...OWN_PRESETS, ...own];
  const same = (one: { parameters: object; system?: string }) =>
    JSON.stringify(one.parameters) === JSON.stringify(settings.parameters) &&
    (one.system === undefined || one.system === settings.system);
  const current = all.findIndex(same);
  return (
    <div class="presets">
      <label class="field">
        <span>Preset</span>
        <select
          value={String(current)}
          onChange={(event) => {
            const chosen = all[Number(event.currentTarget.value)];
            if (!chosen) return;
            onChange({ ...settings, parameters: { ...chosen.parameters }, system: chosen.system ?? settings.system });
          }}
        >
          {current < 0 && <option value="-1">changed</option>}
          {all.map((one, index) => (
            <option key={one.name} value={String(index)}>
              {one.name}
            </option>
          ))}
        </select>
      </label>
      {current >= OWN_PRESETS.length ? (
        <IconButton
          name="trash"
          label={`Delete the preset ${all[current].name}`}
          onClick={() => setPresets(own.filter((one) => one !== all[current]))}
        />
      ) : (
        current < 0 && (
          <form
            class="save"
            onSubmit={(event) => {
              event.preventDefault();
              const rest = own.filter((one) => one.name !== name.trim());
              if (name.trim())
                setPresets([
                  ...rest,
                  { name: name.trim(), system: settings.system, parameters: { ...settings.parameters } },
                ]);
              setName("");
            }}
          >
            <input
              aria-label="Name of a new preset"
              placeholder="Save as …"
              value={name}
              onInput={(event) => setName(event.currentTarget.value)}
            />
            <button type="submit" disabled={!name.trim()}>
              Save
            </button>
          </form>
        )
      )}
    </div>
  );
}

function Field(props: {
  parameter: Parameter;
  value: unknown;
  fallback: unknown;
  onChange: (value: unknown) => void;
}) {
  const { parameter, value, onChange } = props;
  const [text, setText] = useState(() => format(parameter, value));
  const [problem, setProblem] = useState("");
  useEffect(() => {
    // Changed by a preset, or another conversation is shown.
    setText(format(parameter, value));
    setProblem("");
  }, [JSON.stringify(value)]);
  const id = `parameter-${parameter.name}`;
  const fallback = props.fallback === undefined ? "default" : `default: ${format(parameter, props.fallback)}`;
  const enter = (next: string) => {
    setText(next);
    try {
      onChange(parse(parameter, next));
      setProblem("");
    } catch (error) {
      setProblem(error instanceof Error ? error.message : String(error));
    }
  };
  const common = {
    id,
    "aria-describedby": `${id}-help`,
    "aria-invalid": problem ? true : undefined,
  };
  return (
    <div class="field">
      <label for={id}>
        {parameter.label} <code>{parameter.name}</code>
      </label>
      {parameter.kind === "boolean" || parameter.kind === "choice" ? (
        <select {...common} value={text} onChange={(event) => enter(event.currentTarget.value)}>
          <option value="">{fallback}</option>
          {(parameter.choices ?? ["true", "false"]).map((choice) => (
            <option key={choice} value={choice}>
              {parameter.kind === "boolean" ? { true: "on", false: "off" }[choice] : choice}
            </option>
          ))}
        </select>
      ) : parameter.kind === "texts" ? (
        <textarea
          {...common}
          rows={2}
          value={text}
          placeholder={fallback}
          onInput={(event) => enter(event.currentTarget.value)}
        />
      ) : (
        <div class="number">
          <input
            {...common}
            value={text}
            inputMode={parameter.kind === "number" || parameter.kind === "integer" ? "decimal" : undefined}
            placeholder={fallback}
            spellcheck={false}
            onInput={(event) => enter(event.currentTarget.value)}
          />
          {parameter.step !== undefined && parameter.kind === "number" && (
            <input
              type="range"
              aria-label={`${parameter.label}, slider`}
              min={parameter.min}
              max={parameter.max}
              step={parameter.step}
              value={text || String(props.fallback ?? parameter.neutral)}
              onInput={(event) => enter(event.currentTarget.value)}
            />
          )}
        </div>
      )}
      <p id={`${id}-help`} class={problem ? "problem" : "help"}>
        {problem || parameter.help}
      </p>
    </div>
  );
}

function TextBox(props: {
  label: string;
  help: string;
  value: string;
  code?: boolean;
  check?: (text: string) => unknown;
  onChange: (text: string) => void;
}) {
  const id = `box-${props.label.replace(/\W+/g, "-")}`;
  let problem = "";
  try {
    if (props.value.trim()) props.check?.(props.value);
  } catch (error) {
    problem = error instanceof Error ? error.message : String(error);
  }
  return (
    <div class="field">
      <label for={id}>{props.label}</label>
      <textarea
        id={id}
        class={props.code ? "code-box" : ""}
        rows={props.code ? 6 : 3}
        spellcheck={!props.code}
        aria-describedby={`${id}-help`}
        aria-invalid={problem ? true : undefined}
        value={props.value}
        onInput={(event) => props.onChange(event.currentTarget.value)}
      />
      <p id={`${id}-help`} class={problem ? "problem" : "help"}>
        {problem || props.help}
      </p>
    </div>
  );
}

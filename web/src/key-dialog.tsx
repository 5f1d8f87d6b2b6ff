/** The API key: asked for when the server wants one. */

import { useEffect, useState } from "preact/hooks";
import { apiKey, connection, refresh, setApiKey } from "./api";
import { Dialog } from "./dialog";

export function useKeyDialog(wanted: boolean) {
  const [asked, setAsked] = useState(false);
  const [dismissed, setDismissed] = useState(false);
  useEffect(() => {
    if (!wanted) setDismissed(false);
  }, [wanted]);
  const close = () => {
    setAsked(false);
    setDismissed(true);
  };
  const shown = asked || (wanted && !dismissed);
  return {
    open: () => setAsked(true),
    dialog: shown ? <KeyDialog wrong={wanted} onClose={close} /> : null,
  };
}

function KeyDialog({ wrong, onClose }: { wrong: boolean; onClose: () => void }) {
  const [key, setKey] = useState(apiKey());
  const [remember, setRemember] = useState(false);
  const [problem, setProblem] = useState("");
  const submit = async () => {
    setApiKey(key.trim(), remember);
    try {
      await refresh();
      connection.set("ok");
      onClose();
    } catch (error) {
      setProblem(error instanceof Error ? error.message : String(error));
    }
  };
  return (
    <Dialog title="API key" onClose={onClose}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          void submit();
        }}
      >
        <p>
          {wrong
            ? apiKey()
              ? "The server does not know this key."
              : "This server wants a key."
            : "The key that requests of this page carry."}
        </p>
        <label class="field">
          <span>Key</span>
          <input
            type="password"
            autocomplete="off"
            spellcheck={false}
            value={key}
            onInput={(event) => setKey(event.currentTarget.value)}
          />
        </label>
        <label class="check">
          <input type="checkbox" checked={remember} onChange={(event) => setRemember(event.currentTarget.checked)} />
          <span>Keep it in this browser, not just in this tab</span>
        </label>
        {problem && (
          <p class="problem" role="alert">
            {problem}
          </p>
        )}
        <footer>
          <button type="submit" class="primary">
            Use this key
          </button>
        </footer>
      </form>
    </Dialog>
  );
}

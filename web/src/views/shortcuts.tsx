/** The keys that the page knows. */

import { Dialog } from "../dialog";

const KEYS: [string, string][] = [
  ["Enter", "send"],
  ["Shift Enter", "a new line"],
  ["Escape", "stop the answer"],
  ["↑ in an empty box", "edit your last message"],
  ["Ctrl K", "search conversations"],
  ["Ctrl Shift O", "a new conversation"],
  ["Ctrl .", "settings"],
  ["Ctrl /", "this list"],
  ["← → on probabilities", "from token to token"],
];

export function Shortcuts({ onClose }: { onClose: () => void }) {
  return (
    <Dialog title="Keys" onClose={onClose}>
      <table class="keys">
        <tbody>
          {KEYS.map(([keys, what]) => (
            <tr key={keys}>
              <th scope="row">
                <kbd>{keys}</kbd>
              </th>
              <td>{what}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <p class="quiet">
        Conversations stay in this browser. The page is part of llmjax; the licenses of the libraries in it are{" "}
        <a href="web/LICENSES.txt" target="_blank" rel="noopener">
          here
        </a>
        , the API is described <a href="docs">here</a>.
      </p>
    </Dialog>
  );
}

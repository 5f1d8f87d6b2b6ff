/** Tokens with their probabilities: a color for each, the likeliest others under the pointer. */

import { useRef, useState } from "preact/hooks";
import type { Token } from "../conversation";

const percent = (logprob: number) => {
  const share = Math.exp(logprob) * 100;
  return share >= 99.95 ? "100 %" : share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
};

export const visible = (text: string) => text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "∅";

/** One of five levels, from likely to unlikely. */
function level(logprob: number): number {
  const share = Math.exp(logprob);
  return [0.8, 0.5, 0.2, 0.05].findIndex((bound) => share >= bound) + 1 || 5;
}

const TIP = { width: 250, height: 150 };

/** Under a token, or above it where there is no room. */
function besides(token: DOMRect) {
  const left = `${Math.max(8, Math.min(token.left, innerWidth - TIP.width))}px`;
  return token.bottom + TIP.height < innerHeight
    ? { left, top: `${token.bottom + 6}px` }
    : { left, bottom: `${innerHeight - token.top + 6}px` };
}

export function Tokens({ tokens }: { tokens: Token[] }) {
  const [active, setActive] = useState<number | null>(null);
  const box = useRef<HTMLDivElement>(null);
  const chosen = active === null ? undefined : tokens[active];
  const element = active === null ? undefined : (box.current?.children[active] as HTMLElement | undefined);
  const onKeyDown = (event: KeyboardEvent) => {
    const steps: Record<string, number> = { ArrowRight: 1, ArrowLeft: -1 };
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    setActive((now) => Math.min(tokens.length - 1, Math.max(0, (now ?? -1) + step)));
  };
  return (
    <div class="token-view">
      <div
        ref={box}
        class="tokens"
        tabIndex={0}
        role="application"
        aria-roledescription="tokens"
        aria-label="Probabilities; the arrow keys go from token to token"
        onKeyDown={onKeyDown}
        onBlur={() => setActive(null)}
        onPointerOver={(event) => {
          const index = (event.target as HTMLElement).dataset["index"];
          if (index !== undefined) setActive(Number(index));
        }}
        onPointerLeave={() => setActive(null)}
      >
        {tokens.map((token, index) => (
          <span key={index} data-index={index} class={`level-${level(token.logprob)} ${index === active ? "active" : ""}`}>
            {token.text}
          </span>
        ))}
      </div>
      {chosen && element && (
        <div
          class="tip"
          role="status"
          style={besides(element.getBoundingClientRect())}
        >
          <table>
            <tbody>
              {(chosen.top.some(([text]) => text === chosen.text)
                ? chosen.top
                : [[chosen.text, chosen.logprob] as [string, number], ...chosen.top]
              ).map(([text, logprob], index) => (
                <tr key={index} class={text === chosen.text ? "chosen" : ""}>
                  <td>{visible(text)}</td>
                  <td>{percent(logprob)}</td>
                  <td>{logprob.toFixed(3)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </div>
  );
}

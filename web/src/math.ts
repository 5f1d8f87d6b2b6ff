/** Formulas as MathML, which browsers set themselves: no fonts, no styles. A file of its own, loaded with the first formula. */

import katex from "katex";

/** Sets the formula that an element holds as TeX; one that is not TeX stays as it is. */
export function set(element: HTMLElement): void {
  const source = element.textContent ?? "";
  const made = document.createElement("span");
  try {
    katex.render(source, made, {
      displayMode: element.classList.contains("display"),
      output: "mathml",
      throwOnError: true,
      trust: false,
      strict: "ignore",
      maxExpand: 200,
      maxSize: 20,
    });
    element.replaceChildren(...made.childNodes);
  } catch {
    element.classList.add("raw");
  }
}

/** Markdown to nodes of the page. What a model writes is text: no HTML of its own, no script, no address that is fetched. */

import DOMPurify from "dompurify";
import { Marked, type Token, type Tokens } from "marked";

export type Block = Token;

const MATH: Record<string, { rule: RegExp; start: RegExp; display: boolean }> = {
  displayMath: { rule: /^(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])/, start: /\$\$|\\\[/, display: true },
  inlineMath: {
    rule: /^(?:\$(?!\s)((?:\\[^\n]|[^\\$\n])+?)(?<!\s)\$(?!\d)|\\\(([\s\S]+?)\\\))/,
    start: /\$|\\\(/,
    display: false,
  },
};

const escaped = (text: string) =>
  text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);

const marked = new Marked({ gfm: true, breaks: true, async: false });
marked.use({
  extensions: Object.entries(MATH).map(([name, { rule, start, display }]) => ({
    name,
    level: "inline" as const,
    start: (source: string) => source.match(start)?.index,
    tokenizer(source: string) {
      const match = rule.exec(source);
      return match ? { type: name, raw: match[0], text: (match[1] ?? match[2]).trim() } : undefined;
    },
    renderer: (token: Tokens.Generic) =>
      `<span class="math${display ? " display" : ""}">${escaped(token["text"] as string)}</span>`,
  })),
  renderer: {
    html: ({ text }) => escaped(text),
    // Nothing is fetched because a model says so: a picture is a link.
    image: ({ href, text }) =>
      /^data:image\/(png|jpeg|webp|gif);base64,/.test(href)
        ? `<img src="${escaped(href)}" alt="${escaped(text)}">`
        : `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    code: ({ text, lang }) =>
      `<pre class="language-${escaped((lang ?? "").split(/\s/)[0])}"><code>${escaped(text)}\n</code></pre>`,
  },
});

const purify = DOMPurify();
purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
  if (node.tagName === "INPUT") node.setAttribute("aria-label", "done"); // of a task list
});

const ALLOWED = {
  ALLOWED_TAGS: [
    ...["a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "img"],
    ...["input", "li", "ol", "p", "pre", "s", "span", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead"],
    ...["tr", "ul"],
  ],
  ALLOWED_ATTR: ["href", "src", "alt", "class", "align", "start", "type", "checked", "disabled"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:|data:image\/(?:png|jpeg|webp|gif);base64,)/i,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true as const,
};

/** The top-level blocks of a text. */
export function blocks(text: string): Block[] {
  return marked.lexer(text).filter((token) => token.type !== "space" && token.type !== "def");
}

/** A block's nodes. Code is colored and formulas are set once what does it is loaded; both stay text until then. */
export function nodes(block: Block, { live = false } = {}): DocumentFragment {
  const html = marked.parser([block]);
  const fragment = purify.sanitize(html, ALLOWED) as unknown as DocumentFragment;
  for (const pre of fragment.querySelectorAll("pre")) frame(pre, live);
  for (const table of fragment.querySelectorAll("table")) {
    const around = document.createElement("div");
    around.className = "table";
    around.tabIndex = 0; // it may be wider than the page
    around.setAttribute("role", "region");
    around.setAttribute("aria-label", "Table");
    table.replaceWith(around);
    around.append(table);
  }
  const formulas = [...fragment.querySelectorAll<HTMLElement>("span.math")];
  if (formulas.length) void import("./math").then(({ set }) => formulas.forEach(set));
  return fragment;
}

/** Puts a bar with the language and a button above a block of code. */
function frame(pre: HTMLPreElement, live: boolean): void {
  const language = pre.className.replace(/^language-/, "");
  const code = pre.querySelector("code") ?? pre;
  const figure = document.createElement("div");
  figure.className = "code";
  const bar = document.createElement("div");
  bar.className = "code-bar";
  const name = document.createElement("span");
  name.textContent = language || "text";
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", () => {
    void copy(code.textContent ?? "").then((done) => {
      button.textContent = done ? "Copied" : "Not copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
  });
  bar.append(name, button);
  pre.tabIndex = 0;
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", language ? `Code in ${language}` : "Code");
  pre.replaceWith(figure);
  figure.append(bar, pre);
  if (language && !live) {
    const source = code.textContent ?? "";
    void import("./highlight").then(({ highlighted }) => {
      const html = highlighted(source, language);
      if (html === undefined) return;
      code.replaceChildren(
        purify.sanitize(html, {
          ALLOWED_TAGS: ["span"],
          ALLOWED_ATTR: ["class"],
          RETURN_DOM_FRAGMENT: true,
        }) as unknown as DocumentFragment,
      );
    });
  }
}

/** Copies a text; false: the browser does not allow it. */
export async function copy(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without TLS there is no clipboard to write to, except by the page's own selection.
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "hidden";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

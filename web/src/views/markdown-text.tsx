/** A text in Markdown. While it grows only its last block is drawn again. */

import { memo } from "preact/compat";
import { useLayoutEffect, useMemo, useRef } from "preact/hooks";
import { blocks, nodes, type Block } from "../markdown";

const MarkdownBlock = memo(
  function MarkdownBlock({ block, live }: { block: Block; live: boolean }) {
    const place = useRef<HTMLDivElement>(null);
    useLayoutEffect(() => place.current!.replaceChildren(nodes(block, { live })), [block.raw, live]);
    return <div ref={place} />;
  },
  (before, after) => before.block.raw === after.block.raw && before.live === after.live,
);

export function MarkdownText({ text, live = false }: { text: string; live?: boolean }) {
  const parts = useMemo(() => blocks(text), [text]);
  return (
    <div class="markdown">
      {parts.map((block, index) => (
        <MarkdownBlock key={index} block={block} live={live && index === parts.length - 1} />
      ))}
    </div>
  );
}

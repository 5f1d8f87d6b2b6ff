/** Dialogs: the browser keeps the focus in them, closes them with Escape and gives the focus back. */

import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { IconButton } from "./icons";

export function Dialog(props: { title: string; onClose: () => void; children: ComponentChildren }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const element = dialog.current!;
    element.showModal();
    return () => element.close();
  }, []);
  return (
    <dialog ref={dialog} onClose={props.onClose} aria-label={props.title}>
      <header>
        <h2>{props.title}</h2>
        <IconButton name="close" label="Close" onClick={() => dialog.current?.close()} />
      </header>
      {props.children}
    </dialog>
  );
}

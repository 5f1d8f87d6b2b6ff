/** Where messages are written: text, attached files, send and stop. */

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { isImage, type Attachment } from "../conversation";
import { Icon, IconButton } from "../icons";

const LONGEST_TEXT = 2 * 2 ** 20;
const LARGEST_IMAGE = 64 * 2 ** 20;
const SENT_AS_IT_IS = 2 ** 20; // larger pictures are made smaller first: servers bound the size of requests
const LONGEST_SIDE = 2048; // pixels
const DRAFT = "llmjax.draft";

export interface ComposerProps {
  id: string; // of the conversation, whose draft this is
  busy: boolean;
  sees: boolean;
  onSend: (text: string, attachments: Attachment[]) => void;
  onStop: () => void;
  onEditLast: () => void;
}

/** A file as an attachment. Raises Error with the reason why it is not one. */
async function read(file: File, sees: boolean): Promise<Attachment> {
  if (file.type.startsWith("image/") && file.type !== "image/svg+xml") {
    if (!sees) throw new Error(`${file.name} is a picture, and this model reads text only.`);
    if (file.size > LARGEST_IMAGE) throw new Error(`${file.name} is larger than ${LARGEST_IMAGE / 2 ** 20} MiB.`);
    const whole = file.size > SENT_AS_IT_IS ? undefined : await dataUrl(file);
    const data = whole && isImage(whole) ? whole : await smaller(file);
    return { name: file.name, kind: "image", data };
  }
  if (file.size > LONGEST_TEXT) throw new Error(`${file.name} is larger than ${LONGEST_TEXT / 2 ** 20} MiB.`);
  try {
    const data = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (data.includes("\0")) throw new Error("zero");
    return { name: file.name, kind: "text", data };
  } catch {
    throw new Error(`${file.name} is not a text in UTF-8.`);
  }
}

function dataUrl(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

/** A picture as a JPEG that is not too large, whatever its format. Raises Error: the browser cannot read it. */
async function smaller(file: File): Promise<string> {
  let picture: ImageBitmap;
  try {
    picture = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name} is not a picture that this browser can read.`);
  }
  const scale = Math.min(1, LONGEST_SIDE / Math.max(picture.width, picture.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  const context = canvas.getContext("2d")!;
  context.fillStyle = "#fff"; // what is transparent would become black
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  picture.close();
  return canvas.toDataURL("image/jpeg", 0.9);
}

export function Composer(props: ComposerProps) {
  const key = `${DRAFT}.${props.id}`;
  const [text, setText] = useState(() => sessionStorage.getItem(key) ?? "");
  const [attachments, setAttachments] = useState<Attachment[]>([]);
  const [problem, setProblem] = useState("");
  const [over, setOver] = useState(false);
  const box = useRef<HTMLTextAreaElement>(null);
  const files = useRef<HTMLInputElement>(null);

  useEffect(() => {
    box.current?.focus({ preventScroll: true });
  }, [props.id]);
  useLayoutEffect(() => {
    const area = box.current!;
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight, innerHeight * 0.4)}px`;
    if (text) sessionStorage.setItem(key, text);
    else sessionStorage.removeItem(key);
  }, [text]);

  const attach = async (list: Iterable<File>) => {
    setProblem("");
    for (const file of list) {
      try {
        const one = await read(file, props.sees);
        setAttachments((now) => [...now, one]);
      } catch (error) {
        setProblem(error instanceof Error ? error.message : String(error));
      }
    }
    box.current?.focus();
  };
  const send = () => {
    if (props.busy || (!text.trim() && !attachments.length)) return;
    props.onSend(text, attachments);
    setText("");
    setAttachments([]);
    setProblem("");
  };

  return (
    <form
      class={`composer ${over ? "over" : ""}`}
      aria-label="Message"
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
      onDragOver={(event) => {
        event.preventDefault();
        setOver(true);
      }}
      onDragLeave={() => setOver(false)}
      onDrop={(event) => {
        event.preventDefault();
        setOver(false);
        if (event.dataTransfer) void attach(event.dataTransfer.files);
      }}
    >
      {problem && (
        <p class="problem" role="alert">
          {problem}
        </p>
      )}
      {attachments.length > 0 && (
        <ul class="attachments" aria-label="Files to send">
          {attachments.map((one, index) => (
            <li key={index} class="pending">
              {one.kind === "image" && <img src={one.data} alt="" />}
              <span>{one.name}</span>
              <IconButton
                name="close"
                label={`Remove ${one.name}`}
                onClick={() => setAttachments(attachments.filter((other) => other !== one))}
              />
            </li>
          ))}
        </ul>
      )}
      <div class="composer-row">
        <IconButton
          name="attach"
          label={props.sees ? "Attach pictures or text files" : "Attach text files"}
          onClick={() => files.current?.click()}
        />
        <input
          ref={files}
          type="file"
          multiple
          hidden
          aria-label="Files to attach"
          onChange={(event) => {
            const { files: chosen } = event.currentTarget;
            if (chosen?.length) void attach([...chosen]).then(() => (files.current!.value = ""));
          }}
        />
        <textarea
          ref={box}
          rows={1}
          placeholder="Write a message"
          aria-label="Message"
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
          onPaste={(event) => {
            const pasted = event.clipboardData?.files;
            if (!pasted?.length) return;
            event.preventDefault();
            void attach([...pasted]);
          }}
          onKeyDown={(event) => {
            if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
              event.preventDefault();
              send();
            } else if (event.key === "ArrowUp" && !text) {
              event.preventDefault();
              props.onEditLast();
            }
          }}
        />
        {props.busy ? (
          <button type="button" class="send" aria-label="Stop" title="Stop" onClick={props.onStop}>
            <Icon name="stop" />
          </button>
        ) : (
          <button
            type="submit"
            class="send"
            aria-label="Send"
            title="Send"
            disabled={!text.trim() && !attachments.length}
          >
            <Icon name="send" />
          </button>
        )}
      </div>
    </form>
  );
}

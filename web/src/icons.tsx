/** Small pictures on buttons, drawn in lines; what they mean is said by the button. */

const PATHS = {
  attach: "M20 11.5 12 19.5a5 5 0 0 1-7-7l8.5-8.5a3.3 3.3 0 0 1 4.7 4.7L9.700 17a1.700 1.700 0 0 1-2.400-2.400L15 7",
  branch: "M7 5v14M7 9c6 0 10 0 10-4M17 5v0M7 19h0",
  check: "M5 12.500 10 17.500 19 7",
  close: "M6 6l12 12M18 6 6 18",
  copy: "M9 9h10v11H9zM5 15V4h10",
  download: "M12 4v11m-5-4 5 5 5-5M5 20h14",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  engine: "M3 13h4l3-8 4 14 3-6h4",
  gear: "M4 7h9m5 0h2M4 17h2m5 0h9M15.500 4.500v5M8.500 14.500v5",
  help: "M9 9a3 3 0 1 1 4.500 2.600c-1 .600-1.500 1.200-1.500 2.400M12 18v.100M12 22a10 10 0 1 0 0-20 10 10 0 0 0 0 20",
  key: "M14 10a4.500 4.500 0 1 0-3.500 3.500L12 15h2v2h2v2h4v-3.500z",
  left: "M14 6l-6 6 6 6",
  menu: "M4 7h16M4 12h16M4 17h16",
  moon: "M20 14.500A8.500 8.500 0 0 1 9.500 4 8.500 8.500 0 1 0 20 14.500z",
  play: "M8 5v14l11-7z",
  plus: "M12 5v14M5 12h14",
  redo: "M19 12a7 7 0 1 1-2-5l2 2M19 4v5h-5",
  right: "M10 6l6 6-6 6",
  search: "M11 18a7 7 0 1 0 0-14 7 7 0 0 0 0 14M16 16l5 5",
  send: "M12 20V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  sun: "M12 16a4 4 0 1 0 0-8 4 4 0 0 0 0 8M12 2v2m0 16v2M2 12h2m16 0h2M5 5l1.500 1.500m11 11L19 19M5 19l1.500-1.500m11-11L19 5",
  tool: "M14.500 6.500a4 4 0 0 1 5-1L17 8l1 2 2 .500 1.500-2a4.500 4.500 0 0 1-6.500 5L8 20.500 4 17l7-7a4.500 4.500 0 0 1 3.500-3.500",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  upload: "M12 16V5m-5 4 5-5 5 5M5 20h14",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { name: IconName }) {
  return (
    <svg class="icon" viewBox="0 0 24 24" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}

/** A button that shows a picture alone; its label is for screen readers and for the pointer. */
export function IconButton(props: {
  name: IconName;
  label: string;
  onClick?: () => void;
  disabled?: boolean;
  pressed?: boolean;
  class?: string;
}) {
  return (
    <button
      type="button"
      class={`icon-button ${props.class ?? ""}`}
      aria-label={props.label}
      title={props.label}
      aria-pressed={props.pressed}
      disabled={props.disabled}
      onClick={props.onClick}
    >
      <Icon name={props.name} />
    </button>
  );
}

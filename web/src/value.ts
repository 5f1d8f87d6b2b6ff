/** Values that components watch. */

import { useEffect, useState } from "preact/hooks";

export class Value<T> {
  private readonly listeners = new Set<(value: T) => void>();

  constructor(private value: T) {}

  get(): T {
    return this.value;
  }

  set(value: T): void {
    if (Object.is(value, this.value)) return;
    this.value = value;
    for (const listener of [...this.listeners]) listener(value);
  }

  subscribe(listener: (value: T) => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }
}

/** The current value; the component is drawn again when it changes. */
export function useValue<T>(value: Value<T>): T {
  const [, redraw] = useState({});
  useEffect(() => {
    redraw({}); // it may have changed since it was drawn
    return value.subscribe(() => redraw({}));
  }, [value]);
  return value.get();
}

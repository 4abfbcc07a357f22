// What the figures share: elements, a plane with axes, and points that a mouse, a finger or the arrow keys move.
"use strict";

globalThis.evictionary = globalThis.evictionary ?? {};

evictionary.drawing = (() => {
  const SIZE = 400; // of a plane, in the units of its SVG
  const GRID = 0.05; // points stand on a grid, so that the two decimals shown are exact

  const script = document.currentScript;
  const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href: new URL("figures.css", script.src) });
  document.head.append(style);

  // An HTML element, or an SVG element inside of one, with attributes and text.
  function add(parent, name, attributes = {}, text = "") {
    const isSvg = name === "svg" || parent.namespaceURI === "http://www.w3.org/2000/svg";
    const element = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    set(element, attributes);
    element.textContent = text;
    parent.append(element);
    return element;
  }

  function set(element, attributes) {
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  }

  // A labelled slider; `say` turns its number into the text beside it.
  function slider(parent, { label, min, max, value, say, onInput }) {
    const control = add(parent, "label", { class: "control wide" });
    add(control, "span", {}, label);
    const input = add(control, "input", { type: "range", min, max, value });
    const output = add(control, "output");
    const show = () => {
      output.textContent = say(input.valueAsNumber);
      input.setAttribute("aria-valuetext", output.textContent);
    };
    input.addEventListener("input", () => {
      show();
      onInput();
    });
    show();
    return input;
  }

  // A square of [-limit, limit] in both directions, y upwards, with its title above.
  function plane(parent, { title, label, limit }) {
    const frame = add(parent, "div", { class: "plane" });
    add(frame, "h4", {}, title);
    const svg = add(frame, "svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, role: "group", "aria-label": label });
    const x = (number) => (SIZE / 2) * (1 + number / limit);
    const y = (number) => (SIZE / 2) * (1 - number / limit);
    add(svg, "line", { class: "axis", x1: 0, x2: SIZE, y1: SIZE / 2, y2: SIZE / 2 });
    add(svg, "line", { class: "axis", y1: 0, y2: SIZE, x1: SIZE / 2, x2: SIZE / 2 });
    const line = (name) => {
      const drawn = add(svg, "line", { class: name });
      return (from, to) => set(drawn, { x1: x(from[0]), y1: y(from[1]), x2: x(to[0]), y2: y(to[1]) });
    };
    const rectangle = (name) => {
      const drawn = add(svg, "rect", { class: name });
      return (low, high) => set(drawn, { x: x(low[0]), y: y(high[1]), width: x(high[0]) - x(low[0]), height: y(low[1]) - y(high[1]) });
    };
    return { svg, limit, x, y, line, rectangle };
  }

  // A mark that only shows a place, with a symbol and its subscript at `offset` from it, in front of everything and inside of the plane.
  function mark(plane, { name, symbol, subscript = "", offset }) {
    const circle = add(plane.svg, "circle", { class: `result ${name}`, r: 6 });
    plane.symbols ??= add(plane.svg, "g");
    plane.svg.append(plane.symbols);
    const text = add(plane.symbols, "text", { class: "name symbol" }, symbol);
    add(text, "tspan", { dy: 4 }, subscript);
    const inside = (place) => Math.min(SIZE - 12, Math.max(12, place));
    return (at) => {
      const [x, y] = [plane.x(at[0]), plane.y(at[1])];
      set(circle, { cx: x, cy: y });
      set(text, { x: inside(x + offset[0]), y: inside(y + offset[1]) });
    };
  }

  // A point that can be moved. It is a slider for assistive technology: the arrow keys move it along both axes.
  function point(plane, { label, text = "", name = "", at, onMove }) {
    const { svg, limit } = plane;
    const group = add(svg, "g", { class: `handle ${name}`, role: "slider", tabindex: 0, "aria-label": label });
    set(group, { "aria-valuemin": -limit, "aria-valuemax": limit, "aria-roledescription": "point, moved by the arrow keys" });
    add(group, "circle", { class: "hit", r: 20 });
    const dot = add(group, "circle", { class: "dot", r: 11 });
    add(group, "text", { class: "name" }, text);
    const self = { at: [...at], group, dot, place };

    function place(wanted) {
      const snapped = wanted.map((entry) => Math.round(Math.min(limit, Math.max(-limit, entry)) / GRID) * GRID);
      self.at = snapped.map((entry) => Number(entry.toFixed(2)));
      set(group, { transform: `translate(${plane.x(self.at[0])} ${plane.y(self.at[1])})` });
      set(group, { "aria-valuenow": self.at[0], "aria-valuetext": pair(self.at) });
    }

    function move(wanted) {
      place(wanted);
      onMove(self);
    }

    group.addEventListener("keydown", (event) => {
      const directions = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
      const direction = directions[event.key];
      if (!direction) return;
      event.preventDefault(); // the page would scroll
      const step = event.shiftKey ? 10 * GRID : 2 * GRID;
      move(self.at.map((entry, axis) => entry + step * direction[axis]));
    });
    group.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      group.focus({ focusVisible: false, preventScroll: true });
      group.setPointerCapture(event.pointerId);
    });
    // The page does not scroll under the finger that moves a point.
    group.addEventListener("touchstart", (event) => event.preventDefault(), { passive: false });
    group.addEventListener("pointermove", (event) => {
      if (!group.hasPointerCapture(event.pointerId)) return;
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      move([(2 * at.x) / SIZE - 1, 1 - (2 * at.y) / SIZE].map((entry) => entry * limit));
    });
    place(at);
    return self;
  }

  // A row of buttons, each of which puts the figure into a state worth seeing; the first one brings back the start.
  function presets(parent, states, apply) {
    const row = add(parent, "div", { class: "presets", role: "group", "aria-label": "Examples" });
    for (const [name, state] of Object.entries(states)) {
      add(row, "button", { type: "button" }, name).addEventListener("click", () => apply(state));
    }
  }

  // Buttons that move a slider by one, for a reader who steps through time.
  function stepper(parent, input, what) {
    const row = add(parent, "div", { class: "steps", role: "group", "aria-label": `Step through the ${what}` });
    for (const [name, step] of [["Step back", -1], ["Step forward", 1]]) {
      add(row, "button", { type: "button" }, name).addEventListener("click", () => setTo(input, input.valueAsNumber + step));
    }
  }

  // A box to tick, with its words.
  function tick(parent, label, onInput) {
    const control = add(parent, "label", { class: "control" });
    const box = add(control, "input", { type: "checkbox" });
    control.append(label);
    box.addEventListener("change", onInput);
    return box;
  }

  // The numbers of an array that is ascending, as a sentence has them.
  function listed(numbers, none = "none") {
    if (numbers.length < 2) return numbers.length ? `${numbers[0]}` : none;
    return `${numbers.slice(0, -1).join(", ")} and ${numbers.at(-1)}`;
  }

  // Moves a slider or ticks a box from outside, as a reader would.
  function setTo(input, value) {
    if (input.type === "checkbox") input.checked = value;
    else input.value = value;
    input.dispatchEvent(new Event(input.type === "range" ? "input" : "change"));
  }

  // A sentence with the result, which is also read out when it changes.
  const said = (parent) => add(parent, "output", { class: "summary told", "aria-live": "polite" });

  // A minus sign instead of a hyphen, and no negative zero.
  const number = (value, digits = 2) => (Number(value.toFixed(digits)) + 0).toFixed(digits).replace("-", "−");
  const pair = (vector) => `(${number(vector[0])}, ${number(vector[1])})`;

  return { add, listed, mark, number, pair, plane, point, presets, said, set, setTo, slider, stepper, tick };
})();

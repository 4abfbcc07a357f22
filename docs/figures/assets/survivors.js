// Figure: which tokens of a prompt each method keeps, by layer and head, at a budget that the reader chooses.
"use strict";

(() => {
  const data = globalThis.evictionarySurvivors;
  const { add, presets, said, setTo, slider } = evictionary.drawing;
  const { budgets, heads, layers, needle, tokens } = data;
  const START = { tokens: 100, names: ["keydiff", "lagkv", "expected_attention", "gvote"] };
  const states = {
    "Start again": START,
    "Where they fail: 50 tokens, the needle is lost": { tokens: 50, names: ["streaming_llm", "lagkv", "snapkv", "criticalkv"] },
    "Where they work: 200 tokens": { tokens: 200, names: ["tova", "knorm", "keydiff", "kvzip"] },
    "Budgets of their own": { tokens: 100, names: ["gvote", "duo_attention"] },
    "All methods": { tokens: 100, names: data.methods.map((method) => method.name) },
  };
  const KEPT = [47, 127, 193]; // readable on a light page and on a dark one
  const rowsInAll = layers * heads;

  // Whether a row (layer * heads + head) keeps a token at the budget of that index.
  function reader(method) {
    const A = 65; // a letter says how many of the smallest budgets drop the token
    const exceptions = new Set(method.exceptions);
    return (budget, row, token) => {
      const place = row * tokens.length + token;
      const keeps = method.levels.charCodeAt(place) - A <= budget;
      return keeps !== exceptions.has(budget * rowsInAll * tokens.length + place);
    };
  }

  function title(method) {
    const options = Object.entries(method.options).map(([name, value]) => `${name}=${value}`);
    return options.length ? `${method.name} (${options.join(", ")})` : method.name;
  }

  const figure = document.getElementById("figure-survivors");
  figure.textContent = "";
  const controls = add(figure, "div", { class: "controls" });
  const budget = slider(controls, {
    label: "Budget",
    min: 0,
    max: budgets.length - 1,
    value: budgets.indexOf(START.tokens),
    say: (index) => `${budgets[index]} of ${tokens.length} tokens`,
    onInput: draw,
  });
  const layer = choice("Layer", "all layers", layers);
  const head = choice("KV head", "all heads", heads);

  const choices = add(add(figure, "fieldset"), "div", { class: "choices" });
  choices.before(Object.assign(document.createElement("legend"), { textContent: "Methods side by side" }));
  presets(figure, states, ({ tokens, names }) => {
    for (const select of [layer, head]) select.value = "";
    for (const { box, frame, name } of shown) frame.hidden = !(box.checked = names.includes(name));
    setTo(budget, budgets.indexOf(tokens));
  });
  const told = said(figure);
  const legend = add(figure, "p");
  legend.append("Kept in none of the chosen heads ");
  add(legend, "span", { class: "scale" });
  legend.append(" in all. The needle, which says the secret number, is underlined.");
  const panels = add(figure, "div", { class: "panels" });
  const shown = data.methods.map((method) => {
    const label = add(choices, "label");
    const box = add(label, "input", { type: "checkbox" });
    box.checked = START.names.includes(method.name);
    label.append(method.name);
    const panel = makePanel(method);
    panel.frame.hidden = !box.checked;
    box.addEventListener("change", () => {
      panel.frame.hidden = !box.checked;
      draw();
    });
    return { ...panel, box, name: method.name };
  });

  function choice(label, all, count) {
    const control = add(controls, "label", { class: "control" });
    add(control, "span", {}, label);
    const select = add(control, "select");
    add(select, "option", { value: "" }, all);
    for (let index = 0; index < count; index++) add(select, "option", { value: index }, `${index}`);
    select.addEventListener("change", draw);
    return select;
  }

  function makePanel(method) {
    const frame = add(panels, "section", { class: "panel", "data-method": method.name });
    add(frame, "h4", {}, title(method));
    add(frame, "p", { class: "description" }, method.description);
    const summary = add(frame, "p", { class: "summary" });
    const map = add(frame, "div", { class: "map" });
    const canvas = add(map, "canvas", { width: tokens.length, height: rowsInAll, role: "img" });
    const [first, end] = needle.map((token) => (100 * token) / tokens.length);
    add(map, "div", { class: "needle", style: `left: ${first}%; width: ${end - first}%` });
    const prompt = add(frame, "p", { class: "prompt" });
    const spans = tokens.map((text, token) => {
      const isNeedle = token >= needle[0] && token < needle[1];
      return add(prompt, "span", { class: isNeedle ? "needle" : "" }, text);
    });
    return { frame, summary, canvas, spans, keeps: reader(method), label: title(method) };
  }

  // The rows of the chosen layer and head.
  function isChosen(row) {
    const [wantedLayer, wantedHead] = [layer.value, head.value];
    const isLayer = wantedLayer === "" || Math.floor(row / heads) === Number(wantedLayer);
    return isLayer && (wantedHead === "" || row % heads === Number(wantedHead));
  }

  function drawPanel({ summary, canvas, spans, keeps, label, name }, kept) {
    const context = canvas.getContext("2d");
    const image = context.createImageData(tokens.length, rowsInAll);
    const counts = new Array(tokens.length).fill(0);
    let chosen = 0;
    for (let row = 0; row < rowsInAll; row++) {
      const counted = isChosen(row);
      chosen += counted;
      for (let token = 0; token < tokens.length; token++) {
        if (!keeps(budget.valueAsNumber, row, token)) continue;
        counts[token] += counted;
        image.data.set([...KEPT, counted ? 255 : 70], 4 * (row * tokens.length + token));
      }
    }
    context.putImageData(image, 0, 0);
    spans.forEach((span, token) => {
      span.style.setProperty("--share", (counts[token] / chosen).toFixed(3));
      span.title = `token ${token}: kept in ${counts[token]} of ${chosen} heads`;
    });
    const mean = (numbers) => numbers.reduce((total, each) => total + each, 0) / chosen;
    const ofNeedle = (100 * mean(counts.slice(...needle))) / (needle[1] - needle[0]);
    summary.textContent = `${Number(mean(counts).toFixed(1))} tokens kept in each head; ${ofNeedle.toFixed(0)} % of the needle`;
    kept.push(`${name} keeps ${ofNeedle.toFixed(0)} % of the needle`);
    canvas.setAttribute("aria-label", `${label}: layers and heads downwards, positions to the right; ${summary.textContent}`);
  }

  function draw() {
    const kept = [];
    for (const panel of shown) if (!panel.frame.hidden) drawPanel(panel, kept);
    const most = kept.length > 4 ? [...kept.slice(0, 4), `${kept.length - 4} more below`] : kept;
    told.textContent = `With ${budgets[budget.valueAsNumber]} tokens a head: ${most.join("; ") || "choose a method"}.`;
  }

  draw();
})();

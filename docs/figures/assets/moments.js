// Figure: attention over all tokens, over the kept ones, and what MomentKV makes of the moments of the evicted ones.
"use strict";

(() => {
  const { distance, momentkv } = evictionary.mathematics;
  const { add, mark, number, pair, plane, point, presets, said } = evictionary.drawing;
  const LIMIT = 3;
  const KEYS = [[1.6, 0.6], [0.9, -1.3], [-0.6, 1.7], [-1.6, 0.4], [-1.1, -1.2], [0.2, 1.1]];
  const VALUES = [[1.9, 1.2], [1.5, -1.1], [-0.8, 2], [-2, 0.9], [-1.4, -1.6], [0.4, 0.6]];
  const EVICTED = [false, true, true, false, true, true];

  const figure = document.getElementById("figure-moments");
  figure.textContent = "";
  const choices = add(add(figure, "fieldset"), "div", { class: "choices" });
  choices.before(Object.assign(document.createElement("legend"), { textContent: "Evicted tokens" }));
  const boxes = KEYS.map((_, token) => {
    const label = add(choices, "label");
    const box = add(label, "input", { type: "checkbox" });
    box.checked = EVICTED[token];
    box.addEventListener("change", draw);
    label.append(`token ${token + 1}`);
    return box;
  });

  const START = { query: [1.5, -1], keys: KEYS, values: VALUES, evicted: EVICTED };
  const ALIKE = {
    keys: [[1.6, 0.6], [1.2, -1], [1.3, -1.1], [-1.6, 0.4], [1.2, -1.1], [1.3, -1]],
    values: [[1.9, 1.2], [-1.5, -1.1], [-1.6, -1.2], [2, 0.9], [-1.5, -1.3], [-1.4, -1.2]],
  };
  const states = {
    "Start again": START,
    "Where it fails: the correction hurts": { ...START, query: [-0.5, 3], evicted: [false, false, true, false, true, true] },
    "Where it misses: one evicted token takes all": { ...START, query: [3, -3] },
    "Where it works: evicted keys are alike": { ...START, ...ALIKE },
  };
  presets(figure, states, (state) => {
    query.place(state.query);
    [[keys, state.keys], [values, state.values]].forEach(([points, places]) => points.forEach((one, token) => one.place(places[token])));
    boxes.forEach((box, token) => (box.checked = state.evicted[token]));
    draw();
  });
  const summary = said(figure);

  const planes = add(figure, "div", { class: "planes" });
  const left = plane(planes, { title: "The query and the keys", label: "Keys of six tokens, and the query", limit: LIMIT });
  const right = plane(planes, { title: "The values and the outputs", label: "Values and attention outputs", limit: LIMIT });
  const arrow = left.line("arrow");
  const keys = KEYS.map((at, token) => point(left, { label: `key of token ${token + 1}`, text: token + 1, at, onMove: draw }));
  const query = point(left, { label: "query", text: "q", name: "query", at: START.query, onMove: draw });
  const values = VALUES.map((at, token) => point(right, { label: `value of token ${token + 1}`, text: token + 1, at, onMove: draw }));
  const box = right.rectangle("enclosure");
  const errors = { retained: right.line("error retained"), corrected: right.line("error corrected") };
  const marks = {
    retained: mark(right, { name: "retained", symbol: "f", subscript: "R", offset: [-20, -16] }),
    certified: mark(right, { name: "certified", symbol: "f", subscript: "c", offset: [-20, 16] }),
    corrected: mark(right, { name: "corrected", symbol: "f̂", offset: [20, -12] }),
    full: mark(right, { name: "full", symbol: "f", offset: [18, 16] }),
  };

  const table = add(figure, "table", { class: "numbers" });
  const head = add(add(table, "thead"), "tr");
  for (const text of ["", "value", "error"]) add(head, "th", { scope: "col", class: "number" }, text);
  const body = add(table, "tbody");
  const rows = Object.fromEntries(
    Object.entries({
      full: "f: attention over all tokens",
      retained: "f<sub>R</sub>: over the kept tokens alone",
      corrected: "f̂: corrected by the moments",
      certified: "f<sub>c</sub>: only as far as it cannot hurt",
      evicted: "f<sub>E</sub>: over the evicted tokens, exact",
      estimate: "f̂<sub>E</sub>: from the moments",
      weight: "w<sub>R</sub>: weight of the kept tokens, exact",
      estimatedWeight: "ŵ<sub>R</sub>: from the moments",
    }).map(([name, text]) => {
      const row = add(body, "tr");
      add(row, "th", { scope: "row" }).innerHTML = text;
      return [name, [add(row, "td", { class: "number" }), add(row, "td", { class: "number" })]];
    }),
  );

  function show(name, value, error) {
    rows[name][0].textContent = value;
    rows[name][1].textContent = error === undefined ? "" : number(error, 3);
  }

  function draw() {
    const kept = boxes.map((box) => !box.checked);
    for (const points of [keys, values]) {
      points.forEach(({ group }, token) => group.classList.toggle("evicted", !kept[token]));
    }
    arrow([0, 0], query.at);
    const at = (points) => points.map((each) => each.at);
    const result = momentkv(query.at, at(keys), at(values), kept);
    box(result.box.low, result.box.high);
    for (const name of ["full", "retained", "certified", "corrected"]) marks[name](result[name]);
    for (const name of ["retained", "corrected"]) errors[name](result.full, result[name]);

    const none = boxes.every((box) => !box.checked);
    const all = boxes.every((box) => box.checked);
    const before = distance(result.retained, result.full);
    const after = distance(result.corrected, result.full);
    show("full", pair(result.full));
    show("retained", all ? "none" : pair(result.retained), all ? undefined : before);
    show("corrected", pair(result.corrected), after);
    show("certified", pair(result.certified), distance(result.certified, result.full));
    show("evicted", none ? "none" : pair(result.evicted));
    show("estimate", none ? "none" : pair(result.estimate), distance(result.estimate, result.evicted));
    show("weight", number(result.weight, 3));
    show("estimatedWeight", number(result.estimatedWeight, 3), Math.abs(result.estimatedWeight - result.weight));
    if (none) summary.textContent = "Nothing is evicted, so there is nothing to correct.";
    else if (all) summary.textContent = "Nothing is kept: the estimate stands alone.";
    else if (after <= before) summary.textContent = `The correction leaves ${number((100 * after) / before, 0)} % of the error.`;
    else summary.textContent = `Here the correction makes the error ${number(after / before, 1)} times as large.`;
  }

  draw();
})();

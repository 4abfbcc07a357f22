// Figure: KeyDiff's and LagKV's scores of the same keys, as they are moved.
"use strict";

(() => {
  const { anchor, keydiffScore, normalise, range, topK, unit, variationScore } = evictionary.mathematics;
  const { add, number, plane, point, presets, said, set, setTo, slider } = evictionary.drawing;
  const LIMIT = 3;
  const PARTITION = [[1.4, 1.1], [1.9, 0.3], [0.8, 1.7], [-1.2, 0.9], [1.1, -1.4], [0.5, 0.4]];
  const NEXT = [[2.1, 1.5], [0.6, 0.7], [1.5, 2], [1, -0.6], [-0.4, 1.2]];
  const COUNT = PARTITION.length + NEXT.length;
  const names = Array.from({ length: COUNT }, (_, token) => `${token + 1}`);

  const figure = document.getElementById("figure-keys");
  figure.textContent = "";
  const budget = slider(add(figure, "div", { class: "controls" }), {
    label: "Budget",
    min: NEXT.length + 1,
    max: COUNT,
    value: 8,
    say: (tokens) => `${tokens} of ${COUNT} tokens`,
    onInput: draw,
  });

  const GROUPS = [[1.5, 0.5], [1.6, 0.7], [1.4, 0.4], [-1.5, -0.5], [-1.6, -0.4], [-1.4, -0.6]];
  const MIRRORED = [[1.5, 0.6], [1.3, 0.5], [-1.5, -0.5], [-1.7, -0.6], [-1.5, -0.4]];
  const states = {
    "Start again": [...PARTITION, ...NEXT],
    "Where KeyDiff fails: two opposite groups": [...GROUPS, ...MIRRORED],
    "Where LagKV fails: the longest key, on the diagonal": [...PARTITION.slice(0, 3), [-2.9, -3], ...PARTITION.slice(4), ...NEXT],
  };
  presets(figure, states, (state) => {
    state.forEach((at, token) => twins.forEach((points) => points[token].place(at)));
    setTo(budget, 8);
  });
  const summary = said(figure);

  const planes = add(figure, "div", { class: "planes" });
  const left = plane(planes, { title: "KeyDiff: against the mean direction", label: "The keys and KeyDiff's anchor", limit: LIMIT });
  const right = plane(planes, { title: "LagKV: against the next partition", label: "The keys and the range of the next partition", limit: LIMIT });
  const arrow = left.line("arrow");
  const head = add(left.svg, "circle", { class: "result retained", r: 6 });
  const rays = names.map(() => left.line("ray"));
  const box = add(right.svg, "rect", { class: "box" });
  const diagonal = right.line("box");
  const start = [...PARTITION, ...NEXT];
  // The same keys in both planes: moving one moves its twin.
  const twins = [left, right].map((where) =>
    start.map((at, token) =>
      point(where, {
        label: `key ${token + 1}${token < PARTITION.length ? "" : ", of the next partition"}`,
        text: names[token],
        name: token < PARTITION.length ? "" : "next",
        at,
        onMove: (moved) => {
          for (const points of twins) points[token].place(moved.at);
          draw();
        },
      }),
    ),
  );

  const table = add(figure, "table", { class: "numbers" });
  const header = add(add(table, "thead"), "tr");
  const columns = { key: "", KeyDiff: "number", "kept by KeyDiff": "", LagKV: "number", "kept by LagKV": "" };
  for (const [text, kind] of Object.entries(columns)) add(header, "th", { scope: "col", class: kind }, text);
  const body = add(table, "tbody");
  const rows = names.map((name, token) => {
    const row = add(body, "tr");
    add(row, "th", { scope: "row" }, token < PARTITION.length ? name : `${name}\u00a0(next)`);
    return ["number", "", "number", ""].map((kind) => add(row, "td", { class: kind }));
  });

  function draw() {
    const keys = twins[0].map((each) => each.at);
    const [partition, next] = [keys.slice(0, PARTITION.length), keys.slice(PARTITION.length)];

    const direction = unit(anchor(keys)).map((entry) => 2 * entry);
    arrow([0, 0], direction);
    set(head, { cx: left.x(direction[0]), cy: left.y(direction[1]) });
    keys.forEach((key, token) => rays[token]([0, 0], key));

    const { low, high } = range(next);
    set(box, { x: right.x(low[0]), y: right.y(high[1]), width: right.x(high[0]) - right.x(low[0]), height: right.y(low[1]) - right.y(high[1]) });
    diagonal(low, high);

    const keydiff = keydiffScore(keys);
    const lagkv = variationScore(normalise(partition, next));
    const kept = [
      topK(keydiff, budget.valueAsNumber),
      [...topK(lagkv, budget.valueAsNumber - NEXT.length), ...next.map(() => true)],
    ];
    kept.forEach((mask, method) => mask.forEach((stays, token) => twins[method][token].group.classList.toggle("evicted", !stays)));
    const evicted = kept.map((mask) => names.filter((_, token) => !mask[token]).join(", ") || "nothing");
    summary.textContent = `KeyDiff evicts ${evicted[0]}; LagKV evicts ${evicted[1]}.`;
    rows.forEach(([score, stays, other, also], token) => {
      score.textContent = number(keydiff[token], 3);
      other.textContent = token < PARTITION.length ? number(lagkv[token], 3) : "–";
      [stays, also].forEach((cell, method) => (cell.textContent = kept[method][token] ? "yes" : "no"));
    });
  }

  draw();
})();

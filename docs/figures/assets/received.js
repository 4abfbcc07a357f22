// Figure: the attention that tokens receive while a text is read, and who goes by its sum (H2O) or by the last query (TOVA).
"use strict";

(() => {
  const { received, topK } = evictionary.mathematics;
  const { add, listed, number, presets, said, setTo, slider, stepper, tick } = evictionary.drawing;

  const figure = document.getElementById("figure-received");
  const { keys, queries } = JSON.parse(figure.dataset.given);
  const COUNT = keys.length;
  const nowhere = keys.map(() => [0, 0]);
  const TEXTS = {
    twelve: { keys, queries },
    even: { keys: nowhere, queries },
    one: { keys, queries: keys.map(() => keys[4].map((entry) => 6 * entry)) },
  };
  const START = { text: "twelve", read: 8, budget: 6, isLast: false };
  const states = {
    "Start again": START,
    "Where it works: all queries look at token 4": { ...START, text: "one", read: COUNT },
    "Where sums fail: equal tokens, and the first ones stay": { ...START, text: "even", read: COUNT },
    "Where a token goes too early: three stay": { ...START, read: COUNT, budget: 3 },
    "Only the last query: TOVA": { ...START, read: COUNT, isLast: true },
    "Nothing goes": { ...START, read: COUNT, budget: COUNT },
  };
  let text = TEXTS[START.text];

  figure.textContent = "";
  const controls = add(figure, "div", { class: "controls" });
  const range = { min: 1, max: COUNT, onInput: draw };
  const read = slider(controls, { ...range, label: "Read", value: START.read, say: (tokens) => `${tokens} of ${COUNT} tokens` });
  const budget = slider(controls, { ...range, label: "Budget", value: START.budget, say: (tokens) => `${tokens} tokens` });
  const isLast = tick(controls, "only the last query decides (TOVA)", draw);
  stepper(figure, read, "text");
  presets(figure, states, (state) => {
    text = TEXTS[state.text];
    setTo(isLast, state.isLast);
    setTo(budget, state.budget);
    setTo(read, state.read);
  });
  const summary = said(figure);

  const map = add(figure, "div", { class: "attention", role: "img", style: `--columns: ${COUNT}` });
  const line = (name, kind) => {
    add(map, "span", { class: "line" }, name);
    return keys.map(() => add(map, "span", { class: kind }));
  };
  const rows = keys.map((_, query) => line(`query ${query}`, "weight"));
  const sums = line("sum", "sum");
  const tokens = line("token", "token");

  function draw() {
    const [size, seen] = [budget.valueAsNumber, read.valueAsNumber];
    const recent = isLast.checked ? 0 : Math.ceil(size / 2);
    const [asked, held] = [text.queries.slice(0, seen), text.keys.slice(0, seen)];
    const steps = received(asked, held, size, recent, !isLast.checked);
    const { kept, numbers } = steps.at(-1);
    rows.forEach((cells, query) =>
      cells.forEach((cell, token) => {
        const weight = steps[query]?.row[token] ?? null;
        cell.className = weight === null ? "weight absent" : "weight";
        cell.style.setProperty("--share", weight === null ? 0 : weight.toFixed(3));
        cell.title = weight === null ? "" : `query ${query} gives token ${token} ${number(weight)}`;
      }),
    );
    const most = Math.max(...numbers, 1e-9);
    const isThere = (token) => token < seen;
    sums.forEach((cell, token) => {
      cell.className = !isThere(token) ? "sum absent" : kept.includes(token) ? "sum" : "sum gone";
      cell.style.setProperty("--share", isThere(token) ? (numbers[token] / most).toFixed(3) : 0);
      cell.title = isThere(token) ? `token ${token}: ${number(numbers[token])}` : "";
    });
    tokens.forEach((cell, token) => {
      cell.className = !isThere(token) ? "token absent" : kept.includes(token) ? "token" : "token gone";
      cell.textContent = isThere(token) ? token : "";
    });
    sums[0].previousSibling.textContent = isLast.checked ? "last" : "sum";

    const last = steps.findLast((step) => step.gone.length);
    const went = last ? `Token ${listed(last.gone)} went last, with ${number(last.numbers[last.gone[0]])}.` : "None has gone.";
    const whole = received(asked, held, Math.max(seen, 1), 0, !isLast.checked).at(-1);
    const scores = whole.numbers.map((score, token) => (token >= seen - recent ? Infinity : score));
    const atOnce = topK(scores, size).flatMap((stays, token) => (stays ? [token] : []));
    const same = `${atOnce}` === `${kept}`;
    const compared = same ? "Read at once, the same tokens stay." : `Read at once, ${listed(atOnce)} would stay.`;
    summary.textContent = `After ${seen} tokens ${listed(kept)} stay. ${went} ${compared}`;
    map.setAttribute("aria-label", `The attention of each query, downwards, to each token, to the right. ${summary.textContent}`);
  }

  draw();
})();

// Figure: the same number of tokens for each head, or one budget that the heads of a layer share (AdaKV).
"use strict";

(() => {
  const { adaSelect, logits, softmax, topK } = evictionary.mathematics;
  const { add, listed, number, presets, said, setTo, slider, tick } = evictionary.drawing;

  const figure = document.getElementById("figure-heads");
  const { heads, query } = JSON.parse(figure.dataset.given); // the keys of each head, and the direction of all queries
  const NAMES = ["A", "B", "C", "D"];
  const TENTHS = 10;
  const COUNT = heads[0].length;
  const START = { budget: 3, floor: 2, lengths: [12, 6, 3, 1], isLarge: false };
  const states = {
    "Start again": START,
    "Where it gains: two heads look at few tokens, two at many": { ...START, lengths: [12, 12, 1, 1], budget: 4 },
    "Where it changes nothing: all heads look alike": { ...START, lengths: [6, 6, 6, 6] },
    "Where it fails: the scores of one head are larger": { ...START, floor: 0, isLarge: true },
    "What the floor saves": { ...START, floor: 7, isLarge: true },
  };

  figure.textContent = "";
  const controls = add(figure, "div", { class: "controls" });
  const budget = slider(controls, {
    label: "Budget",
    min: 1,
    max: COUNT,
    value: START.budget,
    say: (tokens) => `${tokens} tokens a head, ${NAMES.length * tokens} in the layer`,
    onInput: draw,
  });
  const floor = slider(controls, {
    label: "Floor",
    min: 0,
    max: TENTHS,
    value: START.floor,
    say: (tenths) => `${10 * tenths} % of its budget stays with a head`,
    onInput: draw,
  });
  const lengths = NAMES.map((name, head) =>
    slider(controls, {
      label: `Head ${name}`,
      min: 1,
      max: 12,
      value: START.lengths[head],
      say: (length) => `query of length ${length}`,
      onInput: draw,
    }),
  );
  const isLarge = tick(controls, "the scores of head D are ten times as large", draw);
  presets(figure, states, (state) => {
    lengths.forEach((input, head) => setTo(input, state.lengths[head]));
    setTo(isLarge, state.isLarge);
    setTo(floor, state.floor);
    setTo(budget, state.budget);
  });
  const summary = said(figure);

  const panels = add(figure, "div", { class: "panels" });
  const ways = ["The same for each head", "Shared by the heads: AdaKV"].map((title) => {
    const frame = add(panels, "section", { class: "panel" });
    add(frame, "h4", {}, title);
    return NAMES.map((name) => {
      const row = add(frame, "div", { class: "head", role: "img" });
      const label = add(row, "span", { class: "line" });
      return { row, label, bars: heads[0].map((_, token) => add(row, "span", { class: "bar", title: `token ${token}` })) };
    });
  });

  function draw() {
    const size = budget.valueAsNumber;
    const weights = NAMES.map((_, head) => softmax(logits(query.map((entry) => lengths[head].valueAsNumber * entry), heads[head])));
    const scores = weights.map((row, head) => row.map((weight) => (isLarge.checked && head === 3 ? 10 * weight : weight)));
    const kept = [scores.map((row) => topK(row, size)), adaSelect(scores, size, floor.valueAsNumber / TENTHS)];
    const said = kept.map((masks, way) => {
      const shares = masks.map((mask, head) => weights[head].reduce((sum, weight, token) => sum + (mask[token] ? weight : 0), 0));
      const counts = masks.map((mask) => mask.filter(Boolean).length);
      ways[way].forEach(({ row, label, bars }, head) => {
        const top = Math.max(...weights[head]);
        label.textContent = `${NAMES[head]}: ${counts[head]}, ${(100 * shares[head]).toFixed(0)} %`;
        row.setAttribute("aria-label", `Head ${NAMES[head]} keeps ${counts[head]} tokens with ${(100 * shares[head]).toFixed(0)} % of its attention`);
        bars.forEach((bar, token) => {
          bar.className = masks[head][token] ? "bar stays" : "bar";
          bar.style.setProperty("--share", (weights[head][token] / top).toFixed(3));
          bar.title = `token ${token}: ${number(weights[head][token])}`;
        });
      });
      return { counts, share: shares.reduce((a, b) => a + b, 0) / NAMES.length };
    });
    const percent = said.map(({ share }) => `${(100 * share).toFixed(1)} %`);
    summary.textContent =
      `With ${size} tokens for each head, ${percent[0]} of the attention stays. ` +
      `Shared, the heads keep ${listed(said[1].counts)} tokens, and ${percent[1]} stays.`;
  }

  draw();
})();

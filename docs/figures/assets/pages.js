// Figure: a cache in pages while tokens are evicted, with the tokens left where they are or moved together.
"use strict";

(() => {
  const { adaSelect, compactPages, keydiffScore, leavePages, topK } = evictionary.mathematics;
  const { add, listed, presets, said, setTo, slider, stepper, tick } = evictionary.drawing;

  const figure = document.getElementById("figure-pages");
  const { heads } = JSON.parse(figure.dataset.given);
  const COUNT = heads[0].length;
  const TABLE = [2, 0, 3, 5, 1, 4]; // any pages of the pool: a sequence takes what is free
  // What decides, and a number for each token: the lowest ones go first.
  const ORDERS = {
    keydiff: { words: "By KeyDiff's scores", numbers: heads.map(keydiffScore) },
    second: { words: "With every second token first to go", numbers: heads.map((keys) => keys.map((_, token) => (token % 2 ? 0 : 100) + token)) },
    ends: { words: "With both ends last to go", numbers: heads.map((keys) => keys.map((_, token) => (token < 2 ? 100 : token))) },
  };
  const START = { order: "keydiff", evicted: 6, size: 4, isMoved: false, isShared: false };
  const states = {
    "Start again": START,
    "Moved together": { ...START, isMoved: true },
    "Every second token goes": { ...START, order: "second", evicted: 6 },
    "Where nothing has to move: both ends stay": { ...START, order: "ends", evicted: 8 },
    "Where heads disagree: the longest head holds the pages": { ...START, isMoved: true, isShared: true },
  };
  let order = START.order;

  figure.textContent = "";
  const controls = add(figure, "div", { class: "controls" });
  const evicted = slider(controls, {
    label: "Evicted",
    min: 0,
    max: COUNT,
    value: START.evicted,
    say: (tokens) => `${tokens} of ${COUNT} tokens of a head`,
    onInput: draw,
  });
  const size = slider(controls, { label: "Page", min: 2, max: 6, value: START.size, say: (slots) => `${slots} slots`, onInput: draw });
  const isMoved = tick(controls, "move the kept tokens together", draw);
  const isShared = tick(controls, "the heads share the budget (AdaKV)", draw);
  stepper(figure, evicted, "evictions");
  presets(figure, states, (state) => {
    order = state.order;
    setTo(isMoved, state.isMoved);
    setTo(isShared, state.isShared);
    setTo(size, state.size);
    setTo(evicted, state.evicted);
  });
  const summary = said(figure);
  const table = add(figure, "div", { class: "pages" });

  function draw() {
    const [slots, budget] = [size.valueAsNumber, COUNT - evicted.valueAsNumber];
    const pages = TABLE.slice(0, Math.ceil(COUNT / slots));
    const { words, numbers } = ORDERS[order];
    const kept = isShared.checked ? adaSelect(numbers, budget, 0) : numbers.map((row) => topK(row, budget));
    const [left, moved] = [leavePages(kept, pages, slots), compactPages(kept, pages, slots)];
    const { places, freed } = isMoved.checked ? moved : left;

    table.textContent = "";
    pages.forEach((page, entry) => {
      const isFree = freed.includes(page);
      const frame = add(table, "section", { class: isFree ? "page free" : "page" });
      add(frame, "h4", {}, `entry ${entry}: page ${page}${isFree ? ", free" : ""}`);
      places.forEach((row, head) => {
        const line = add(frame, "div", { class: "slots" });
        add(line, "span", { class: "line" }, `head ${head}`);
        row.slice(entry * slots, (entry + 1) * slots).forEach((token) => add(line, "span", { class: token === null ? "slot" : "slot held" }, token ?? ""));
      });
    });
    const lengths = kept.map((row) => row.filter(Boolean).length);
    const of = (found) => `${found.length} of ${pages.length} pages`;
    summary.textContent =
      `${words}, the heads keep ${listed(lengths)} of ${COUNT} tokens. Left where they are, they free ${of(left.freed)}; moved together, ` +
      `${of(moved.freed)}. The block table has ${isMoved.checked ? "then " : ""}${pages.length - freed.length} entries that count.`;
  }

  draw();
})();

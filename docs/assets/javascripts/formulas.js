// Typeset what arithmatex has marked. A formula that KaTeX refuses is an error on the console, where the check of the site sees it.
for (const element of document.querySelectorAll(".arithmatex")) {
  renderMathInElement(element, {
    delimiters: [
      { left: "\\(", right: "\\)", display: false },
      { left: "\\[", right: "\\]", display: true },
    ],
  });
}

// A symbol of a formula says its name and its shape, which the list below the formulas has. An entry of the list marks its symbol.
const ACCENTS = { "^": "hat", "~": "tilde", "\u02c9": "bar" };

// The parts of a typeset symbol: `whole` has its accent and its subscript too.
function parts(glyph) {
  const accented = glyph.closest(".katex-accent");
  let whole = accented ?? glyph;
  while (whole.parentElement.matches(".mord") && whole.parentElement.children.length === 1) whole = whole.parentElement;
  const beside = whole.nextElementSibling?.matches(".msupsub") ? whole.nextElementSibling : null;
  const sub = beside?.querySelector(":scope > .vlist-t2 > .vlist-r > .vlist > span")?.textContent ?? "";
  return {
    whole: beside ? whole.parentElement : whole,
    accent: ACCENTS[accented?.querySelector(".accent-body")?.textContent] ?? "",
    sub: sub.replace(/[^\p{L}\p{N}]/gu, ""),
  };
}

function name(entry, formulas) {
  const { base, font = "", accent = "", sub = "" } = entry.dataset;
  const found = [];
  for (const glyph of [...formulas].flatMap((formula) => [...formula.querySelectorAll(".katex-html .mord")])) {
    if (glyph.children.length || glyph.textContent !== base || (font ? !glyph.matches(`.${font}`) : glyph.matches(".mathcal"))) continue;
    const drawn = parts(glyph);
    if (drawn.accent !== accent || drawn.sub !== sub) continue;
    drawn.whole.title = entry.lastChild.textContent.trim();
    found.push(drawn.whole);
  }
  const mark = (isMarked) => () => found.forEach((symbol) => symbol.classList.toggle("marked", isMarked));
  for (const event of ["focus", "mouseenter"]) entry.addEventListener(event, mark(true));
  for (const event of ["blur", "mouseleave"]) entry.addEventListener(event, mark(false));
}

for (const list of document.querySelectorAll(".symbols")) {
  for (const entry of list.querySelectorAll("li")) name(entry, list.parentElement.querySelectorAll("div.arithmatex"));
}

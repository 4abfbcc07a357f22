// What moves: a figure loads its scripts when it comes near the window, and a picture of an idea gets buttons that step through time.
"use strict";

(() => {
  const folder = new URL("../../figures/assets/", document.currentScript.src);
  const loaded = new Set();

  function load(file) {
    if (loaded.has(file)) return;
    loaded.add(file);
    document.head.append(Object.assign(document.createElement("script"), { src: new URL(file, folder), async: false }));
  }

  const near = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting) continue;
        near.unobserve(target);
        target.dataset.files.split(" ").forEach(load);
      }
    },
    { rootMargin: "600px" },
  );
  for (const figure of document.querySelectorAll(".figure[data-files]")) near.observe(figure);

  // The drawings of the steps come as lines, each of which is stored once.
  function steps(picture) {
    const { lines, frames } = JSON.parse(picture.querySelector("script").textContent);
    const svg = picture.querySelector("svg");
    const whole = { drawn: svg.innerHTML, box: svg.getAttribute("viewBox"), told: svg.getAttribute("aria-label") };
    const states = [whole, ...frames.map((frame) => ({ ...frame, drawn: frame.lines.map((line) => lines[line]).join("") }))];
    let now = 0;

    const bar = document.createElement("div");
    bar.className = "steps";
    bar.setAttribute("role", "group");
    bar.setAttribute("aria-label", "Step through time");
    const told = Object.assign(document.createElement("output"), { className: "told", ariaLive: "polite" });
    for (const [name, to] of [
      ["Step back", () => Math.max(now - 1, 0)],
      ["Step forward", () => Math.min(now + 1, frames.length)],
      ["Whole picture", () => 0],
    ]) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: name });
      button.addEventListener("click", () => show(to()));
      bar.append(button);
    }
    picture.append(bar, told);

    function show(step) {
      now = step;
      const state = states[now];
      svg.innerHTML = state.drawn;
      svg.setAttribute("viewBox", state.box);
      svg.setAttribute("aria-label", state.told);
      told.textContent = now ? `Step ${now} of ${frames.length}. ${state.told}` : "The whole picture.";
    }
    told.textContent = `The picture has ${frames.length} steps.`;
  }
  for (const picture of document.querySelectorAll(".idea:has(> script)")) steps(picture);
})();

// The module tree as a heat map: a row a module, a cell a step, each with the worst excess of what lies below.
const Tree = (() => {
  const box = $("tree");
  const DEEPEST = 60;
  const root = branch("", "");
  function branch(name, path) {
    return { name, path, kids: new Map(), nodes: 0, faults: 0, worst: -1, heat: 1, steps: new Map(), open: false, depth: 0 };
  }
  function note(b, i) {
    b.nodes++;
    if (isFault(i)) b.faults++;
    if (b.worst < 0 || graver(i, b.worst) < 0) b.worst = i;
    const h = heat(i), seen = b.steps.get(D.step[i]);
    b.heat = Math.max(b.heat, h);
    if (!seen) b.steps.set(D.step[i], { heat: h, worst: i });
    else {
      seen.heat = Math.max(seen.heat, h);
      if (graver(i, seen.worst) < 0) seen.worst = i;
    }
  }
  for (let i = 0; i < N; i++) {
    let here = root;
    note(here, i);
    const path = text("path", i), parts = path ? path.split(".") : [];
    if (parts.length > DEEPEST) parts.splice(DEEPEST - 1, parts.length, parts.slice(DEEPEST - 1).join("."));
    for (const part of parts) {
      if (!here.kids.has(part)) {
        const child = branch(part, here.path ? `${here.path}.${part}` : part);
        child.depth = here.depth + 1;
        here.kids.set(part, child);
      }
      note((here = here.kids.get(part)), i);
    }
  }
  root.open = true;
  for (const child of root.kids.values()) child.open = root.kids.size < 12;
  for (const i of D.origins.slice(0, 5)) {
    let here = root;
    for (const part of text("path", i).split(".")) if (here) (here.open = true), (here = here.kids.get(part));
  }

  function cell(seen, step) {
    if (!seen) return el("span", { class: "cell none" });
    const s = statusOf(seen.worst), warm = warmth(seen.heat);
    const label = seen.heat === Infinity ? s.mark : seen.heat >= 1.05 ? figure(seen.heat).replace(/\.\d+$/, (d) => (seen.heat < 10 ? d.slice(0, 2) : "")) : "";
    const node = el("span", { class: `cell${warm > 0.62 ? " hot" : ""}`, title: `step ${step}: ${seen.heat === Infinity ? s.name : times(seen.heat)}, worst ${text("key", seen.worst)}` }, label);
    node.style.setProperty("--warm", `${Math.round(warm * 100)}%`);
    return node;
  }
  function row(b) {
    const item = el("div", { class: "branch", role: "treeitem", tabindex: "-1", "aria-level": b.depth + 1 });
    item.branch = b;
    if (b.kids.size) item.setAttribute("aria-expanded", b.open);
    const caret = el("span", { class: "caret", "aria-hidden": "true" }, b.kids.size ? (b.open ? "▾" : "▸") : "");
    const name = el("span", { class: "name" }, caret, el("span", { class: "label", title: b.path }, b.name || "(whole model)"));
    name.style.paddingLeft = `${b.depth * 16}px`;
    const cells = el("span", { class: "cells" }, ...STEPS.map((s) => cell(b.steps.get(s), s)));
    const s = b.worst < 0 ? D.statuses[STATUS.unknown] : statusOf(b.worst);
    const tally = b.faults ? `${whole(b.faults)} / ${whole(b.nodes)}` : whole(b.nodes);
    const show = el("button", { class: "quiet show", type: "button", tabindex: "-1", title: "show these nodes in the table" }, "nodes");
    item.append(name, cells, el("span", { class: `tally s-${s.name}`, title: "out of tolerance / nodes" }, el("span", { class: "mark" }, s.mark), tally), show);
    return item;
  }
  function flat(b, list = []) {
    list.push(b);
    if (b.open) for (const child of b.kids.values()) flat(child, list);
    return list;
  }
  function render(focus) {
    const rows = flat(root).map(row);
    box.replaceChildren(...rows);
    const chosen = rows.find((r) => r.branch === focus) || rows[0];
    if (chosen) chosen.tabIndex = 0;
    if (focus && chosen) chosen.focus();
  }
  function toggle(b, open = !b.open) {
    if (b.kids.size) (b.open = open), render(b);
  }
  box.addEventListener("click", (event) => {
    const item = event.target.closest(".branch");
    if (!item) return;
    if (event.target.closest(".show")) Table.search(item.branch.path);
    else toggle(item.branch);
  });
  box.addEventListener("keydown", (event) => {
    const item = event.target.closest(".branch");
    if (!item) return;
    const move = (to) => to && to.classList.contains("branch") && to.focus();
    const act = {
      ArrowDown: () => move(item.nextElementSibling), ArrowUp: () => move(item.previousElementSibling),
      ArrowRight: () => (item.branch.open ? move(item.nextElementSibling) : toggle(item.branch, true)),
      ArrowLeft: () => toggle(item.branch, false),
      Enter: () => Table.search(item.branch.path), " ": () => toggle(item.branch),
    }[event.key];
    if (act) event.preventDefault(), act();
  });
  function all(b, open) {
    b.open = open || b === root;
    for (const child of b.kids.values()) all(child, open);
  }
  // Opening everything is bounded: a page with thousands of rows would only scroll.
  $("tree-open").addEventListener("click", () => {
    const level = flat(root).filter((b) => b.kids.size && !b.open);
    for (const b of level.slice(0, 400)) b.open = true;
    render();
  });
  $("tree-close").addEventListener("click", () => (all(root, false), render()));
  $("tree-heads").append(...STEPS.map((s) => el("span", {}, STEPS.length > 1 ? String(s) : "worst")));
  const wide = STEPS.length <= 8 ? 44 : Math.max(3, Math.floor(352 / STEPS.length));
  $("modules").style.setProperty("--cell", `${wide}px`);
  if (STEPS.length > 8) $("modules").classList.add("tight");
  render();
  return { root };
})();

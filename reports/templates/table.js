// All nodes in one table: filter, sort, search. Only the rows in view exist, so ten thousand nodes scroll like ten.
const Table = (() => {
  const view = $("table-view"), body = $("table-body"), above = $("table-above"), below = $("table-below");
  const ROW = 30;
  const COLUMNS = {
    order: { value: (i) => i, cell: (i) => whole(i) },
    node: { value: (i) => text("key", i), cell: (i) => nodeCell(i), isText: true },
    class: { value: (i) => text("class", i), cell: (i) => text("class", i), isText: true },
    dtype: { value: (i) => text("dtype", i), cell: (i) => text("dtype", i), isText: true },
    shape: { value: (i) => text("shape", i), cell: (i) => text("shape", i), isText: true },
    candidate: { value: (i) => measure("candidate", "rel_l2", i), cell: (i) => figure(measure("candidate", "rel_l2", i)) },
    baseline: { value: (i) => measure("baseline", "rel_l2", i), cell: (i) => figure(measure("baseline", "rel_l2", i)) },
    ratio: { value: excess, cell: (i) => times(excess(i)) },
    max_abs: { value: (i) => measure("candidate", "max_abs", i), cell: (i) => figure(measure("candidate", "max_abs", i)) },
    cosine: { value: (i) => measure("candidate", "cosine_distance", i), cell: (i) => figure(measure("candidate", "cosine_distance", i)) },
    status: { value: null, cell: badge },
  };
  const chosen = new Set();
  let rows = [], sort = "status", isDown = true, selected = -1, query = "", step = "", kind = "";

  function nodeCell(i) {
    const key = text("key", i), path = text("path", i);
    const rest = key.startsWith(path) ? key.slice(path.length) : "";
    const link = el("a", { href: nodeHash(i), class: "key", title: key, tabindex: "-1" }, el("span", { class: "path" }, rest ? path : key), el("span", { class: "rest" }, rest));
    return link;
  }
  function matches(i) {
    if (chosen.size && !chosen.has(D.status[i])) return false;
    if (step !== "" && D.step[i] !== Number(step)) return false;
    if (kind && text("class", i) !== kind) return false;
    if (!query) return true;
    return `${text("key", i)} ${text("type", i)} ${text("site", i)}`.toLowerCase().includes(query);
  }
  function compare(a, b) {
    const column = COLUMNS[sort];
    if (!column.value) return isDown ? graver(a, b) : graver(b, a);
    const x = column.value(a), y = column.value(b);
    if (column.isText) return (x < y ? -1 : x > y ? 1 : a - b) * (isDown ? -1 : 1);
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || a - b; // unknown always last
    return x === y ? a - b : (x < y ? -1 : 1) * (isDown ? -1 : 1);
  }
  function update() {
    rows = [];
    for (let i = 0; i < N; i++) if (matches(i)) rows.push(i);
    rows.sort(compare);
    selected = -1;
    view.scrollTop = 0;
    $("table-count").textContent = `${whole(rows.length)} of ${whole(N)} nodes`;
    $("table-none").hidden = rows.length > 0;
    for (const head of document.querySelectorAll("#table-head th")) {
      const isSorted = head.dataset.column === sort;
      head.setAttribute("aria-sort", isSorted ? (isDown ? "descending" : "ascending") : "none");
    }
    paint();
  }
  function paint(limit = 0) {
    const first = limit ? 0 : Math.max(0, Math.floor(view.scrollTop / ROW) - 6);
    const last = Math.min(rows.length, limit || Math.ceil((view.scrollTop + view.clientHeight) / ROW) + 6);
    above.style.height = `${first * ROW}px`;
    below.style.height = `${limit ? 0 : (rows.length - last) * ROW}px`;
    body.replaceChildren(...rows.slice(first, last).map((i, offset) => line(i, first + offset)));
  }
  function line(i, position) {
    const cells = Object.entries(COLUMNS).map(([name, column]) => {
      const cell = el("td", { class: `t-${name}` }, column.cell(i));
      if (name === "ratio") cell.style.setProperty("--bar", `${Math.round(warmth(excess(i) || 1) * 100)}%`);
      return cell;
    });
    return el("tr", { "aria-rowindex": position + 2, "aria-selected": position === selected, "data-node": i }, ...cells);
  }
  function pick(position) {
    if (!rows.length) return;
    selected = Math.max(0, Math.min(rows.length - 1, position));
    const top = selected * ROW, room = view.clientHeight - 2 * ROW;
    if (top < view.scrollTop) view.scrollTop = top;
    else if (top > view.scrollTop + room) view.scrollTop = top - room;
    paint();
  }
  view.addEventListener("scroll", () => requestAnimationFrame(() => paint()));
  view.addEventListener("keydown", (event) => {
    const page = Math.floor(view.clientHeight / ROW) - 2;
    const act = {
      ArrowDown: () => pick(selected + 1), ArrowUp: () => pick(selected - 1), PageDown: () => pick(selected + page),
      PageUp: () => pick(selected - page), Home: () => pick(0), End: () => pick(rows.length - 1),
      Enter: () => selected >= 0 && (location.hash = nodeHash(rows[selected])),
    }[event.key];
    if (act) event.preventDefault(), act();
  });
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row && !event.target.closest("a")) location.hash = nodeHash(Number(row.dataset.node));
  });
  $("table-head").addEventListener("click", (event) => {
    const head = event.target.closest("th");
    if (!head) return;
    const name = head.dataset.column;
    isDown = sort === name ? !isDown : !(COLUMNS[name].isText || name === "order");
    sort = name;
    update();
  });
  function chips() {
    const tally = D.statuses.map(() => 0);
    for (let i = 0; i < N; i++) tally[D.status[i]]++;
    D.statuses.forEach((s, index) => {
      if (!tally[index]) return;
      const chip = el("button", { class: `chip s-${s.name}`, type: "button", "aria-pressed": "false", "data-status": s.name },
        el("span", { class: "mark", "aria-hidden": "true" }, s.mark), `${s.name} `, el("span", { class: "muted" }, whole(tally[index])));
      chip.addEventListener("click", () => {
        chosen.has(index) ? chosen.delete(index) : chosen.add(index);
        chip.setAttribute("aria-pressed", chosen.has(index));
        update();
      });
      $("table-chips").append(chip);
    });
  }
  function options(id, values, act) {
    $(id).append(...values.map((v) => el("option", { value: v }, String(v))));
    $(id).hidden = values.length < 2;
    $(id).addEventListener("change", (event) => (act(event.target.value), update()));
  }
  chips();
  options("table-step", STEPS, (v) => (step = v));
  options("table-class", [...new Set(D.columns.class.map((c) => D.strings[c]))].sort(), (v) => (kind = v));
  $("table-search").addEventListener("input", (event) => ((query = event.target.value.toLowerCase()), update()));
  function search(words) {
    $("table-search").value = words;
    query = words.toLowerCase();
    update();
    $("nodes").scrollIntoView({ block: "start" });
  }
  update();
  return { search, rows: () => rows, paint, neighbour: (i, by) => rows[rows.indexOf(i) + by] };
})();

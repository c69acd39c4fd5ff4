// Small pictures for a node's page: histogram of errors, error over the steps, map of where the error sits.
const Figures = (() => {
  const BINS = 72, LOW = -12; // quarter decades from 1e-12, after one bin for all below
  function histogram(candidate, baseline) {
    const W = 500, H = 128, sides = [[baseline, "baseline"], [candidate, "candidate"]].filter(([d]) => d);
    let first = BINS, last = 1;
    for (const [d] of sides) d.histogram.forEach((v, b) => b && v && ((first = Math.min(first, b)), (last = Math.max(last, b))));
    if (last < first) (first = 1), (last = 8);
    first = Math.max(1, first - 1);
    last = Math.min(BINS, last + 1);
    const step = (W - 92) / (last - first + 1), x = (b) => 84 + (b - first) * step;
    const chart = svg("svg", { viewBox: `0 0 ${W} ${H + 20}`, class: "histogram", role: "img", "aria-label": "histogram of absolute errors" });
    const share = (d) => { const all = d.histogram.reduce((a, v) => a + v, 0) || 1; return d.histogram.map((v) => v / all); };
    const shares = sides.map(([d, name]) => [share(d), name]), peak = Math.max(...shares.flatMap(([s]) => s)) || 1;
    const y = (v) => H - (v / peak) * (H - 8);
    for (const [s, name] of shares) {
      const steps = [`M${x(first)},${H}`];
      for (let b = first; b <= last; b++) steps.push(`V${y(s[b])}H${x(b + 1)}`);
      chart.append(svg("path", { d: `${steps.join("")}V${H}`, class: `h-${name}` }), svg("rect", { x: name === "candidate" ? 31 : 15, y: y(s[0]), width: 14, height: H - y(s[0]), class: `h-${name}` }));
    }
    chart.append(svg("line", { x1: 0, x2: W, y1: H, y2: H, class: "axis" }), label(30, H + 14, "≤1e-12"));
    const every = last - first > 28 ? 8 : 4;
    for (let b = first; b <= last + 1; b++) {
      const e = LOW + (b - 1) / 4;
      if (Number.isInteger(e) && (b - 1) % every === 0) chart.append(svg("line", { x1: x(b), x2: x(b), y1: H, y2: H + 4, class: "axis" }), label(x(b), H + 14, `1e${e}`));
    }
    return chart;
  }
  function label(x, y, words) {
    const node = svg("text", { x, y, "text-anchor": "middle" });
    node.textContent = words;
    return node;
  }
  // The same call in every step, so that a reader sees whether the error grows over the loop.
  function overSteps(same) {
    const W = 500, H = 74, values = same.flatMap((i) => [measure("candidate", "rel_l2", i), measure("baseline", "rel_l2", i)]).filter((v) => v > 0 && Number.isFinite(v));
    if (same.length < 2 || !values.length) return null;
    const low = Math.log10(Math.min(...values)) - 0.1, high = Math.log10(Math.max(...values)) + 0.1;
    const x = (n) => 20 + (n / (same.length - 1)) * (W - 90), y = (v) => H - 6 - ((Math.log10(v) - low) / (high - low)) * (H - 14);
    const chart = svg("svg", { viewBox: `0 0 ${W} ${H + 18}`, class: "steps", role: "img", "aria-label": "error of this call in every step" });
    for (const side of ["baseline", "candidate"]) {
      const known = same.map((i, n) => [n, measure(side, "rel_l2", i)]).filter(([, v]) => v > 0 && Number.isFinite(v));
      chart.append(svg("polyline", { points: known.map(([n, v]) => `${x(n)},${y(v)}`).join(" "), class: `l-${side}` }));
      for (const [n, v] of known) chart.append(svg("circle", { cx: x(n), cy: y(v), r: 3, class: `d-${side}` }));
      if (known.length) {
        const [n, v] = known[known.length - 1], words = label(x(n) + 9, y(v) + 4, figure(v));
        words.setAttribute("text-anchor", "start");
        chart.append(words);
      }
    }
    const every = Math.ceil(same.length / 12);
    same.forEach((i, n) => n % every === 0 && chart.append(label(x(n), H + 14, `step ${D.step[i]}`)));
    return chart;
  }
  // Viridis at five places: even steps of lightness, so the map also reads in grey.
  const SCALE = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
  function tint(t) {
    const at = Math.max(0, Math.min(0.9999, t)) * 4, k = Math.floor(at);
    return SCALE[k].map((v, n) => Math.round(v + (SCALE[k + 1][n] - v) * (at - k)));
  }
  function errorMap(page) {
    const { rows: height, columns: width, low, high } = page.map;
    const levels = Uint8Array.from(atob(page.map.levels), (letter) => letter.charCodeAt(0));
    const says = (level) => (level === 255 ? "not finite" : level ? `about ${figure(10 ** (low + ((level - 1) / 253) * (high - low)))}` : `0 or below ${figure(10 ** low)}`);
    const canvas = el("canvas", { width, height, class: "map", role: "img", "aria-label": "map of absolute errors" });
    const c = canvas.getContext("2d"), image = c.createImageData(width, height);
    levels.forEach((level, n) => image.data.set([...(level === 255 ? [255, 0, 255] : tint((level - 1) / 253)), 255], n * 4));
    c.putImageData(image, 0, 0);
    const line = el("div", { class: "muted figures" }, `${height} × ${width} cells, each the largest |c − r| in it`);
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect(), r = Math.floor(((event.clientY - box.top) / box.height) * height), k = Math.floor(((event.clientX - box.left) / box.width) * width);
      if (r >= 0 && r < height && k >= 0 && k < width) line.textContent = `${page.map_rows || "row"} ${r}, ${page.map_columns || "column"} ${k}: ${says(levels[r * width + k])}`;
    });
    canvas.style.height = `${Math.max(80, Math.min(300, Math.round((height / width) * 420)))}px`;
    return el("div", { class: "map-box" },
      el("div", { class: "map-rows muted" }, `${page.map_rows || "rows"} ↓`),
      el("div", {}, canvas, el("div", { class: "map-scale" }, el("span", {}, figure(10 ** low)), el("span", { class: "bar" }), el("span", {}, figure(10 ** high))),
        el("div", { class: "muted" }, `${page.map_columns || "columns"} →`), line));
  }
  return { histogram, overSteps, errorMap };
})();

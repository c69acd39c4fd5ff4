// The error of every node in execution order: baseline, candidate and noise floor on a logarithmic scale.
const Chart = (() => {
  const canvas = $("chart"), tip = $("chart-tip"), live = $("chart-live");
  const PAD = { left: 58, right: 14, top: 26, bottom: 42 };
  let points = [], from = 0, to = 1, cursor = -1, metric = "rel_l2", step = "all", drag = null, scale = null;

  function select() {
    points = [];
    for (let i = 0; i < N; i++) if (step === "all" || D.step[i] === Number(step)) points.push(i);
    reset();
  }
  function reset() {
    from = 0;
    to = Math.max(1, points.length);
    draw();
  }
  const shown = { candidate: true, baseline: true, floor: true };
  const value = (side, i) => (side === "floor" ? number(D.floor[i]) : measure(side, metric, i));
  const series = () => ["floor", "baseline", "candidate"].filter((s) => shown[s] && (s !== "floor" || (metric === "rel_l2" && D.floor.length)));

  function rangeOfValues() {
    let low = Infinity, high = -Infinity;
    for (let p = Math.max(0, Math.floor(from)); p < Math.min(points.length, Math.ceil(to)); p++)
      for (const side of series()) {
        const v = value(side, points[p]);
        if (v > 0 && Number.isFinite(v)) (low = Math.min(low, v)), (high = Math.max(high, v));
      }
    if (low > high) return [-6, 0];
    const a = Math.log10(low), b = Math.log10(high), room = Math.max(0.12, (b - a) * 0.08);
    return [a - room, b + room];
  }
  function measureCanvas() {
    const box = canvas.getBoundingClientRect(), dpr = window.devicePixelRatio || 1;
    canvas.width = Math.round(box.width * dpr);
    canvas.height = Math.round(box.height * dpr);
    const [low, high] = rangeOfValues();
    const width = box.width - PAD.left - PAD.right, height = box.height - PAD.top - PAD.bottom;
    scale = {
      dpr, box, width, height, low, high,
      x: (p) => PAD.left + ((p + 0.5 - from) / (to - from)) * width,
      y: (v) => PAD.top + height - ((Math.log10(v) - low) / (high - low)) * height,
      at: (x) => from + ((x - PAD.left) / width) * (to - from),
    };
  }
  function draw() {
    if (!canvas.offsetParent && !canvas.getClientRects().length) return;
    measureCanvas();
    const c = canvas.getContext("2d");
    c.setTransform(scale.dpr, 0, 0, scale.dpr, 0, 0);
    c.clearRect(0, 0, scale.box.width, scale.box.height);
    c.font = "11px " + colour("sans");
    grid(c);
    c.save();
    c.beginPath();
    c.rect(PAD.left, PAD.top - 18, scale.width, scale.height + 34);
    c.clip();
    steps(c);
    if (series().includes("floor")) band(c);
    if (shown.baseline) line(c, "baseline", colour("baseline"), 1.2);
    if (shown.candidate) line(c, "candidate", colour("candidate"), 1.6);
    marks(c);
    origins(c);
    if (drag && drag.zoom) shade(c);
    c.restore();
    if (cursor >= 0) crosshair(c);
  }
  function grid(c) {
    c.strokeStyle = colour("rule");
    c.fillStyle = colour("quiet");
    c.textAlign = "right";
    c.textBaseline = "middle";
    const fine = scale.high - scale.low < 3.2;
    for (let e = Math.floor(scale.low); e <= scale.high; e++)
      for (const m of fine ? [1, 2, 5] : [1]) {
        const v = m * 10 ** e, l = Math.log10(v);
        if (l < scale.low || l > scale.high) continue;
        const y = Math.round(scale.y(v)) + 0.5;
        c.globalAlpha = m === 1 ? 1 : 0.55;
        c.beginPath();
        c.moveTo(PAD.left, y);
        c.lineTo(PAD.left + scale.width, y);
        c.stroke();
        c.globalAlpha = 1;
        c.fillText(v >= 0.001 && v < 1e4 ? String(Number(v.toPrecision(1))) : `${m}e${e}`, PAD.left - 8, y);
      }
  }
  function steps(c) {
    c.fillStyle = colour("quiet");
    c.textAlign = "left";
    c.textBaseline = "alphabetic";
    for (let p = 0; p < points.length; p++) {
      const isFirst = p === 0 || D.step[points[p]] !== D.step[points[p - 1]];
      if (!isFirst || STEPS.length < 2) continue;
      const x = Math.round(scale.x(p - 0.5)) + 0.5;
      c.strokeStyle = colour("edge");
      c.beginPath();
      c.moveTo(x, PAD.top - 14);
      c.lineTo(x, PAD.top + scale.height);
      if (p) c.stroke();
      c.fillText(`step ${D.step[points[p]]}`, Math.max(x, PAD.left) + 5, PAD.top - 6);
    }
  }
  function visible() {
    return [Math.max(0, Math.floor(from) - 1), Math.min(points.length, Math.ceil(to) + 1)];
  }
  function band(c) {
    const [a, b] = visible(), bottom = PAD.top + scale.height;
    c.fillStyle = colour("floor");
    c.beginPath();
    c.moveTo(scale.x(a), bottom);
    for (let p = a; p < b; p++) {
      const v = value("floor", points[p]);
      if (v > 0) c.lineTo(scale.x(p), Math.min(bottom, scale.y(v)));
    }
    c.lineTo(scale.x(b - 1), bottom);
    c.fill();
  }
  // Several nodes a pixel: a pale bar from least to largest, and their middle as the line.
  function dense(c, side, stroke) {
    const [a, b] = visible(), bottom = PAD.top + scale.height, per = (to - from) / scale.width, middle = [];
    c.fillStyle = c.strokeStyle = stroke;
    c.globalAlpha = 0.3;
    for (let x = 0; x < scale.width; x++) {
      const values = [];
      for (let p = Math.max(a, Math.round(from + x * per)); p < Math.min(b, Math.round(from + (x + 1) * per)); p++) {
        const v = value(side, points[p]);
        if (!Number.isNaN(v)) values.push(v > 0 ? (Number.isFinite(v) ? Math.min(bottom, scale.y(v)) : PAD.top) : bottom);
      }
      if (!values.length) continue;
      values.sort((p, q) => p - q);
      c.fillRect(PAD.left + x, values[0], 1, values[values.length - 1] - values[0]);
      middle.push([PAD.left + x + 0.5, values[values.length >> 1]]);
    }
    c.globalAlpha = 1;
    c.beginPath();
    middle.forEach(([x, y]) => c.lineTo(x, y));
    c.stroke();
  }
  function line(c, side, stroke, width) {
    if ((to - from) / scale.width > 2.5) return dense(c, side, stroke);
    const [a, b] = visible(), bottom = PAD.top + scale.height;
    c.strokeStyle = c.fillStyle = stroke;
    c.lineWidth = width;
    c.lineJoin = "round";
    c.beginPath();
    let open = false;
    const perNode = scale.width / (to - from), dots = [];
    for (let p = a; p < b; p++) {
      const v = value(side, points[p]);
      if (Number.isNaN(v)) continue; // no tensor (inside a fused kernel): the line bridges it
      const y = v > 0 ? (Number.isFinite(v) ? Math.min(bottom, scale.y(v)) : PAD.top) : bottom, x = scale.x(p);
      if (open) c.lineTo(x, y);
      else c.moveTo(x, y);
      open = true;
      if (perNode > 7) dots.push([x, y]);
    }
    c.stroke();
    c.lineWidth = 1;
    for (const [x, y] of dots) c.fillRect(x - 1.75, y - 1.75, 3.5, 3.5);
  }
  // A strip below the plot tells each node's status: by height and shape, not by colour alone.
  function marks(c) {
    const [a, b] = visible(), y = PAD.top + scale.height + 6, wide = Math.max(1, scale.width / (to - from) - 0.5);
    for (let p = a; p < b; p++) {
      const i = points[p], s = statusOf(i), x = scale.x(p) - wide / 2;
      if (s.fault) {
        c.fillStyle = colour(s.name === "drift" ? "drift" : "broken");
        c.fillRect(x, y, wide, 9);
      } else if (s.name === "fused-away") {
        c.fillStyle = colour("quiet");
        c.fillRect(x, y + 3.5, wide, 2);
      }
      if (s.fault && s.name !== "drift") {
        const v = value("candidate", i), top = v > 0 ? scale.y(v) : PAD.top + 8;
        c.textAlign = "center";
        c.textBaseline = "middle";
        c.font = "bold 14px " + colour("sans");
        c.fillText(s.mark, scale.x(p), top);
        c.font = "11px " + colour("sans");
      }
    }
  }
  function origins(c) {
    for (const i of D.origins) {
      const p = points.indexOf(i);
      if (p < 0 || p < from - 1 || p > to) continue;
      const x = scale.x(p), label = `drift begins: ${text("path", i) || text("key", i)}`;
      const v = value("candidate", i), y = v > 0 ? scale.y(v) : PAD.top;
      c.strokeStyle = c.fillStyle = colour("drift");
      c.setLineDash([3, 3]);
      c.beginPath();
      c.moveTo(x, PAD.top);
      c.lineTo(x, PAD.top + scale.height);
      c.stroke();
      c.setLineDash([]);
      c.beginPath();
      c.arc(x, y, 4, 0, 7);
      c.fill();
      const isLeft = x > PAD.left + scale.width * 0.6;
      c.textAlign = isLeft ? "right" : "left";
      c.textBaseline = "top";
      c.font = "600 11px " + colour("sans");
      const room = c.measureText(label).width;
      c.globalAlpha = 0.9;
      c.fillStyle = colour("paper");
      c.fillRect(isLeft ? x - room - 10 : x + 4, PAD.top + 1, room + 6, 16);
      c.globalAlpha = 1;
      c.fillStyle = colour("drift");
      c.fillText(label, isLeft ? x - 7 : x + 7, PAD.top + 4);
      c.font = "11px " + colour("sans");
    }
  }
  function shade(c) {
    c.fillStyle = colour("candidate");
    c.globalAlpha = 0.12;
    c.fillRect(Math.min(drag.x, drag.now), PAD.top, Math.abs(drag.now - drag.x), scale.height);
    c.globalAlpha = 1;
  }
  function crosshair(c) {
    const x = scale.x(cursor);
    c.strokeStyle = colour("quiet");
    c.beginPath();
    c.moveTo(x, PAD.top);
    c.lineTo(x, PAD.top + scale.height + 16);
    c.stroke();
    for (const side of ["baseline", "candidate"]) {
      const v = value(side, points[cursor]);
      if (!shown[side] || !(v > 0) || !Number.isFinite(v)) continue;
      c.fillStyle = colour(side);
      c.beginPath();
      c.arc(x, scale.y(v), 3.5, 0, 7);
      c.fill();
    }
  }
  function say() {
    if (cursor < 0) return (tip.hidden = true);
    const i = points[cursor], rows = [["candidate", value("candidate", i)], ["baseline", value("baseline", i)]];
    if (metric === "rel_l2" && D.floor.length) rows.push(["noise floor", value("floor", i)]);
    tip.replaceChildren(
      el("strong", { class: "key" }, text("key", i)),
      el("div", { class: "muted" }, `${text("type", i)} · ${text("dtype", i)} · ${text("shape", i)}`),
      el("dl", {}, ...rows.flatMap(([name, v]) => [el("dt", { class: `c-${name.split(" ")[0]}` }, name), el("dd", {}, figure(v))]),
        el("dt", {}, "ratio"), el("dd", {}, times(ratioOf(value("candidate", i), value("baseline", i))))),
      badge(i));
    tip.hidden = false;
    const x = scale.x(cursor), half = tip.offsetWidth / 2;
    tip.style.left = `${Math.max(4, Math.min(scale.box.width - 2 * half - 4, x < scale.box.width / 2 ? x + 14 : x - 2 * half - 14))}px`;
    live.textContent = `${text("key", i)}: candidate ${figure(value("candidate", i))}, baseline ${figure(value("baseline", i))}, ${statusOf(i).name}`;
  }
  function point(p) {
    cursor = points.length && p >= 0 ? Math.max(0, Math.min(points.length - 1, p)) : -1;
    if (cursor >= 0 && (cursor < from || cursor >= to)) pan(cursor - (from + to) / 2);
    draw();
    say();
  }
  function view(a, b) {
    const span = Math.min(points.length, Math.max(4, b - a)), middle = (a + b) / 2;
    from = Math.max(0, Math.min(points.length - span, middle - span / 2));
    to = from + span;
    draw();
  }
  const zoom = (factor, centre = (from + to) / 2) => view(centre - (centre - from) * factor, centre + (to - centre) * factor);
  const pan = (by) => view(from + by, to + by);
  const localX = (event) => event.clientX - canvas.getBoundingClientRect().left;

  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: localX(event), now: localX(event), from, to, zoom: !event.shiftKey };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const x = localX(event);
    if (drag) {
      drag.now = x;
      if (!drag.zoom) {
        const by = ((drag.x - x) / scale.width) * (drag.to - drag.from);
        view(drag.from + by, drag.to + by);
      }
    }
    point(Math.floor(scale.at(x)));
  });
  canvas.addEventListener("pointerup", (event) => {
    const was = drag, x = localX(event);
    drag = null;
    if (!was) return;
    if (Math.abs(x - was.x) > 5) return was.zoom && view(scale.at(Math.min(x, was.x)), scale.at(Math.max(x, was.x)));
    point(Math.floor(scale.at(x)));
    if (cursor >= 0) location.hash = nodeHash(points[cursor]);
  });
  canvas.addEventListener("pointerleave", () => !drag && point(-1));
  canvas.addEventListener("dblclick", reset);
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // the page's own scrolling comes first
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, scale.at(localX(event)));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const act = {
      ArrowLeft: () => (event.shiftKey ? pan((from - to) / 8) : point(cursor < 0 ? Math.floor(from) : cursor - 1)),
      ArrowRight: () => (event.shiftKey ? pan((to - from) / 8) : point(cursor + 1)),
      "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1.4), 0: reset, Escape: () => point(-1),
      Enter: () => cursor >= 0 && (location.hash = nodeHash(points[cursor])),
    }[event.key];
    if (act) event.preventDefault(), act();
  });
  $("chart-in").addEventListener("click", () => zoom(0.6));
  $("chart-out").addEventListener("click", () => zoom(1.6));
  $("chart-reset").addEventListener("click", reset);
  $("chart-metric").addEventListener("change", (event) => ((metric = event.target.value), draw(), say()));
  $("chart-step").append(...(STEPS.length > 1 ? [el("option", { value: "all" }, "all steps")] : []), ...STEPS.map((s) => el("option", { value: s }, `step ${s}`)));
  if (STEPS.length === 1) step = String(STEPS[0]);
  $("chart-step").addEventListener("change", (event) => ((step = event.target.value), select()));
  for (const side of Object.keys(shown)) {
    const box = $(`show-${side}`);
    if (side === "floor" && !D.floor.length) box.closest("label").hidden = true;
    box.addEventListener("change", () => ((shown[side] = box.checked), draw()));
  }
  new ResizeObserver(draw).observe(canvas.parentElement);
  select();
  return { draw, view: () => [from, to], cursor: () => cursor };
})();

// The page of one node: what is said of it, every measure, the three runs, where the error lies, what it read and fed.
const Drawer = (() => {
  const drawer = $("drawer"), content = $("drawer-content");
  let current = -1, before = null;
  const ROWS = [
    ["rel_l2", "relative L2"], ["max_abs", "max |c − r|"], ["cosine_distance", "1 − cosine"], ["rmse", "RMSE"], ["mere", "mean relative"],
    ["mare", "max relative"], ["ulp_p50", "ULP p50"], ["ulp_p99", "ULP p99"], ["ulp_max", "ULP max"], ["share_close", "share within 1e-3"],
    ["snr_db", "SNR, dB"], ["small_errors", "small-value misses"], ["zero_rows", "rows gone to zero"], ["nan_candidate", "NaN"], ["inf_candidate", "Inf"], ["mismatched", "non-finite mismatches"],
  ];
  const HIGHER_IS_BETTER = new Set(["share_close", "snr_db"]);
  const NO_RATIO = new Set([...HIGHER_IS_BETTER, "small_errors", "zero_rows", "nan_candidate", "inf_candidate", "mismatched"]);
  const COUNTS = new Set(["small_errors", "zero_rows", "nan_candidate", "inf_candidate", "mismatched", "ulp_p50", "ulp_p99", "ulp_max"]);
  const show = (name, v) => (COUNTS.has(name) && Number.isInteger(v) && v < 1e6 ? whole(v) : figure(v));

  const section = (title, ...children) => el("section", {}, el("h3", {}, title), ...children);
  const grid = (heads, rows, kind = "") => el("table", { class: `grid ${kind}` }, el("thead", {}, el("tr", {}, ...heads.map((h) => el("th", { scope: "col" }, h)))),
    el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map((cell, n) => el(n ? "td" : "th", n ? {} : { scope: "row" }, cell))))));

  function errors(i) {
    if (!hasFigures(i)) return section("Error against the reference", el("p", { class: "muted" }, text("problem", i) || "There is no tensor of this node in the candidate to measure."), baselineOnly(i));
    const rows = ROWS.filter(([name]) => !COUNTS.has(name) || name.startsWith("ulp") || measure("candidate", name, i) || measure("baseline", name, i)).map(([name, words]) => {
      const c = measure("candidate", name, i), b = measure("baseline", name, i);
      return [words, show(name, c), show(name, b), NO_RATIO.has(name) ? "" : times(ratioOf(c, b))];
    });
    const at = text("at", i);
    return section("Error against the reference", grid(["", "candidate", "baseline", "ratio"], rows), at ? el("p", { class: "muted" }, `largest error at [${at}]`) : "");
  }
  function baselineOnly(i) {
    const b = measure("baseline", "rel_l2", i);
    return Number.isNaN(b) ? "" : el("p", {}, `The baseline's relative L2 error here is ${figure(b)}.`);
  }
  function runs(i, page) {
    const names = [["minimum", "min"], ["maximum", "max"], ["mean", "mean"], ["std", "std"], ["absmax", "max |x|"], ["l2", "L2 norm"], ["nan", "NaN"], ["posinf", "+Inf"], ["neginf", "−Inf"], ["zero", "zeros"], ["subnormal", "subnormal"], ["near_limit", "near the dtype's limit"]];
    if (page && page.statistics.some(Boolean)) {
      const rows = names.filter(([name]) => ["minimum", "maximum", "mean", "std", "absmax", "l2"].includes(name) || page.statistics.some((s) => s && s[name]))
        .map(([name, words]) => [words, ...page.statistics.map((s) => (s ? (Number.isInteger(s[name]) ? whole(s[name]) : figure(number(s[name]))) : "–"))]);
      return section("Values in the three runs", grid(["", "reference", "baseline", "candidate"], rows));
    }
    if (!hasFigures(i)) return "";
    const rows = [["min", "min"], ["max", "max"], ["mean", "mean"]].map(([name, words]) => [words, figure(measure("candidate", `${name}_reference`, i)), figure(measure("baseline", `${name}_candidate`, i)), figure(measure("candidate", `${name}_candidate`, i))]);
    return section("Values in the three runs", grid(["", "reference", "baseline", "candidate"], rows));
  }
  function spread(page) {
    const d = page.detail;
    const where = d.axes.filter(([, , share]) => share > 0.3).map(([axis, extent, share]) => el("li", {}, `An eighth of axis ${axis} (${extent} slices) carries ${(share * 100).toFixed(0)} % of the squared error.`));
    const quantiles = d.quantiles.map(([p, v]) => [p === 1 ? "max" : `p${Number((p * 100).toPrecision(5))}`, figure(number(v)), page.baseline_detail ? figure(number((page.baseline_detail.quantiles.find(([q]) => q === p) || [])[1])) : "–"]);
    return section("Spread of |c − r|", Figures.histogram(d, page.baseline_detail), where.length ? el("ul", { class: "plainlist" }, ...where) : "", grid(["", "candidate", "baseline"], quantiles, "narrow"));
  }
  function worst(page) {
    const rows = page.detail.worst.map(([index, c, r]) => [`[${index.join(", ")}]`, figure(number(c)), figure(number(r)), figure(Math.abs(number(c) - number(r)))]);
    return rows.length ? section("Worst positions", grid(["position", "candidate", "reference", "|c − r|"], rows)) : "";
  }
  function flow(title, list) {
    if (!list.length) return "";
    const rows = list.slice(0, 12).map((i) => [nodeLink(i), figure(measure("candidate", "rel_l2", i)), times(excess(i)), badge(i)]);
    return section(title, grid(["node", "error", "ratio", ""], rows, "flow"), list.length > 12 ? el("p", { class: "muted" }, `and ${list.length - 12} more`) : "");
  }
  function overSteps(i) {
    const same = [];
    for (let j = 0; j < N; j++) if (["path", "op", "slot"].every((c) => D.columns[c][j] === D.columns[c][i]) && callOf(j) === callOf(i)) same.push(j);
    const picture = Figures.overSteps(same);
    return picture ? section("Error over the steps", picture) : "";
  }
  const callOf = (i) => text("key", i).replace(/@\d+(?=(%\d+)?$)/, "");

  function fill(i) {
    const page = D.pages[i], floor = D.floor.length ? number(D.floor[i]) : NaN;
    const about = [text("type", i), text("kind", i), text("class", i), text("dtype", i), text("shape", i), text("pairing", i)].filter(Boolean).join(" · ");
    const said = text("why", i) || (text("metric", i) ? `${text("metric", i)} ${figure(number(D.value[i]))}, allowed ${figure(number(D.limit[i]))}` : "");
    const parts = [
      el("p", { class: `said s-${statusOf(i).name}` }, badge(i), said ? ` ${said}` : ""),
      el("p", { class: "muted" }, about),
      text("site", i) ? el("p", {}, "fused site ", el("code", {}, text("site", i))) : "",
      Number.isNaN(floor) ? "" : el("p", { class: "muted" }, `Rounding alone explains a relative L2 up to ${figure(floor)} here.`),
      errors(i), runs(i, page), overSteps(i),
      ...(page && page.detail ? [spread(page), worst(page)] : []),
      page && page.map ? section("Where the error sits", Figures.errorMap(page)) : "",
      page ? "" : el("p", { class: "muted" }, "Histogram, positions and map are kept for the nodes most worth opening; this is not one of them."),
      flow("Reads from", D.producers[i]), flow("Read by", CONSUMERS[i]),
    ];
    $("drawer-title").textContent = text("key", i);
    content.replaceChildren(...parts.filter(Boolean));
    content.scrollTop = 0;
    $("drawer-place").textContent = `${whole(i + 1)} of ${whole(N)}, step ${D.step[i]}`;
  }
  function open(i) {
    if (current < 0) before = document.activeElement;
    current = i;
    fill(i);
    drawer.hidden = false;
    document.body.classList.add("has-drawer");
    $("drawer-close").focus({ preventScroll: true });
  }
  function close() {
    if (current < 0) return;
    current = -1;
    drawer.hidden = true;
    document.body.classList.remove("has-drawer");
    if (location.hash.startsWith("#node=")) history.replaceState(null, "", location.pathname + location.search);
    if (before && before.isConnected) before.focus({ preventScroll: true });
  }
  const go = (by) => KEYS.size && current + by >= 0 && current + by < N && (location.hash = nodeHash(current + by));
  $("drawer-close").addEventListener("click", close);
  $("drawer-previous").addEventListener("click", () => go(-1));
  $("drawer-next").addEventListener("click", () => go(1));
  $("drawer-copy").addEventListener("click", () => navigator.clipboard && navigator.clipboard.writeText(text("key", current)).catch(() => {}));
  document.addEventListener("keydown", (event) => {
    if (current < 0 || event.target.matches("input, select, canvas")) return;
    if (event.key === "Escape") close();
    if (event.key === "j" || event.key === "ArrowRight") go(1);
    if (event.key === "k" || event.key === "ArrowLeft") go(-1);
  });
  return { open, close, current: () => current };
})();

// Reads the packed nodes back and gives every other script its words: figures, elements, what a node is.
const D = JSON.parse(document.getElementById("data").textContent);
const N = D.status.length;
const number = (v) => (v === null || v === undefined ? NaN : Number(v));
const text = (column, i) => D.strings[D.columns[column][i]];
const measure = (side, name, i) => number(D.measures[side][name][i]);
const STEPS = [...new Set(D.step)].sort((a, b) => a - b);
const NOT_JUDGED = new Set(D.hidden);
const STATUS = Object.fromEntries(D.statuses.map((s, index) => [s.name, index]));
const statusOf = (i) => D.statuses[D.status[i]];
const isFault = (i) => statusOf(i).fault;
const hasFigures = (i) => D.measures.candidate.rel_l2[i] !== null;

const KEYS = new Map();
for (let i = 0; i < N; i++) KEYS.set(text("key", i), i);

const CONSUMERS = Array.from({ length: N }, () => []);
D.producers.forEach((list, i) => list.forEach((p) => CONSUMERS[p].push(i)));

function ratioOf(value, base) {
  return base === 0 ? (value === 0 ? 1 : Infinity) : value / base;
}
function excess(i) {
  return ratioOf(measure("candidate", "rel_l2", i), measure("baseline", "rel_l2", i));
}
function overrun(i) {
  const value = number(D.value[i]), limit = number(D.limit[i]);
  return isFault(i) && limit > 0 && value > limit ? value / limit : NaN;
}
// As NodeRow.heat in summary.py: a fault without a figure is infinitely hot, a harmless x/0 is not hot at all.
function heat(i) {
  const name = statusOf(i).name;
  if (["nonfinite", "collapsed", "mismatch", "missing"].includes(name)) return Infinity;
  const e = D.measures.baseline.rel_l2[i] === null ? overrun(i) : excess(i);
  return Number.isNaN(e) || (e === Infinity && !isFault(i)) ? 1 : e;
}
function graver(a, b) {
  if (D.status[a] !== D.status[b]) return D.status[a] - D.status[b];
  const ha = heat(a), hb = heat(b);
  if (ha !== hb) return hb - ha;
  const ea = measure("candidate", "rel_l2", a) || 0, eb = measure("candidate", "rel_l2", b) || 0;
  return ea === eb ? a - b : eb - ea;
}

// Figures as numbers.py writes them: three significant digits.
function figure(v) {
  if (Number.isNaN(v)) return "–";
  if (!Number.isFinite(v)) return v > 0 ? "∞" : "−∞";
  if (v === 0) return "0";
  const size = Math.abs(v);
  if (size < 1e-3 || size >= 1e5) return v.toExponential(2).replace(/e([+-])(\d)$/, "e$10$2");
  return v.toFixed(Math.max(0, 2 - Number(size.toExponential(2).split("e")[1])));
}
const times = (v) => (Number.isFinite(v) ? (Math.abs(v) >= 1e5 ? v.toExponential(1) : figure(v)) + "×" : figure(v));
const whole = (v) => (Number.isNaN(v) ? "–" : String(v).replace(/\B(?=(\d{3})+(?!\d))/g, ","));

// Elements are made from text only: no string of the data is ever read as markup.
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== undefined && child !== null && child !== ""));
  return node;
}
function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
const $ = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
function badge(i) {
  const s = statusOf(i);
  return el("span", { class: `status s-${s.name}` }, el("span", { class: "mark", "aria-hidden": "true" }, s.mark), s.name);
}
const nodeHash = (i) => "#node=" + encodeURIComponent(text("key", i));
const nodeLink = (i, label) => el("a", { href: nodeHash(i), class: "key" }, label ?? text("key", i));

// Heat on a logarithmic scale: 1x is cold, 100x and beyond is full.
const warmth = (h) => Math.max(0, Math.min(1, Math.log10(Math.max(h, 1)) / 2));

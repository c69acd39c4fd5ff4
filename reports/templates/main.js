// Ties the parts together: links to nodes, light and dark, printing.
function follow() {
  if (!location.hash.startsWith("#node=")) return;
  let key;
  try {
    key = decodeURIComponent(location.hash.slice(6));
  } catch {
    return; // a mangled link is no link
  }
  const i = KEYS.get(key);
  const unknown = $("unknown-node");
  unknown.hidden = i !== undefined;
  if (i === undefined) unknown.textContent = `This report has no node ${key}.`;
  else Drawer.open(i);
}
window.addEventListener("hashchange", follow);

function paint(theme) {
  document.documentElement.dataset.theme = theme;
  Chart.draw();
}
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
let theme = "";
const effective = () => theme || (prefersDark.matches ? "dark" : "light");
prefersDark.addEventListener("change", () => paint(effective()));
$("theme").addEventListener("click", () => paint((theme = effective() === "dark" ? "light" : "dark")));
paint(effective());

window.addEventListener("beforeprint", () => paint("light"));
window.addEventListener("afterprint", () => paint(effective()));
$("print").addEventListener("click", () => window.print());

document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !event.target.matches("input, select")) event.preventDefault(), $("table-search").focus();
});

// Pictures: pressing one shows it large; in the large view the arrow keys flip through all, in place.
const figures = [...document.querySelectorAll("#pictures figure")];
let large = -1;
function enlarge(n) {
  large = (n + figures.length) % figures.length;
  $("flip-image").src = figures[large].querySelector("img").src;
  $("flip-label").textContent = figures[large].querySelector("figcaption").textContent;
  if (!$("flip").open) $("flip").showModal();
}
figures.forEach((figure, n) => figure.querySelector("button").addEventListener("click", () => enlarge(n)));
if (figures.length) {
  $("flip").addEventListener("keydown", (event) => {
    if (event.key === "ArrowRight" || event.key === " ") event.preventDefault(), enlarge(large + 1);
    if (event.key === "ArrowLeft") enlarge(large - 1);
  });
  $("flip-next").addEventListener("click", () => enlarge(large + 1));
  $("flip-close").addEventListener("click", () => $("flip").close());
}
follow();
document.documentElement.dataset.ready = "yes";

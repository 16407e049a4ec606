const CHART = { width: 640, height: 320, left: 64, right: 16, top: 12, bottom: 44 };
const DASHES = ["", "7 3", "2 3"];

/**
 * A chart of lines. Below the picture are the names of the series and, for the x under the pointer, their values.
 *
 * series: [{name, points: [[x, y], ...]}]. x and y: the axes, {label, text: function from a value to a text, log: whether
 * the scale is logarithmic, base: of its ticks}. at: an x, marked while no pointer is in the picture. strong: the name of
 * the series that is emphasized.
 */
function lineChart({ title, series, x, y, at, strong }) {
  const shown = series.filter((each) => each.points.length);
  if (!shown.length) return element("p", {}, `${title}: every value is zero.`);
  // 1. The lines.
  const points = shown.flatMap((each) => each.points);
  const horizontal = scale(x, points.map((point) => point[0]), CHART.left, CHART.width - CHART.right);
  const vertical = scale(y, points.map((point) => point[1]), CHART.height - CHART.bottom, CHART.top);
  const lines = shown.map((each, index) =>
    drawing("path", {
      ...lineStyle(each, index, strong),
      d: each.points.map(([a, b], i) => `${i ? "L" : "M"}${horizontal.at(a).toFixed(1)},${vertical.at(b).toFixed(1)}`).join(""),
    }));
  // 2. The cursor at an x, and the values there.
  const cursor = drawing("line", { class: "cursor", y1: CHART.top, y2: CHART.height - CHART.bottom });
  const reading = element("p", { class: "reading" });
  const moveCursor = (value) => {
    ["x1", "x2"].forEach((name) => cursor.setAttribute(name, horizontal.at(value)));
    reading.textContent = valuesAt(shown, value, x, y);
  };
  const marked = at ?? horizontal.first;
  moveCursor(marked);
  const picture = drawing(
    "svg",
    {
      viewBox: `0 0 ${CHART.width} ${CHART.height}`, class: "chart", role: "img", "aria-label": `${title}; the values are in the table below`,
      onpointermove: (event) => {
        const box = picture.getBoundingClientRect();
        moveCursor(horizontal.value(((event.clientX - box.left) * CHART.width) / box.width));
      },
      onpointerleave: () => moveCursor(marked),
    },
    ...axes(horizontal, vertical, x, y), ...lines, cursor,
  );
  return element("figure", {}, element("figcaption", {}, title), picture, legend(shown, strong), reading, valuesTable(title, shown, x, y));
}

/** Colour, dashes and width of a series, in the picture and in the legend. */
function lineStyle({ name }, index, strong) {
  return {
    class: `series c${index % 8} ${name === strong ? "strong" : ""}`,
    "stroke-dasharray": name === "lower bound" ? "1 4" : DASHES[Math.floor(index / 8) % DASHES.length],
  };
}

/** A scale: at() from values to coordinates between low and high, value() back, the first value, and the ticks. */
function scale({ log, base = 10 }, data, low, high) {
  const [into, back] = log ? [Math.log10, (each) => 10 ** each] : [Number, Number];
  const first = log ? Math.min(...data) : Math.min(0, ...data);
  const last = Math.max(...data, first + (log ? 0 : 1e-12)); // linear ticks need a span above zero
  const span = into(last) - into(first) || 1;
  const at = (value) => low + ((into(value) - into(first)) / span) * (high - low);
  const value = (coordinate) => {
    const part = Math.max(0, Math.min(1, (coordinate - low) / (high - low)));
    return Math.max(first, Math.min(last, back(into(first) + part * span)));
  };
  return { at, value, first, ticks: log ? logTicks(first, last, base) : linearTicks(first, last) };
}

/** Nine ticks at most: powers of the base and, where the values span fewer than four powers of 10, 2 and 5 times these. */
function logTicks(first, last, base) {
  const power = (value) => Math.log(value) / Math.log(base);
  const [from, to] = [Math.floor(power(first) + 1e-9), Math.ceil(power(last) - 1e-9)];
  const factors = base === 10 && to - from < 4 ? [1, 2, 5] : [1];
  const ticks = range(from, to + 1).flatMap((exponent) => factors.map((factor) => factor * base ** exponent));
  const inside = ticks.filter((tick) => tick >= first * (1 - 1e-9) && tick <= last * (1 + 1e-9));
  return inside.filter((_, at) => at % Math.ceil(inside.length / 9) === 0);
}

/** About five ticks, at multiples of 1, 2 or 5 times a power of 10. */
function linearTicks(first, last) {
  const rough = (last - first) / 5;
  const base = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * base).find((each) => each >= rough);
  return range(Math.ceil(first / step), Math.floor(last / step + 1e-9) + 1).map((each) => each * step);
}

function axes(horizontal, vertical, x, y) {
  const foot = CHART.height - CHART.bottom;
  const across = horizontal.ticks.flatMap((tick) => [
    drawing("path", { class: "rule", d: `M${horizontal.at(tick)},${CHART.top}V${foot}` }),
    drawing("text", { class: "tick", x: horizontal.at(tick), y: foot + 16 }, x.text(tick)),
  ]);
  const up = vertical.ticks.flatMap((tick) => [
    drawing("path", { class: "rule", d: `M${CHART.left},${vertical.at(tick)}H${CHART.width - CHART.right}` }),
    drawing("text", { class: "tick left", x: CHART.left - 6, y: vertical.at(tick) + 4 }, y.text(tick)),
  ]);
  return [...across, ...up, drawing("text", { class: "tick", x: CHART.width / 2, y: CHART.height - 6 }, x.label)];
}

function legend(series, strong) {
  const items = series.map((each, index) => element(
    "li", { class: each.name === strong ? "strong" : "" },
    drawing("svg", { width: 28, height: 10, "aria-hidden": true }, drawing("path", { ...lineStyle(each, index, strong), d: "M1,5h26" })),
    each.name,
  ));
  return element("ul", { class: "legend" }, ...items);
}

/** The values of the series at the x of the first series that is nearest to `value`, the smallest first, as text. */
function valuesAt(series, value, x, y) {
  const distance = x.log ? (a) => Math.abs(Math.log(a / value)) : (a) => Math.abs(a - value);
  const nearest = series.map(({ name, points }) => {
    const [at, height] = points.reduce((best, each) => (distance(each[0]) < distance(best[0]) ? each : best));
    return { name, at, height };
  });
  const { at } = nearest[0];
  const here = nearest.filter((each) => each.at === at).sort((one, other) => one.height - other.height);
  return `${x.text(at)}: ${here.map(({ name, height }) => `${name} ${y.text(height)}`).join(", ")}`;
}

/** The same values as a table, at 16 places at most. */
function valuesTable(title, series, x, y) {
  const all = [...new Set(series.flatMap((each) => each.points.map((point) => point[0])))].sort((a, b) => a - b);
  const every = Math.max(1, Math.ceil(all.length / 16));
  const rows = all.filter((_, at) => at % every === 0).map((value) => [
    x.text(value),
    ...series.map((each) => {
      const point = each.points.find((candidate) => candidate[0] === value);
      return point ? y.text(point[1]) : "";
    }),
  ]);
  const head = [x.label, ...series.map((each) => each.name)];
  return element("details", {}, element("summary", {}, "Values as a table"), table([head, ...rows], title));
}

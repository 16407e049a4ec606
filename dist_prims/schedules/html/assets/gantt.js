const LANE = 34;
const GANTT_LEFT = 70;
const KINDS = { F: ["forward", 0], B: ["gradient of the input", 1], W: ["gradients of the weights", 2], BW: ["backward", 6] };

/**
 * Begin and end of every action: an action begins when all that it waits for have ended, and the results of other ranks
 * have arrived. actions: [kind, stage, micro, waitsFor]; waitsFor has the places of earlier actions in this list, the
 * action before it on its rank included. F, B, W: the durations; transfer: the duration of a message.
 */
function schedule(actions, rankOf, { F, B, W, transfer }) {
  const seconds = { F, B, W, BW: B + W };
  const rows = [];
  for (const [kind, stage, micro, waitsFor] of actions) {
    const rank = rankOf[stage];
    const arrivals = waitsFor.map((at) => rows[at].end + (rows[at].rank === rank ? 0 : transfer));
    const begin = Math.max(0, ...arrivals);
    rows.push({ kind, stage, micro, rank, begin, end: begin + seconds[kind] });
  }
  return rows;
}

/** Duration of the step, and the mean fraction of it that the ranks are idle. */
function summary(rows, ranks) {
  const makespan = Math.max(...rows.map((row) => row.end));
  const busy = rows.reduce((sum, row) => sum + row.end - row.begin, 0);
  return { makespan, bubble: makespan > 0 ? 1 - busy / (ranks * makespan) : 0 };
}

/** The activations that a rank holds over time: an F takes one, the W or BW of its stage and micro-batch frees it. */
function held(rows, rank) {
  const points = [[0, 0]];
  for (const { kind, begin, end } of rows.filter((row) => row.rank === rank && row.kind !== "B")) {
    const [time, change] = kind === "F" ? [begin, 1] : [end, -1];
    const [, now] = points[points.length - 1];
    points.push([time, now], [time, now + change]);
  }
  return points;
}

/** Of the points at each time only the first and the last: the changes between them take no time. */
function withoutSpikes(points) {
  return points.filter((point) => {
    const same = points.filter(([time]) => time === point[0]);
    return point === same[0] || point === same[same.length - 1];
  });
}

/** A Gantt chart; several: whether a rank has several stages, so that the names of actions need the stage. */
class Gantt {
  constructor(ranks, several) {
    Object.assign(this, { ranks, several, bars: [], rows: [] });
    this.picture = drawing("svg", { role: "img", "aria-label": "Gantt chart: a row a rank, time to the right; the text below describes the time shown" });
    this.now = drawing("line", { class: "now" });
  }

  draw(rows, makespan) {
    this.rows = rows;
    // Pixels a time unit: the chart is 760 wide or, up to 8000, so wide that the name of the shortest action fits.
    const shortest = Math.min(...rows.map((row) => row.end - row.begin).filter((each) => each > 0), makespan);
    const scale = Math.max(760 / (makespan || 1), Math.min((this.several ? 30 : 22) / (shortest || 1), 8000 / (makespan || 1)));
    const [width, height] = [GANTT_LEFT + makespan * scale + 12, this.ranks * LANE + 30];
    this.at = (time) => GANTT_LEFT + time * scale;
    this.bars = rows.map((row) => this.bar(row));
    const ranks = range(0, this.ranks).map((rank) => drawing("text", { x: 8, y: rank * LANE + 26, class: "rank" }, `rank ${rank}`));
    ["y1", "y2"].forEach((name, end) => this.now.setAttribute(name, end * (height - 24) + 2));
    const axis = drawing("text", { x: GANTT_LEFT, y: height - 6, class: "rank" }, `0 … ${formatNumber(makespan)} time units`);
    this.picture.replaceChildren(...ranks, ...this.bars, this.now, axis);
    for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, width, height })) this.picture.setAttribute(name, value);
  }

  bar(row) {
    const [x, width] = [this.at(row.begin), this.at(row.end) - this.at(row.begin)];
    const name = this.several ? `${row.kind}${row.stage}.${row.micro}` : `${row.kind}${row.micro}`;
    const text = [name, row.kind].find((each) => each.length * 6.5 < width) ?? "";
    return drawing(
      "g", {},
      drawing("rect", { x: x + 0.5, y: row.rank * LANE + 8, width: Math.max(0, width - 1), height: LANE - 8, rx: 3 }),
      drawing("text", { x: x + width / 2, y: row.rank * LANE + 26 }, text),
      drawing("title", {}, `${KINDS[row.kind][0]} of stage ${row.stage}, micro-batch ${row.micro}, rank ${row.rank}: ${formatNumber(row.begin)} to ${formatNumber(row.end)}`),
    );
  }

  /** Mark the actions that have ended and those that run at a time. */
  show(time) {
    this.rows.forEach((row, at) => {
      const state = row.end <= time ? "done" : row.begin <= time ? "running" : "";
      this.bars[at].setAttribute("class", `action c${KINDS[row.kind][1]} ${state}`);
    });
    ["x1", "x2"].forEach((name) => this.now.setAttribute(name, this.at(time)));
  }
}

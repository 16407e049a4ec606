const DURATIONS = [
  { name: "Forward, F", id: "F", value: 1, max: 4 },
  { name: "Gradient of the input, B", id: "B", value: 1, max: 4 },
  { name: "Gradients of the weights, W", id: "W", value: 1, max: 4 },
  { name: "Message", id: "transfer", value: 0, max: 2 },
];

/** The page of a pipeline plan; pipeline_data.py makes the data. */
function pipelinePage(data) {
  const durations = Object.fromEntries(DURATIONS.map(({ id, value }) => [id, value]));
  const gantt = new Gantt(data.ranks, data.stages > data.ranks);
  const verdict = element("p", { class: "proof", "aria-live": "polite" });
  const running = element("p", { class: "events", "aria-live": "polite" });
  const charts = element("div", { class: "charts" });
  const controls = element("div", {});
  const counts = Object.keys(data.plans).map(Number).sort((a, b) => a - b);
  let microbatches = data.microbatches;
  let player = null;
  let rows = [];
  let times = []; // of the positions of the player: when actions begin, and the end of the step

  /** Show everything again; the player stays at its position unless the number of positions has changed. */
  function update() {
    rows = schedule(data.plans[microbatches], data.rankOf, durations);
    const { makespan, bubble } = summary(rows, data.ranks);
    times = [...new Set(rows.map((row) => row.begin))].sort((a, b) => a - b);
    times.push(makespan);
    gantt.draw(rows, makespan);
    verdict.textContent = `${plural(microbatches, "micro-batch", "micro-batches")}: the step takes ${formatNumber(makespan)} time units; ` +
      `the ranks are idle for ${(100 * bubble).toFixed(1)} % of it. Rank 0 holds at most ${mostHeld(0)} activations, the last rank ${mostHeld(data.ranks - 1)}.`;
    charts.replaceChildren(bubbles(), memory(makespan));
    const names = times.map((_, at) => String(at));
    if (!player) {
      player = new Player({ names, word: "event", show, start: names.length - 1, interval: 400 });
      controls.replaceChildren(player.toolbar);
    } else player.rename(names);
  }

  const mostHeld = (rank) => Math.max(...held(rows, rank).map((point) => point[1]));

  function show(at) {
    const time = times[at];
    gantt.show(time);
    const now = rows.filter((row) => row.begin <= time && time < row.end).sort((a, b) => a.rank - b.rank);
    const words = now.map((row) => `rank ${row.rank}: ${KINDS[row.kind][0]}, stage ${row.stage}, micro-batch ${row.micro}`);
    running.textContent = `Time ${formatNumber(time)}. ${words.length ? words.join("; ") : "No rank computes"}.`;
  }

  function bubbles() {
    const points = counts.map((count) => [count, 100 * summary(schedule(data.plans[count], data.rankOf, durations), data.ranks).bubble]);
    return lineChart({
      title: "Idle time over micro-batches", series: [{ name: data.name, points }], strong: data.name, at: microbatches,
      x: { label: "micro-batches", text: (value) => String(Math.round(value)) }, y: { label: "idle", text: (value) => `${formatNumber(value)} %` },
    });
  }

  function memory(makespan) {
    const ranks = range(0, data.ranks).filter((rank) => data.ranks <= 8 || rank % Math.ceil(data.ranks / 8) === 0);
    const series = ranks.map((rank) => ({ name: `rank ${rank}`, points: withoutSpikes([...held(rows, rank), [makespan, 0]]) }));
    return lineChart({
      title: "Activations held over time", series, at: 0,
      x: { label: "time", text: formatNumber }, y: { label: "activations", text: (value) => String(Math.round(value)) },
    });
  }

  const sliders = DURATIONS.map(({ name, id, value, max }) => slider({
    name, id, min: 0, max, step: 0.05, value, text: formatNumber,
    changed: (now) => {
      durations[id] = now;
      update();
    },
  }));
  const micro = slider({
    name: "Micro-batches", id: "microbatches", min: 0, max: counts.length - 1, step: 1, value: microbatches, text: String,
    read: (at) => counts[at], write: (count) => counts.indexOf(count),
    changed: (count) => {
      microbatches = count;
      update();
    },
  });
  update();
  const kinds = new Set(data.plans[data.microbatches].map(([kind]) => kind));
  const key = [...kinds].map((kind) => element("li", { class: `c${KINDS[kind][1]}` }, `${kind}: ${KINDS[kind][0]}`));
  document.getElementById("page").replaceChildren(
    element("h1", {}, document.title),
    ...(data.idea ? [element("p", {}, data.idea)] : []),
    controls,
    element("div", { class: "scroll", tabindex: 0, "aria-label": "Gantt chart" }, gantt.picture),
    element("ul", { class: "kinds" }, ...key),
    running,
    verdict,
    section("Durations", element("div", { class: "sliders" }, ...sliders, ...(counts.length > 1 ? [micro] : []))),
    section("Idle time and memory", charts),
  );
}

pipelinePage(JSON.parse(document.getElementById("data").textContent));

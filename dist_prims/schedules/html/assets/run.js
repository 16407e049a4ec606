/** The page of a trace. */
function runPage(data) {
  const timeline = new Timeline(data.kinds);
  const text = element("p", { class: "proof", "aria-live": "polite" });
  const steps = element("div", {});
  let call = data.calls[0];

  function show(at) {
    call = data.calls[at];
    timeline.draw(call);
    text.textContent = describeCall(call);
    steps.replaceChildren(...describeSteps(call));
  }

  const zoom = slider({
    name: "Zoom", id: "zoom", min: 0, max: 5, step: 1, value: 1, text: (value) => `${value} ×`, read: (power) => 2 ** power, write: Math.log2,
    changed: (value) => {
      timeline.zoom = value;
      timeline.draw(call);
    },
  });
  const key = data.kinds.map((kind) => element("li", { class: `c${COLOURS[kind]}` }, kind));
  const left = data.all - data.calls.length;
  const body = call
    ? [
      new Player({ names: data.calls.map((_, number) => String(number)), word: "call", show }).toolbar,
      text,
      element("div", { class: "scroll", tabindex: 0, "aria-label": "timeline" }, timeline.picture),
      element("ul", { class: "kinds" }, ...key, element("li", { class: "c7" }, "critical path (line)")),
      zoom,
      ...(left > 0 ? [element("p", { class: "key" }, `The page has the first ${data.calls.length} collectives; ${left} more are in the trace.`)] : []),
      section("Steps of this call", steps),
    ]
    : [element("p", {}, "The trace has no collective.")];
  document.getElementById("page").replaceChildren(
    element("h1", {}, document.title), ...body,
    section("Where the time went, all calls", whereItWent(data.ranks), waits(data.ranks)),
  );
}

function describeCall({ collective, algorithm, bytes, group, seconds, arrival, last_to_come: last, predicted, failed, sequence }) {
  const model = predicted ? `, predicted ${formatSeconds(predicted)}: ${(seconds / predicted).toFixed(2)} times as long` : "";
  return `${collective} ${algorithm || "through shared memory"}, ${formatBytes(bytes)}, group ${group}, number ${sequence}${failed ? ", failed" : ""}. ` +
    `Rank ${last} came last, ${formatSeconds(arrival)} after the first; from then on ${formatSeconds(seconds)}${model}.`;
}

function describeSteps({ steps }) {
  if (!steps.length) return [element("p", {}, "This call has phases in shared memory instead of steps.")];
  const ratio = ({ seconds, predicted }) => (predicted ? (seconds / predicted).toFixed(2) : "");
  const rows = steps.map((each) => [
    each.step, formatSeconds(each.seconds), each.predicted === null ? "" : formatSeconds(each.predicted), ratio(each),
  ]);
  return [table([["step", "measured", "predicted", "ratio"], ...rows], "By how much each step ended later than the one before")];
}

function whereItWent(ranks) {
  const rest = (each) => each.in_calls - each.late - each.link - each.reduce - each.copy;
  const rows = ranks.map((each) => [
    each.rank, each.calls, ...[each.in_calls, each.late, each.link, each.reduce, each.copy, rest(each)].map(formatSeconds), each.last_to_come,
  ]);
  const head = ["rank", "calls", "in calls", "peer late", "link", "reducing", "copying", "rest", "came last"];
  return table([head, ...rows], "Time of each rank in collectives");
}

function waits(ranks) {
  const rows = ranks.map((each) => [`rank ${each.rank}`, ...ranks.map((other) => formatSeconds(each.waits[other.rank] ?? 0))]);
  return table([["waited for", ...ranks.map((each) => `rank ${each.rank}`)], ...rows], "Time that a rank (row) has waited for another (column)");
}

runPage(JSON.parse(document.getElementById("data").textContent));

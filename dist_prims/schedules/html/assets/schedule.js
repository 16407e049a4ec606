/** The page of a schedule. */
function schedulePage(data) {
  const replay = new Replay(data);
  let state = null;
  let step = -1;
  const text = element("div", { class: "chunk", "aria-live": "polite" });
  const proof = element("p", { class: "proof", "aria-live": "polite" });
  const transfers = element("div", {});
  const inputs = ["rank", "chunk"].map((name) => element("input", {
    type: "number", id: `chosen-${name}`, min: 0, max: (name === "rank" ? data.size : data.total) - 1, value: 0,
    onchange: () => select(...inputs.map((input) => Number(input.value))),
  }));

  function select(rank, chunk) {
    const [r, c] = [[rank, data.size], [chunk, data.total]].map(([at, end]) => Math.max(0, Math.min(end - 1, at || 0)));
    [inputs[0].value, inputs[1].value] = [r, c];
    if (!state) return;
    const path = replay.path(r, c, step);
    grid.outline(r, c, path);
    text.replaceChildren(...describeChunk(data, replay, state, step, r, c, path));
  }

  const grid = new Grid(data, replay, select);
  const show = (position) => {
    step = position - 1;
    state = replay.stateAfter(step);
    const marks = data.proof.marks.filter((each) => each.step === step);
    grid.show(step, state, marks);
    proof.textContent = describeProof(data, replay, state, step);
    proof.classList.toggle("wrong", data.proof.error !== null && step >= data.proof.step);
    transfers.replaceChildren(...listTransfers(data, replay, step));
    select(...inputs.map((input) => Number(input.value)));
  };
  const names = ["start", ...data.steps.map((_, at) => String(at))];
  const start = data.proof.step === null ? 0 : data.proof.step + 1;
  const player = new Player({ names, word: "step", show, start });

  const chooser = element("p", { class: "chooser" }, "Chunk of rank ", label("rank", inputs[0]), ", number ", label("chunk", inputs[1]));
  document.getElementById("page").replaceChildren(
    element("h1", {}, document.title),
    ...(data.proof.error ? [element("p", { class: "error", role: "alert" }, `Wrong: ${data.proof.error}.`)] : []),
    player.toolbar,
    element("div", { class: "scroll", tabindex: 0, "aria-label": "picture of the chunks" }, grid.picture),
    element("p", { class: "key" }, keyOf(data), ` ${grid.note}`),
    proof,
    section("One chunk", chooser, text),
    element("details", { class: "transfers" }, element("summary", {}, "Transfers of this step as text"), transfers),
    section("Contract", element("dl", {}, ...data.facts.flatMap(([name, fact]) => [element("dt", {}, name), element("dd", {}, fact)]))),
    new CostPanel(data).view,
  );
}

const label = (name, input) => element("label", { "aria-label": name }, input);

function keyOf(data) {
  const fill = data.adds
    ? "A chunk is filled in the places of the ranks whose data its sum contains."
    : "A chunk is filled in the place of the rank whose data it holds.";
  const ends = data.adds ? "An arrow with a plus adds to the chunk, one with a head replaces it." : "An arrow replaces the chunk at its head.";
  return `${fill} ${ends} A bold frame: the chunk holds what the contract demands. Arrow keys step, Space plays.`;
}

/** The proof's state after a step, in words. */
function describeProof(data, replay, state, step) {
  const cells = [...replay.end.keys()];
  const complete = cells.filter((cell) => replay.isComplete(state, cell)).length;
  const { error, step: wrong, sameBits, countsOnce } = data.proof;
  const progress = `${complete} of ${plural(cells.length, "output chunk")} complete.`;
  if (error !== null && step >= wrong) return `${progress} ${step === wrong ? "This is the first wrong step." : `The first wrong step is step ${wrong}.`}`;
  const once = countsOnce && data.adds ? " No sum contains the data of a rank twice." : "";
  if (step < data.steps.length - 1) return progress + once;
  const bits = sameBits && data.adds ? " Ranks with the same result have added it in the same order." : "";
  return error === null ? `Proved: ${progress}${once}${bits}` : progress;
}

function describeChunk(data, replay, state, step, rank, chunk, path) {
  const cell = replay.cell(rank, chunk);
  const ranks = replay.ranksIn(state.sum[cell]);
  const when = step < 0 ? "at the start" : `after step ${step}`;
  const complete = replay.isComplete(state, cell);
  const lines = [
    element("p", {}, `Rank ${rank}, ${data.labels[chunk]}, ${when}: `, element("code", { class: "expression" }, replay.expression(state.sum[cell]))),
    element("p", {}, ranks.length ? `Data of ${numbers(ranks, "r")}: ${ranks.length} of ${plural(data.size, "rank")}.` : "It holds nothing.",
      complete === null ? " It is not part of the result." : complete ? " It holds what the contract demands." : ""),
  ];
  if (!path.length) return lines;
  const items = path.slice(0, 60).map(({ step: at, row }) => element("li", {}, `step ${at}: ${describeTransfer(data, replay.steps[at], row)}`));
  if (path.length > 60) items.push(element("li", {}, `and ${path.length - 60} more`));
  return [...lines, element("p", {}, "The path of its data:"), element("ol", { class: "steps" }, ...items)];
}

function describeTransfer(data, transfers, row) {
  const { src, dst, chunk, into, reduce } = transfers;
  const where = src[row] === dst[row] ? `rank ${src[row]}, local` : `rank ${src[row]} → rank ${dst[row]}`;
  const what = chunk[row] === into[row] ? data.labels[chunk[row]] : `${data.labels[chunk[row]]} as ${data.labels[into[row]]}`;
  return `${where}: ${what}, ${reduce[row] ? "added" : "replaces"}`;
}

function listTransfers(data, replay, step) {
  if (step < 0) return [element("p", {}, "Before step 0 nothing has been sent.")];
  const each = replay.steps[step];
  const items = range(0, Math.min(each.rows, 200)).map((row) => element("li", {}, describeTransfer(data, each, row)));
  if (each.rows > 200) items.push(element("li", {}, `and ${each.rows - 200} more`));
  return [element("ol", { class: "steps" }, ...items)];
}

schedulePage(JSON.parse(document.getElementById("data").textContent));

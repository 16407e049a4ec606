const MOST_ROWS = 32; // above, neighbouring ranks (and chunks) share a row (and a column)
const ROW = 46;
const LEFT = 78;
const TOP = 34;
const ARROWS = 46; // width to the right of each cell, for arrows

/**
 * The chunks of all ranks as a picture: a row a rank, a column a chunk number. A cell is filled in the places of the
 * ranks whose data its sum contains; an arrow is a transfer of the step, which adds (a plus) or replaces (a head).
 */
class Grid {
  constructor(data, replay, select) {
    Object.assign(this, { data, replay, select });
    this.ranksPerRow = Math.ceil(data.size / MOST_ROWS);
    this.chunksPerColumn = Math.ceil(data.total / MOST_ROWS);
    this.rows = Math.ceil(data.size / this.ranksPerRow);
    this.columns = Math.ceil(data.total / this.chunksPerColumn);
    this.width = this.columns === 1 ? 200 : Math.max(58, Math.min(96, Math.floor(760 / this.columns)));
    this.chosen = [0, 0]; // row and column of the cell that takes the focus
    this.cells = [];
    this.arrows = drawing("g", { class: "arrows" });
    this.picture = this.draw();
  }

  get note() {
    const { ranksPerRow, chunksPerColumn } = this;
    const shared = [
      ranksPerRow > 1 && `a row stands for ${ranksPerRow} ranks`,
      chunksPerColumn > 1 && `a column stands for ${chunksPerColumn} chunks`,
    ].filter(Boolean);
    return shared.length ? `Above ${MOST_ROWS} the picture is summarized: ${shared.join(" and ")}.` : "";
  }

  x(column) {
    return LEFT + column * (this.width + ARROWS);
  }

  y(row) {
    return TOP + row * ROW;
  }

  draw() {
    const width = this.x(this.columns) + 8;
    const height = this.y(this.rows) + 12;
    const heads = range(0, this.columns).map((column) =>
      drawing("text", { x: this.x(column) + this.width / 2, y: TOP - 12, class: "head" }, this.columnName(column)));
    const rows = range(0, this.rows).map((row) => this.drawRow(row));
    return drawing(
      "svg",
      {
        viewBox: `0 0 ${width} ${height}`, width, height, role: "grid", "aria-label": "chunks of all ranks",
        onkeydown: (event) => this.move(event),
      },
      ...heads, ...rows, this.arrows,
    );
  }

  columnName(column) {
    const first = column * this.chunksPerColumn;
    const last = Math.min(first + this.chunksPerColumn, this.data.total) - 1;
    return first === last ? this.data.labels[first] : `${first}-${last}`;
  }

  drawRow(row) {
    const ranks = this.ranksOf(row);
    const name = ranks.length === 1 ? `rank ${ranks[0]}` : `${ranks[0]}-${ranks[ranks.length - 1]}`;
    const head = drawing("text", { x: 8, y: this.y(row) + 22, class: "rank", role: "rowheader" }, name);
    this.cells[row] = range(0, this.columns).map((column) => this.drawCell(row, column));
    return drawing("g", { role: "row" }, head, ...this.cells[row].map((cell) => cell.group));
  }

  drawCell(row, column) {
    const box = { x: this.x(column), y: this.y(row), width: this.width, height: ROW - 12, rx: 5 };
    const fill = drawing("path", { class: `fill c${this.chunksOf(column)[0] % 8}` });
    const label = drawing("text", { x: box.x + this.width / 2, y: box.y + 27, class: "content" });
    const frame = drawing("rect", { ...box, class: "frame" });
    const choose = () => this.choose(row, column);
    const group = drawing(
      "g",
      {
        role: "gridcell", tabindex: row || column ? -1 : 0, class: "cell",
        onclick: choose, onfocus: choose, onpointerenter: () => this.select(this.ranksOf(row)[0], this.chunksOf(column)[0]),
      },
      drawing("rect", { ...box, class: "ground" }), fill, frame, label,
    );
    return { group, fill, label };
  }

  ranksOf(row) {
    return range(row * this.ranksPerRow, Math.min((row + 1) * this.ranksPerRow, this.data.size));
  }

  chunksOf(column) {
    return range(column * this.chunksPerColumn, Math.min((column + 1) * this.chunksPerColumn, this.data.total));
  }

  choose(row, column) {
    this.cells[this.chosen[0]][this.chosen[1]].group.setAttribute("tabindex", -1);
    this.chosen = [row, column];
    this.cells[row][column].group.setAttribute("tabindex", 0);
    this.select(this.ranksOf(row)[0], this.chunksOf(column)[0]);
  }

  move(event) {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!by) return;
    event.preventDefault();
    const row = Math.max(0, Math.min(this.rows - 1, this.chosen[0] + by[0]));
    const column = Math.max(0, Math.min(this.columns - 1, this.chosen[1] + by[1]));
    this.cells[row][column].group.focus();
  }

  /** Show the state after a step, the transfers of the step, and the wrong chunks. */
  show(step, state, marks) {
    const written = new Set();
    const transfers = step < 0 ? null : this.replay.steps[step];
    for (let row = 0; transfers && row < transfers.rows; row += 1) {
      written.add(this.replay.cell(transfers.dst[row], transfers.into[row]));
    }
    for (let row = 0; row < this.rows; row += 1) {
      for (let column = 0; column < this.columns; column += 1) this.showCell(row, column, state, marks, written);
    }
    this.arrows.replaceChildren(...(transfers ? this.drawArrows(transfers, marks) : []));
  }

  showCell(row, column, state, marks, written) {
    const { group, fill, label } = this.cells[row][column];
    const members = this.ranksOf(row).flatMap((rank) => this.chunksOf(column).map((chunk) => [rank, chunk]));
    const cells = members.map(([rank, chunk]) => this.replay.cell(rank, chunk));
    const mark = marks.find((each) => cells.includes(this.replay.cell(each.rank, each.chunk)));
    const complete = cells.map((cell) => this.replay.isComplete(state, cell)).filter((each) => each !== null);
    const empty = cells.every((cell) => state.sum[cell] === NOTHING);
    const text = mark ? wrongText(mark) : cells.length > 1 ? "" : this.content(state, cells[0]);
    const kinds = {
      empty, wrong: Boolean(mark), changed: cells.some((cell) => written.has(cell)),
      complete: complete.length > 0 && complete.every(Boolean),
    };
    group.setAttribute("class", ["cell", ...Object.keys(kinds).filter((kind) => kinds[kind])].join(" "));
    fill.setAttribute("d", this.fillOf(row, column, state, cells));
    const short = `${this.replay.ranksIn(state.sum[cells[0]]).length} of ${this.data.size}`;
    label.textContent = fits(text, this.width) ? text : fits(short, this.width) && !mark ? short : "…";
    group.setAttribute("aria-label", `${this.nameOf(row, column)}: ${cells.length > 1 ? "summarized" : text || "nothing"}`);
  }

  nameOf(row, column) {
    return `rank ${numbers(this.ranksOf(row))}, ${this.columnName(column)}`;
  }

  /** What a chunk contains. */
  content(state, cell) {
    if (state.sum[cell] === NOTHING) return "";
    const { blocks } = this.data;
    if (blocks) { // all_to_all: from which rank to which
      const source = Math.floor(state.piece[cell] / blocks.chunks);
      return `${source}→${Math.floor((state.piece[cell] % blocks.chunks) / blocks.part)}`;
    }
    return numbers(this.replay.ranksIn(state.sum[cell]), "r");
  }

  /** The outline of the filled part: one piece for each run of ranks, or the mean of several cells. */
  fillOf(row, column, state, cells) {
    const [x, y] = [this.x(column) + 3, this.y(row) + 4];
    const scale = (this.width - 6) / this.data.size;
    const bar = (from, to) => `M${(x + from * scale).toFixed(1)},${y}h${((to - from) * scale).toFixed(1)}v9h${((from - to) * scale).toFixed(1)}z`;
    const sets = cells.map((cell) => this.replay.ranksIn(state.sum[cell]));
    if (cells.length > 1) {
      const share = this.data.adds ? (ranks) => ranks.length : (ranks) => (ranks.length ? this.data.size : 0);
      return bar(0, sets.reduce((sum, ranks) => sum + share(ranks), 0) / sets.length);
    }
    return sets[0].map((rank) => bar(rank + 0.04, rank + 0.96)).join("");
  }

  drawArrows(transfers, marks) {
    const drawn = new Map();
    for (let row = 0; row < transfers.rows; row += 1) {
      const [src, dst] = [transfers.src[row], transfers.dst[row]].map((rank) => Math.floor(rank / this.ranksPerRow));
      const [from, into] = [transfers.chunk[row], transfers.into[row]].map((c) => Math.floor(c / this.chunksPerColumn));
      if (src === dst && from === into) continue;
      const wrong = marks.some((each) => each.rank === transfers.dst[row] && each.chunk === transfers.into[row]);
      const key = [src, dst, from, into, transfers.reduce[row]].join();
      const arrow = drawn.get(key) ?? { src, dst, from, into, reduce: transfers.reduce[row], wrong: false };
      arrow.wrong = arrow.wrong || wrong;
      drawn.set(key, arrow);
    }
    return [...drawn.values()].map((arrow) => this.drawArrow(arrow));
  }

  drawArrow({ src, dst, from, into, reduce, wrong }) {
    const forward = into > from;
    const [x1, y1] = [this.x(from) + this.width, this.y(src) + 17];
    const [x2, y2] = [this.x(into) + (forward ? 0 : this.width), this.y(dst) + 17 + 4 * Math.sign(src - dst)];
    const bulge = into === from ? 10 + Math.min(30, 7 * Math.sqrt(Math.abs(dst - src))) : 24;
    const side = forward ? -1 : 1; // of the target, from which the arrow arrives
    const line = `M${x1},${y1}C${x1 + bulge},${y1} ${x2 + side * bulge},${y2} ${x2 + side * 5},${y2}`;
    const head = reduce
      ? [drawing("circle", { cx: x2 + side * 5, cy: y2, r: 5.5 }),
        drawing("path", { class: "plus", d: `M${x2 + side * 5 - 3.2},${y2}h6.4m-3.2,-3.2v6.4` })]
      : [drawing("path", { d: `M${x2},${y2}l${side * 9},-4.5v9z` })];
    const colour = this.chunksOf(from)[0] % 8;
    return drawing(
      "g",
      { class: `arrow c${colour} ${wrong ? "wrong" : ""} ${reduce ? "adds" : "replaces"}` },
      drawing("path", { class: "line", d: line, pathLength: 1 }), ...head,
    );
  }

  /** Outline the cells through which the data of the selected chunk has come. */
  outline(rank, chunk, path) {
    const onPath = new Set(path.map(({ step, row }) => {
      const { src, chunk: chunks } = this.replay.steps[step];
      return this.place(src[row], chunks[row]);
    }));
    const selected = this.place(rank, chunk);
    for (let row = 0; row < this.rows; row += 1) {
      for (let column = 0; column < this.columns; column += 1) {
        const { classList } = this.cells[row][column].group;
        classList.toggle("path", onPath.has(`${row},${column}`));
        classList.toggle("selected", selected === `${row},${column}`);
      }
    }
  }

  place(rank, chunk) {
    return `${Math.floor(rank / this.ranksPerRow)},${Math.floor(chunk / this.chunksPerColumn)}`;
  }
}

const fits = (text, width) => text.length * 6.6 <= width;

function wrongText({ missing, extra }) {
  const words = [missing.length && `without ${numbers(missing, "r")}`, extra.length && `${numbers(extra, "r")} twice`];
  return words.filter(Boolean).join(", ") || "differs";
}

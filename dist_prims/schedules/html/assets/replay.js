const NOTHING = -1;

/** A column of the data as an array: one number for all rows, a range, or a list. */
function expand(column, rows) {
  if (column === null || Array.isArray(column)) return column;
  return Array.from({ length: rows }, (_, row) => (typeof column === "number" ? column : column.from + row));
}

function expanded(record, names) {
  const columns = Object.fromEntries(names.map((name) => [name, expand(record[name], record.rows)]));
  return { rows: record.rows, ...columns };
}

/** What every chunk of every rank holds after each step, from the states that the data contains. */
class Replay {
  constructor(data) {
    this.size = data.size;
    this.total = data.total;
    this.addends = data.addends;
    this.start = expanded(data.start, ["rank", "chunk", "piece", "sum"]);
    this.steps = data.steps.map((step) =>
      expanded(step, ["src", "dst", "chunk", "into", "reduce", "piece", "sum"]));
    this.end = new Map();
    data.end.forEach((record, rank) => {
      const { rows, chunk, piece, first, last } = expanded(record, ["chunk", "piece", "first", "last"]);
      for (let row = 0; row < rows; row += 1) {
        this.end.set(this.cell(rank, chunk[row]), { piece: piece[row], first: first[row], last: last[row] });
      }
    });
    this.rankSets = new Map();
  }

  cell(rank, chunk) {
    return rank * this.total + chunk;
  }

  /** Piece and sum of each cell after a step; step -1 is the start. */
  stateAfter(step) {
    const count = this.size * this.total;
    const state = { piece: new Int32Array(count).fill(NOTHING), sum: new Int32Array(count).fill(NOTHING) };
    const { rows, rank, chunk, piece, sum } = this.start;
    for (let row = 0; row < rows; row += 1) this.write(state, rank[row], chunk[row], piece[row], sum[row]);
    for (const each of this.steps.slice(0, step + 1)) {
      if (each.sum === null) continue; // a wrong step, which does not run
      for (let row = 0; row < each.rows; row += 1) {
        this.write(state, each.dst[row], each.into[row], each.piece[row], each.sum[row]);
      }
    }
    return state;
  }

  write(state, rank, chunk, piece, sum) {
    state.piece[this.cell(rank, chunk)] = piece;
    state.sum[this.cell(rank, chunk)] = sum;
  }

  /** The ranks whose data is in a sum, in ascending order. */
  ranksIn(sum) {
    if (sum === NOTHING) return [];
    if (!this.rankSets.has(sum)) {
      const terms = this.addends[sum];
      const ranks = terms.length ? [...new Set(terms.flatMap((term) => this.ranksIn(term)))] : [sum];
      this.rankSets.set(sum, ranks.sort((a, b) => a - b));
    }
    return this.rankSets.get(sum);
  }

  /** The additions of a sum, in their order: each pair of parentheses is rounded once. */
  expression(sum) {
    if (sum === NOTHING) return "nothing";
    const inner = (each) => {
      const terms = this.addends[each];
      return terms.length ? `(${terms.map(inner).join("+")})` : `r${each}`;
    };
    const text = inner(sum);
    return text.startsWith("(") ? text.slice(1, -1) : text;
  }

  /** Whether a chunk holds what the contract demands at the end; null if the contract demands nothing of it. */
  isComplete(state, cell) {
    const end = this.end.get(cell);
    if (!end) return null;
    const ranks = this.ranksIn(state.sum[cell]);
    const exact = ranks.length === end.last - end.first && ranks[0] === end.first;
    return exact && ranks[ranks.length - 1] === end.last - 1 && state.piece[cell] === end.piece;
  }

  /** The transfers by which the data in a chunk after a step has come there, in order: {step, row}. */
  path(rank, chunk, step) {
    const found = [];
    const seen = new Set();
    const open = [[rank, chunk, step]];
    while (open.length) {
      const [toRank, toChunk, last] = open.pop();
      const [at, rows] = this.lastWrite(toRank, toChunk, last);
      const key = `${at},${this.cell(toRank, toChunk)}`;
      if (!rows.length || seen.has(key)) continue;
      seen.add(key);
      const each = this.steps[at];
      for (const row of rows) {
        found.push({ step: at, row });
        open.push([each.src[row], each.chunk[row], at - 1]);
      }
      if (rows.every((row) => each.reduce[row])) open.push([toRank, toChunk, at - 1]);
    }
    return found.sort((a, b) => a.step - b.step || a.row - b.row);
  }

  /** The last step up to `last` that writes a chunk, and its rows that do. */
  lastWrite(rank, chunk, last) {
    for (let at = last; at >= 0; at -= 1) {
      const { rows: count, dst, into, sum } = this.steps[at];
      const rows = [];
      for (let row = 0; row < count && sum !== null; row += 1) {
        if (dst[row] === rank && into[row] === chunk) rows.push(row);
      }
      if (rows.length) return [at, rows];
    }
    return [-1, []];
  }
}

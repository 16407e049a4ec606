const LANE_HEIGHT = 46;
const LANE_LEFT = 70;
const COLOURS = { wait: 1, reduce: 2, copy: 4, send: 0, receive: 6 };
const isMessage = (kind) => kind === "send" || kind === "receive";

/**
 * One collective: a lane for each rank, time to the right. Bars are waits, reductions and copies, thin bars below them
 * messages from post to end. The line along the lanes is the critical path.
 */
class Timeline {
  constructor(kinds) {
    Object.assign(this, { kinds, zoom: 1 });
    this.picture = drawing("svg", { role: "img", "aria-label": "timeline: a lane for each rank, time to the right; the tables have the figures" });
  }

  draw(call) {
    this.call = call;
    const span = Math.max(...call.lanes.map((lane) => lane.end), 1e-9);
    const scale = (940 * this.zoom) / span;
    this.at = (time) => LANE_LEFT + time * scale;
    this.laneOf = new Map(call.lanes.map((lane, index) => [lane.rank, index]));
    const [width, height] = [this.at(span) + 40, call.lanes.length * LANE_HEIGHT + 26];
    const lanes = call.lanes.map((lane, index) => this.lane(lane, index));
    const ticks = range(0, 5 * this.zoom + 1).map((each) => this.tick((span * each) / (5 * this.zoom), height));
    this.picture.replaceChildren(...ticks, ...lanes, ...this.path(call));
    for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, width, height })) this.picture.setAttribute(name, value);
  }

  tick(time, height) {
    return drawing(
      "g", {},
      drawing("path", { class: "rule", d: `M${this.at(time)},2V${height - 20}` }),
      drawing("text", { class: "tick", x: this.at(time), y: height - 6 }, formatSeconds(time)),
    );
  }

  lane(lane, index) {
    const y = index * LANE_HEIGHT + 6;
    const whole = { x: this.at(lane.begin), y, width: this.at(lane.end) - this.at(lane.begin), height: 22, class: "ground" };
    const bars = lane.events.map(([kind, begin, end, peer, step, bytes]) => {
      const name = this.kinds[kind];
      const small = isMessage(name);
      const where = { x: this.at(begin), width: Math.max(0.6, this.at(end) - this.at(begin)) };
      const words = [name, peer >= 0 && `rank ${peer}`, step >= 0 && `step ${step}`, bytes > 0 && formatBytes(bytes), formatSeconds(end - begin)];
      return drawing(
        "rect",
        { ...where, y: y + (small ? (name === "send" ? 24 : 29) : 0), height: small ? 4 : 22, class: `fill event c${COLOURS[name]}` },
        drawing("title", {}, words.filter(Boolean).join(", ")),
      );
    });
    return drawing("g", {}, drawing("text", { x: 8, y: y + 16, class: "rank" }, `rank ${lane.rank}`), drawing("rect", whole), ...bars);
  }

  path(call) {
    return call.critical_path.map(({ rank, begin, end, what, to }) => {
      const y = (each) => (this.laneOf.get(each) ?? 0) * LANE_HEIGHT + 17;
      const [x1, x2] = [this.at(begin - call.begin), this.at(end - call.begin)];
      return drawing("path", { class: "critical", d: `M${x1},${y(rank)}L${x2},${y(what === "link" ? to : rank)}` });
    });
  }
}

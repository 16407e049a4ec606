const PARAMETERS = [
  { name: "Message size", id: "nbytes", low: 0, high: 32, base: 2, value: 2 ** 20, text: formatBytes, read: (v) => ["nbytes", v] },
  { name: "Latency of a message", id: "latency", low: -7, high: -2, base: 10, value: 1e-5, text: formatSeconds, read: (v) => ["alpha", v] },
  { name: "Bandwidth of a rank", id: "bandwidth", low: 8, high: 12, base: 10, value: 1e10, text: (v) => `${formatNumber(v / 1e9)} Gbit/s`, read: (v) => ["beta", 8 / v] },
  { name: "Reduction speed", id: "reduction", low: 8, high: 12, base: 10, value: 1e10, text: (v) => `${formatNumber(v / 1e9)} GB/s`, read: (v) => ["gamma", 1 / v] },
];

/** The cost of the schedule and of the other algorithms, from the counts in the data (cost_data.py). */
class CostPanel {
  constructor(data) {
    this.data = data;
    this.cost = data.cost;
    this.parameters = Object.fromEntries(PARAMETERS.map((each) => each.read(each.value)));
    this.output = element("div", { "aria-live": "polite" });
    this.charts = element("div", { class: "charts" });
    const sliders = PARAMETERS.map((each) => this.slider(each));
    this.view = section("Cost", element("div", { class: "sliders" }, ...sliders), this.output, this.charts);
    this.update();
  }

  slider({ name, id, low, high, base, value, text, read }) {
    const changed = (now) => {
      const [parameter, number] = read(now);
      this.parameters[parameter] = number;
      this.update();
    };
    const [into, back] = [(v) => Math.log(v) / Math.log(base), (p) => base ** p];
    return slider({ name, id, min: low, max: high, step: base === 2 ? 0.25 : 0.05, value, text, changed, read: back, write: into });
  }

  /** The seconds of each term: its count times its parameters. */
  terms(counts, parameters = this.parameters) {
    return this.cost.terms.map(([, names], at) => names.reduce((product, name) => product * parameters[name], counts[at]));
  }

  seconds(counts, parameters) {
    return this.terms(counts, parameters).reduce((sum, each) => sum + each, 0);
  }

  update() {
    const here = this.cost.sizes.indexOf(this.data.size); // the place of this number of ranks in all lists of counts
    const spent = this.terms(this.cost.here);
    const total = this.seconds(this.cost.here);
    const bound = this.seconds(this.cost.bound[here]);
    const algorithms = Object.entries(this.cost.algorithms).filter(([, counts]) => counts[here]);
    const ranked = algorithms.map(([name, counts]) => [name, this.seconds(counts[here])]).sort((a, b) => a[1] - b[1]);
    this.output.replaceChildren(
      element("p", { class: "verdict" }, this.verdict(total, bound, ranked)),
      this.bar(spent, total),
      table([["term", "count", "time"], ...this.cost.terms.map(([name, names], at) => [name, `${formatNumber(this.cost.here[at])} × ${names.join(" × ")}`, formatSeconds(spent[at])])], "Time by term"),
    );
    this.charts.replaceChildren(this.overBytes(algorithms, here), this.overRanks());
  }

  verdict(total, bound, ranked) {
    const { algorithm, collective, size } = this.data;
    const near = bound > 0 ? `, ${(total / bound).toFixed(2)} times the lower bound of ${formatSeconds(bound)}` : "";
    const faster = ranked.length > 0 && ranked[0][1] < total * (1 - 1e-9);
    const best = faster ? ` The fastest algorithm here is ${ranked[0][0]}: ${formatSeconds(ranked[0][1])}.` : " No registered algorithm is faster here.";
    return `${collective} ${algorithm} on ${plural(size, "rank")} takes ${formatSeconds(total)}${near}.${best}`;
  }

  bar(spent, total) {
    const parts = spent.map((seconds, at) => {
      const share = total > 0 ? (100 * seconds) / total : 0;
      const name = `${this.cost.terms[at][0]} ${share.toFixed(0)} %`;
      return element("span", { class: `part c${at}`, style: `width:${share}%`, title: name }, share > 14 ? name : "");
    });
    return element("div", { class: "bar", role: "img", "aria-label": "time by term; the table has the values" }, ...parts);
  }

  overBytes(algorithms, here) {
    const sizes = range(0, 65).map((half) => 2 ** (half / 2));
    const curve = (counts) => sizes.map((nbytes) => [nbytes, this.seconds(counts, { ...this.parameters, nbytes })]);
    const series = algorithms.map(([name, counts]) => ({ name, points: curve(counts[here]) }));
    return this.chart(`Time over message size, ${plural(this.data.size, "rank")}`, [...series, { name: "lower bound", points: curve(this.cost.bound[here]) }],
      { label: "message size", log: true, base: 32, text: formatBytes }, this.parameters.nbytes);
  }

  overRanks() {
    const points = (counts) => this.cost.sizes.flatMap((size, at) => (counts[at] ? [[size, this.seconds(counts[at])]] : []));
    const series = Object.entries(this.cost.algorithms).map(([name, counts]) => ({ name, points: points(counts) }));
    return this.chart(`Time over ranks, ${formatBytes(this.parameters.nbytes)}`, [...series, { name: "lower bound", points: points(this.cost.bound) }],
      { label: "ranks", log: true, base: 2, text: (value) => String(Math.round(value)) }, this.data.size);
  }

  chart(title, series, x, at) {
    const positive = series.map(({ name, points }) => ({ name, points: points.filter((point) => point[1] > 0) }));
    return lineChart({ title, series: positive, x, y: { label: "time", log: true, text: formatSeconds }, at, strong: this.data.algorithm });
  }
}

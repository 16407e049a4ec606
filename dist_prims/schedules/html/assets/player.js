/**
 * The controls of a page that shows one position of several: buttons, a slider, arrow keys, and the address, in which
 * "#step=3" is the position with the name "3".
 */
class Player {
  constructor({ names, word, show, start = 0, interval = 900 }) {
    Object.assign(this, { names, word, show, interval, at: 0, timer: null });
    this.input = element("input", {
      type: "range", id: "position", min: 0, max: names.length - 1, step: 1, "aria-label": word,
      oninput: () => this.go(Number(this.input.value)),
    });
    this.label = element("output", { for: "position", class: "position" });
    this.playing = this.button("Play", () => this.toggle(), "Space");
    this.toolbar = element(
      "div",
      { class: "toolbar", role: "toolbar", "aria-label": `${word} controls` },
      this.button("First", () => this.go(0), "Home"),
      this.button("Back", () => this.go(this.at - 1), "left arrow"),
      this.playing,
      this.button("Forward", () => this.go(this.at + 1), "right arrow"),
      this.button("Last", () => this.go(names.length - 1), "End"),
      this.input,
      this.label,
    );
    document.addEventListener("keydown", (event) => this.key(event));
    window.addEventListener("hashchange", () => this.go(this.fromAddress(this.at), { keep: true }));
    this.go(this.fromAddress(start), { keep: true });
  }

  button(text, act, key) {
    const press = () => {
      if (text !== "Play") this.stop();
      act();
    };
    return element("button", { type: "button", title: `${text} (${key})`, onclick: press }, text);
  }

  /** The position that the address names, or else `otherwise`. */
  fromAddress(otherwise) {
    const name = new URLSearchParams(location.hash.slice(1)).get(this.word);
    const position = this.names.indexOf(name);
    return position < 0 ? otherwise : position;
  }

  go(position, { keep = false } = {}) {
    this.at = Math.max(0, Math.min(this.names.length - 1, position));
    const name = this.names[this.at];
    this.input.value = this.at;
    this.label.textContent = /^\d/.test(name) ? `${this.word} ${name}` : name;
    this.input.setAttribute("aria-valuetext", this.label.textContent);
    if (!keep) this.writeAddress(`#${this.word}=${name}`);
    this.show(this.at);
  }

  /** Take other names, at the end if it was at the end. */
  rename(names) {
    const atEnd = this.at === this.names.length - 1;
    this.names = names;
    this.input.max = names.length - 1;
    this.go(atEnd ? names.length - 1 : this.at, { keep: true });
  }

  writeAddress(hash) {
    try {
      history.replaceState(null, "", hash);
    } catch {
      // A frame without an address of its own, as in a notebook, has none to change.
    }
  }

  toggle() {
    if (this.timer) return this.stop();
    if (this.at === this.names.length - 1) this.go(0);
    this.playing.textContent = "Pause";
    this.timer = setInterval(() => {
      this.go(this.at + 1);
      if (this.at === this.names.length - 1) this.stop();
    }, this.interval);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.playing.textContent = "Play";
  }

  key(event) {
    const inControl = event.target.closest("input, select, textarea, [role=grid]");
    if (inControl || event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === " " && event.target.closest("button, summary, a")) return;
    const moves = {
      ArrowRight: () => this.go(this.at + 1), ArrowLeft: () => this.go(this.at - 1),
      Home: () => this.go(0), End: () => this.go(this.names.length - 1),
    };
    if (event.key === " ") this.toggle();
    else if (moves[event.key]) {
      this.stop();
      moves[event.key]();
    } else return;
    event.preventDefault();
  }
}

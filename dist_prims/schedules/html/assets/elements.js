/** An HTML element with attributes and children; an attribute whose name starts with "on" is an event handler. */
function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for an element of SVG. */
function drawing(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function section(title, ...children) {
  return element("section", { "aria-label": title }, element("h2", {}, title), ...children);
}

/** A range input with a label and its value as text; `read` and `write` translate between position and value. */
function slider({ name, id, min, max, step, value, read = Number, write = Number, text, changed }) {
  const shown = element("output", { for: id }, text(value));
  const input = element("input", { type: "range", id, min, max, step, "aria-valuetext": text(value) });
  input.value = write(value);
  input.addEventListener("input", () => {
    const now = read(Number(input.value));
    shown.textContent = text(now);
    input.setAttribute("aria-valuetext", text(now));
    changed(now);
  });
  return element("div", { class: "slider" }, element("label", { for: id }, name), input, shown);
}

/** A table, in a box that scrolls where it is too wide; the first row has the headings. */
function table(rows, caption) {
  const [head, ...body] = rows;
  const cells = (row, tag) => element("tr", {}, ...row.map((cell) => element(tag, {}, String(cell))));
  const made = element(
    "table",
    {},
    element("caption", {}, caption),
    element("thead", {}, cells(head, "th")),
    element("tbody", {}, ...body.map((row) => cells(row, "td"))),
  );
  return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, made);
}

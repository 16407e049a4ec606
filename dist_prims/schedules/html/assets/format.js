"use strict";

/** Numbers as text, with runs abbreviated: [0, 1, 2, 5] is "0-2, 5". */
function numbers(values, prefix = "") {
  const runs = [];
  for (const value of values) {
    const last = runs[runs.length - 1];
    if (last && last[1] === value - 1) last[1] = value;
    else runs.push([value, value]);
  }
  return runs.map(([a, b]) => (a === b ? `${prefix}${a}` : `${prefix}${a}-${prefix}${b}`)).join(", ");
}

function withUnit(value, units, base) {
  let at = 0;
  while (value >= 999.5 && at < units.length - 1) {
    value /= base;
    at += 1;
  }
  return `${value >= 999.5 ? Math.round(value) : Number(value.toPrecision(3))} ${units[at]}`;
}

const formatSeconds = (seconds) => withUnit(seconds * 1e9, ["ns", "µs", "ms", "s"], 1000);
const formatBytes = (count) => withUnit(count, ["B", "KB", "MB", "GB", "TB"], 1024);
const formatNumber = (value) => String(Number(value.toPrecision(3)));
const range = (from, to) => Array.from({ length: Math.max(0, to - from) }, (_, at) => from + at);
const plural = (count, noun, many = `${noun}s`) => `${count} ${count === 1 ? noun : many}`;

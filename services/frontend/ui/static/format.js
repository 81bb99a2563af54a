// Formats numbers, times and names for people.

const UNITS = ["B", "kB", "MB", "GB", "TB"];

export function bytes(value) {
  let unit = 0;
  let left = value || 0;
  while (left >= 1000 && unit < UNITS.length - 1) {
    left /= 1000;
    unit += 1;
  }
  return `${short(left)} ${UNITS[unit]}`;
}

export const rate = (value) => `${bytes(value)}/s`;

// Three significant digits for small numbers, a thousands separator for large ones.
export function short(value) {
  if (value == null || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  if (Math.abs(value) >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return String(Number(value.toPrecision(2)));
}

export function ms(seconds) {
  if (seconds == null) return "–";
  const value = seconds * 1000;
  if (value >= 1000) return `${(value / 1000).toFixed(value >= 10000 ? 1 : 2)} s`;
  if (value >= 100) return `${Math.round(value)} ms`;
  return `${value.toFixed(value >= 10 ? 1 : 2)} ms`;
}

export const percent = (share) => `${Math.round(100 * share)} %`;

export function clock(unixS) {
  const then = new Date(unixS * 1000);
  const time = then.toLocaleTimeString("en-GB");
  return then.toDateString() === new Date().toDateString() ? time : `${then.toLocaleDateString("en-CA")} ${time}`;
}

export function age(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 90) return `${s} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86400)} d`;
}

// Returns the role of a span's process, whose name is for example decode-1a2b3c4d.
export const roleOf = (service) => service.slice(0, service.indexOf("-")) || service;

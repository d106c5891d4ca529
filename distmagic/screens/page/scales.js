// Numbers of a chart: its axes, its ticks, its smoothing, and how a number is written. Pure.

// Four significant digits, as Python writes them in the table: quantities.number.
export function shortNumber(value) {
  if (!Number.isFinite(value)) return String(value).replace('Infinity', 'inf');
  const size = Math.abs(value);
  if (size >= 1e6) return value.toExponential(3).replace('e+', 'e');
  if (size >= 1000 || Number.isInteger(value)) return value.toFixed(0);
  if (size < 1e-4) return Number(value.toPrecision(4)).toExponential().replace(/e-(\d)$/, 'e-0$1');
  return String(Number(value.toPrecision(4)));
}

// Return what maps a value to its part of the axis, 0 to 1.
export function scale(low, high, isLog) {
  const of = isLog ? Math.log10 : value => value;
  const span = of(high) - of(low);
  return value => (span > 0 ? (of(Math.max(value, isLog ? low : -Infinity)) - of(low)) / span : 0.5);
}

// Return the values at the bottom, in the middle and at the top of an axis.
export function ticks(low, high, isLog) {
  if (low === high) return [low];
  return [low, isLog ? Math.sqrt(low * high) : (low + high) / 2, high];
}

// An exponential mean that begins without a bias to its first value; `weight` 0 changes nothing.
export function smoothed(values, weight) {
  let sum = 0;
  let norm = 0;
  return values.map(value => {
    sum = sum * weight + value * (1 - weight);
    norm = norm * weight + (1 - weight);
    return sum / norm;
  });
}

export function nearest(sorted, value) {
  let low = 0;
  let high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle;
    else high = middle;
  }
  return value - sorted[low] <= sorted[high] - value ? low : high;
}

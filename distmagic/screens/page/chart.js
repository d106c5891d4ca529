// One metric: a line a rank with its band, an axis that may be logarithmic, and the values under the pointer.

import { element } from './patch.js';
import { nearest, scale, shortNumber, smoothed, ticks } from './scales.js';

const WIDE = 800; // of the drawing's own units
const HIGH = 200;
const SVG = 'http://www.w3.org/2000/svg';
const COLOURS = 8;

export const colourOf = rank => (rank < 0 ? 'dm-c0' : `dm-c${(rank + Math.floor(rank / COLOURS)) % COLOURS}`);

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

const hasHole = ({ holes }, left, right) => holes.some(([first, last]) => first <= right && last >= left);

export class Chart {
  constructor() {
    this.node = element('figure', 'dm-curve');
    const caption = element('figcaption');
    this.title = element('b');
    this.warning = element('b', 'dm-bad');
    this.value = element('span', 'dm-value');
    this.log = element('button', 'dm-log-axis', 'log');
    this.log.onclick = () => {
      this.isLog = !this.usesLog();
      this.draw();
    };
    caption.append(this.title, this.warning, this.value, this.log);
    this.yAxis = element('div', 'dm-axis dm-y');
    this.xAxis = element('div', 'dm-axis dm-x');
    this.drawing = shape('svg', { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: 'none', role: 'img' });
    this.tip = element('div', 'dm-tip');
    this.tip.hidden = true;
    const plot = element('div', 'dm-plot');
    plot.append(this.drawing, this.tip);
    plot.onpointermove = event => this.pointAt(event);
    plot.onpointerleave = () => this.pointAt(null);
    this.node.append(caption, this.yAxis, plot, this.xAxis);
  }

  // `look` has the weight of the smoothing, and the rank that alone is shown, if any.
  update(data, look) {
    this.data = data;
    this.look = look;
    this.draw();
  }

  usesLog() {
    return this.low > 0 && (this.isLog ?? this.data.is_log);
  }

  draw() {
    const { data, look } = this;
    const chosen = data.lines.filter(line => line.rank === look.rank);
    this.lines = chosen.length ? chosen : data.lines;
    const xs = this.lines.flatMap(line => [...line.x, ...line.holes.flat()]);
    this.xs = [...new Set(xs)].sort((a, b) => a - b); // where there is something to point at
    this.left = this.xs[0];
    this.right = this.xs.at(-1);
    this.low = Math.min(...this.lines.flatMap(line => line.low ?? line.mean));
    this.high = Math.max(...this.lines.flatMap(line => line.high ?? line.mean));
    const isLog = this.usesLog();
    const [x, y] = [scale(this.left, this.right, false), scale(this.low, this.high, isLog)];
    this.xOf = value => Math.round(WIDE * x(value));
    this.yOf = value => Math.round(HIGH * (1 - y(value)));
    this.marker = shape('path', { class: 'dm-pointer', d: '' });
    this.drawing.replaceChildren(...this.grid(), ...this.lines.flatMap(line => this.pathsOf(line)), this.holes(), this.marker);
    this.tell(isLog);
  }

  grid() {
    return [0, HIGH / 2, HIGH].map(y => shape('path', { class: 'dm-grid', d: `M0,${y}H${WIDE}` }));
  }

  pathsOf(line) {
    const colour = colourOf(line.rank);
    const path = values => line.x.map((x, i) => `${this.startsAt(line, i)}${this.xOf(x)},${this.yOf(values[i])}`).join('');
    const found = [];
    if (line.low) {
      const back = line.x.map((x, i) => `L${this.xOf(x)},${this.yOf(line.low[i])}`).reverse().join('');
      const there = line.x.map((x, i) => `${i ? 'L' : 'M'}${this.xOf(x)},${this.yOf(line.high[i])}`).join('');
      found.push(shape('path', { class: `dm-band ${colour}`, d: `${there}${back}Z` }));
    }
    const { weight } = this.look;
    found.push(shape('path', { class: `${weight ? 'dm-raw ' : ''}${colour}`, d: path(line.mean) }));
    if (weight) found.push(shape('path', { class: colour, d: path(smoothed(line.mean, weight)) }));
    return found;
  }

  // A rank's line has a gap where a value of its is no number; that of all ranks goes on.
  startsAt(line, index) {
    const hasGap = index && line.rank >= 0 && hasHole(line, line.x[index - 1], line.x[index]);
    return !index || hasGap ? 'M' : 'L';
  }

  holes() {
    const all = this.lines.flatMap(line => line.holes);
    const d = all.map(([first, last]) => `M${this.xOf(first)},24V0H${this.xOf(last)}v24`).join('');
    return shape('path', { class: 'dm-nan', d });
  }

  tell(isLog) {
    const { data } = this;
    const last = this.lines === data.lines ? data.last : this.lines[0].last;
    this.title.textContent = data.name;
    this.warning.textContent = data.warning && ` ${data.warning}`;
    this.value.textContent = last;
    this.log.hidden = !(this.low > 0) || this.low === this.high;
    this.log.setAttribute('aria-pressed', isLog);
    this.log.setAttribute('aria-label', `logarithmic axis of ${data.name}`);
    const hasValues = this.low <= this.high; // else all are NaN
    const values = hasValues ? ticks(this.low, this.high, isLog).reverse() : [];
    this.yAxis.replaceChildren(...values.map(value => element('span', '', shortNumber(value))));
    const ends = [this.left, this.right].map(value => element('span', '', this.xWords(value)));
    this.xAxis.replaceChildren(...ends);
    const range = hasValues ? `${shortNumber(this.low)} to ${shortNumber(this.high)}` : 'no values';
    this.drawing.setAttribute('aria-label', `${data.name}: ${range}, last ${last}`);
  }

  xWords(value) {
    return this.data.counts_steps ? `step ${Math.round(value).toLocaleString('en')}` : `${shortNumber(value)} s`;
  }

  // Show the values at the place of the pointer.
  pointAt(event) {
    this.tip.hidden = !event;
    if (!event) {
      this.marker.setAttribute('d', '');
      return;
    }
    const box = this.drawing.getBoundingClientRect();
    const part = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const wanted = this.left + part * (this.right - this.left);
    const at = this.xs[nearest(this.xs, wanted)];
    this.marker.setAttribute('d', `M${this.xOf(at)},0V${HIGH}`);
    this.tip.replaceChildren(element('div', '', this.xWords(at)), ...this.lines.map(line => this.valueAt(line, at)));
    this.tip.classList.toggle('dm-left', part > 0.5);
    this.tip.style.left = `${100 * part}%`;
  }

  valueAt(line, at) {
    const words = element('div', colourOf(line.rank));
    const name = line.rank < 0 ? `mean of ${this.data.ranks} ranks` : `rank ${line.rank}`;
    words.textContent = `${name}: ${this.valueWords(line, at)}`;
    return words;
  }

  // The value next to a place; none where the rank has not been, or its value is no number.
  valueWords(line, at) {
    if (line.rank >= 0 && hasHole(line, at, at)) return 'NaN or inf';
    const index = nearest(line.x, at);
    const isAway = at < line.x[0] || at > line.x.at(-1);
    if (!line.x.length || (isAway && Math.abs(at - line.x[index]) > (this.right - this.left) / 50)) return '-';
    const spread = line.low && line.low[index] !== line.high[index]
      ? ` (${shortNumber(line.low[index])} to ${shortNumber(line.high[index])})` : '';
    return `${shortNumber(line.mean[index])}${spread}`;
  }
}

// The lines of output that a page has, in their order, and between them gaps: lines that it has not, and can ask for.

import { element } from './patch.js';

export const NEAR = 64; // as many lines back the same line of another rank is looked for

export class Lines {
  // `ask` takes the number of a line, and returns lines before it as `KeptLines.before` in kept_lines.py has them, null
  // where none can be had. `onLines` is called when some have come so.
  constructor(ask, onLines) {
    this.ask = ask;
    this.onLines = onLines;
    this.node = element('pre');
    this.rest = ''; // where all lines are, in words
    this.gaps = [];
    this.clear();
  }

  clear() {
    this.all = []; // { number, node, text, ranks, isStderr }
    this.gaps = [this.gap(0, 0)];
    this.node.replaceChildren(this.gaps[0].node);
  }

  // Add all lines from number `first` up to `end`, of which those from `seen` on are new; others fill gaps.
  add(first, end, seen, entries) {
    for (const gap of [...this.gaps]) this.put(gap, first, Math.min(end, seen), entries);
    if (!this.all.length) this.widen(this.gaps[0], 0, first);
    else if (first > seen) {
      this.gaps.push(this.gap(seen, first));
      this.node.append(this.gaps.at(-1).node);
    }
    const { lines, nodes } = this.made(entries.filter(([number]) => number >= seen), this.all);
    this.all.push(...lines);
    this.node.append(...nodes);
  }

  // Put into a gap those of its lines that are among the ones from `first` up to `end`. What is left of it stays above
  // them, and below them another gap where they are not its last ones.
  put(gap, first, end, entries) {
    const [from, to] = [Math.max(gap.from, first), Math.min(gap.to, end)];
    if (from >= to) return;
    const index = this.all.findIndex(line => line.number >= gap.to);
    const at = index < 0 ? this.all.length : index;
    const wanted = entries.filter(([number]) => number >= from && number < to);
    const { lines, nodes } = this.made(wanted, from === gap.from ? this.all.slice(0, at) : []);
    const below = [];
    if (to < gap.to) {
      below.push(this.gap(to, gap.to));
      this.gaps.splice(this.gaps.indexOf(gap) + 1, 0, below[0]);
    }
    gap.node.after(...nodes, ...below.map(one => one.node));
    this.all.splice(at, 0, ...lines);
    if (!below.length) this.join(lines);
    this.widen(gap, gap.from, from);
    if (gap.from >= from && gap !== this.gaps[0]) {
      gap.node.remove();
      this.gaps.splice(this.gaps.indexOf(gap), 1);
    }
  }

  // What stands below new lines counts with them, where another rank has written the same there.
  join(lines) {
    const end = this.all.indexOf(lines.at(-1)) + 1;
    const near = lines.slice(-NEAR);
    for (const line of this.all.slice(end, end + NEAR)) {
      const same = near.find(one => isSame(one, line));
      if (!same) continue;
      fold(same, line);
      line.node.remove();
      this.all.splice(this.all.indexOf(line), 1);
    }
  }

  // Return new lines and their nodes. What another rank has written just before counts there as one line.
  made(entries, above) {
    const near = above.slice(-NEAR);
    const [lines, nodes] = [[], []];
    for (const [number, rank, html] of entries) {
      if (rank === null) {
        nodes.push(this.missing(html - number));
        continue;
      }
      const line = lineOf(number, rank, html);
      const same = near.slice(-NEAR).find(one => isSame(one, line));
      if (same) {
        fold(same, line);
        continue;
      }
      near.push(line);
      lines.push(line);
      nodes.push(line.node);
    }
    return { lines, nodes };
  }

  missing(count) {
    const made = element('div', 'dm-gap dm-faint', `… ${inWords(count)} came too fast to be kept here: ${this.rest}`);
    made.dataset.count = count;
    return made;
  }

  // Return a gap for the lines with these numbers, `to` not among them.
  gap(from, to) {
    const made = { node: element('div', 'dm-gap dm-faint'), words: element('span'), button: element('button', '', 'Show more') };
    made.button.onclick = () => this.fill(made);
    made.node.append(made.words, made.button);
    this.widen(made, from, to);
    return made;
  }

  widen(gap, from, to) {
    Object.assign(gap, { from, to, isLost: false });
    gap.node.hidden = to <= from;
    gap.button.hidden = !this.ask;
    gap.words.textContent = `… ${inWords(to - from)}${this.ask ? '' : `: ${this.rest}`}`;
  }

  // Ask for the lines right before those below the gap.
  async fill(gap) {
    const { to } = gap;
    gap.button.disabled = true;
    const answer = await this.ask(to).catch(() => ({}));
    gap.button.disabled = false;
    if (!answer) this.close();
    if (gap.to !== to || !this.gaps.includes(gap)) return; // it has changed meanwhile
    if (!answer?.lines || answer.first >= to) {
      gap.isLost = true;
      gap.button.hidden = true;
      gap.words.textContent = `… ${inWords(gap.to - gap.from)}: ${this.rest}`;
      return;
    }
    const pane = this.node.parentElement;
    const fromEnd = pane.scrollHeight - pane.scrollTop; // what is below the gap stays where it is seen
    const count = this.all.length;
    this.put(gap, answer.first, to, answer.lines);
    this.onLines(this.all.length - count);
    pane.scrollTop = pane.scrollHeight - fromEnd;
  }

  // How many lines are not here, among those of the run.
  get absent() {
    const missing = [...this.node.querySelectorAll('[data-count]')].map(node => Number(node.dataset.count));
    return [...missing, ...this.gaps.map(gap => gap.to - gap.from)].reduce((sum, count) => sum + count, 0);
  }

  // Let go of the oldest lines, down to a number of them.
  trim(limit) {
    if (this.all.length <= limit) return;
    this.all.splice(0, this.all.length - limit);
    const [top] = this.gaps;
    const [first] = this.all;
    while (top.node.nextSibling !== first.node) top.node.nextSibling.remove();
    this.gaps = this.gaps.filter(gap => this.node.contains(gap.node));
    this.widen(top, 0, first.number);
  }

  // Nothing can be asked for any more: the kernel has ended.
  close() {
    this.ask = null;
    for (const gap of this.gaps) this.widen(gap, gap.from, gap.to);
  }
}

const inWords = count => `${count.toLocaleString('en')} ${count === 1 ? 'line' : 'lines'}`;

function lineOf(number, rank, html) {
  const template = document.createElement('template');
  template.innerHTML = html;
  const node = template.content.firstElementChild;
  const text = node.textContent.slice(node.querySelector('b').textContent.length).trim();
  return { number, node, text, ranks: new Set([rank]), isStderr: node.classList.contains('dm-stderr') };
}

const isSame = (one, line) =>
  line.text && one.text === line.text && one.isStderr === line.isStderr && ![...line.ranks].some(rank => one.ranks.has(rank));

function fold(line, other) {
  for (const rank of other.ranks) line.ranks.add(rank);
  line.node.querySelector('b').textContent = `[${line.ranks.size} ranks]`;
  line.node.title = `ranks ${[...line.ranks].sort((a, b) => a - b).join(', ')}`;
}

// The lines of output that a page has, in their order, and between them gaps: lines that it has not, and can ask for.

import { element } from './patch.js';

export const NEAR = 64; // as many lines back the same line of another rank is looked for

export class Lines {
  // `ask` takes the number of a line, and returns lines before it as `KeptLines.before` in kept_lines.py has them, null
  // where none can be had. `onLines` gets the lines that have come so.
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

  // Add lines that are new; `first` is the number from which on there are all, `seen` that of the first one not seen before.
  append(first, seen, entries) {
    if (!this.all.length) this.widen(this.gaps[0], 0, first);
    else if (first > seen) {
      this.gaps.push(this.gap(seen, first));
      this.node.append(this.gaps.at(-1).node);
    }
    const { lines, nodes } = this.made(entries, this.all);
    this.all.push(...lines);
    this.node.append(...nodes);
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
      const same = near.slice(-NEAR).find(one => isSame(one, line, rank));
      if (same) {
        fold(same, rank);
        continue;
      }
      near.push(line);
      lines.push(line);
      nodes.push(line.node);
    }
    return { lines, nodes };
  }

  missing(count) {
    return element('div', 'dm-gap dm-faint', `… ${inWords(count)} came too fast to be kept here: ${this.rest}`);
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
    Object.assign(gap, { from, to });
    gap.node.hidden = to <= from;
    gap.button.hidden = !this.ask;
    gap.words.textContent = `… ${inWords(to - from)}${this.ask ? '' : `: ${this.rest}`}`;
  }

  // Ask for the lines right before those below the gap.
  async fill(gap) {
    const { to } = gap;
    gap.button.disabled = true;
    const answer = await this.ask(to).catch(() => null);
    gap.button.disabled = false;
    if (gap.to !== to) return; // it has grown meanwhile
    if (!answer?.lines || answer.first >= to) {
      gap.button.hidden = true;
      gap.words.textContent = `… ${inWords(gap.to - gap.from)}: ${this.rest}`;
      return;
    }
    const { lines, nodes } = this.made(answer.lines.filter(([number]) => number >= gap.from), []);
    const index = this.all.findIndex(line => line.number >= to);
    this.all.splice(index < 0 ? this.all.length : index, 0, ...lines);
    const pane = this.node.parentElement;
    const fromEnd = pane.scrollHeight - pane.scrollTop; // what is below the gap stays where it is seen
    gap.node.after(...nodes);
    this.widen(gap, gap.from, Math.max(gap.from, answer.first));
    this.onLines(lines);
    pane.scrollTop = pane.scrollHeight - fromEnd;
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

const isSame = (one, line, rank) =>
  line.text && one.text === line.text && one.isStderr === line.isStderr && !one.ranks.has(rank);

function fold(line, rank) {
  line.ranks.add(rank);
  line.node.querySelector('b').textContent = `[${line.ranks.size} ranks]`;
  line.node.title = `ranks ${[...line.ranks].sort((a, b) => a - b).join(', ')}`;
}

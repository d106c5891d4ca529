// The output of all ranks: the last thousand lines, to be filtered and searched. It moves only for somebody who looks
// at its end; while a text is selected, or an earlier line is looked at, it stays where it is.

import { element, patch } from './patch.js';

const KEPT = 1000;
const KEPT_WHILE_READ = 5000;
const NEAR = 64; // as many lines back the same line of another rank is looked for
const ERROR = /^Traceback \(most recent call last\)|^\w*(Error|Exception)\b|\berror\b/i;

export class Log {
  constructor() {
    this.node = element('section', 'dm-log');
    this.node.setAttribute('aria-label', 'output of the ranks');
    this.node.hidden = true;
    this.lines = []; // { node, text, ranks, isStderr }
    this.seen = 0; // lines of the run so far
    this.ranks = new Set();
    const bar = element('div', 'dm-log-bar');
    this.about = element('span', 'dm-faint');
    this.text = element('input');
    this.text.type = 'search';
    this.text.placeholder = 'filter';
    this.text.setAttribute('aria-label', 'show only lines with this text');
    this.rank = this.choice('rank', [['', 'all ranks']]);
    this.stream = this.choice('stream', [['', 'both streams'], ['stdout', 'stdout'], ['stderr', 'stderr']]);
    this.jump = element('button', '', 'First error');
    this.jump.onclick = () => this.showFirstError();
    for (const field of [this.text, this.rank, this.stream]) field.oninput = () => this.filter();
    bar.append(this.about, this.text, this.rank, this.stream, this.jump);
    this.pane = element('div', 'dm-log-lines');
    this.pane.tabIndex = 0; // to be scrolled with keys
    this.pane.setAttribute('role', 'log');
    this.pane.setAttribute('aria-live', 'off');
    this.body = element('pre');
    this.open = element('pre', 'dm-log-open');
    this.pane.append(this.body, this.open);
    this.node.append(bar, this.pane);
  }

  choice(name, options) {
    const made = element('select');
    made.setAttribute('aria-label', `show only one ${name}`);
    for (const [value, label] of options) made.append(new Option(label, value));
    return made;
  }

  // Add the lines that are new. Lines are numbered from the beginning of the run; these are those from `first` on.
  add({ first, lines, open, total, count }) {
    const isAtEnd = this.isAtEnd();
    if (first > this.seen) this.addGap(first - this.seen);
    for (const [number, rank, html] of lines) if (number >= this.seen) this.addLine(rank, html);
    this.seen = Math.max(this.seen, total);
    patch(this.open, open);
    this.count = count; // without lines that are not worth showing
    this.node.hidden = !this.lines.length && !open;
    this.trim(isAtEnd);
    this.tell();
    if (isAtEnd && !this.isBeingRead()) this.pane.scrollTop = this.pane.scrollHeight;
  }

  addGap(count) {
    const node = element('span', 'dm-line dm-faint', `… ${count.toLocaleString('en')} lines not shown here\n`);
    this.keep({ node, text: '', ranks: new Set(), isStderr: false });
  }

  addLine(rank, html) {
    const template = document.createElement('template');
    template.innerHTML = html;
    const node = template.content.firstElementChild;
    const label = node.querySelector('b');
    const text = node.textContent.slice(label.textContent.length).trim();
    const isStderr = node.classList.contains('dm-stderr');
    this.addRank(rank);
    const same = text && this.lines.slice(-NEAR).find(
      line => line.text === text && line.isStderr === isStderr && line.ranks.size && !line.ranks.has(rank));
    if (same) {
      same.ranks.add(rank);
      same.node.querySelector('b').textContent = `[${same.ranks.size} ranks]`;
      same.node.title = `ranks ${[...same.ranks].sort((a, b) => a - b).join(', ')}`;
      return;
    }
    this.keep({ node, text, ranks: new Set([rank]), isStderr });
  }

  keep(line) {
    line.node.hidden = !this.isWanted(line);
    this.lines.push(line);
    this.body.append(line.node);
  }

  addRank(rank) {
    if (this.ranks.has(rank)) return;
    this.ranks.add(rank);
    const after = [...this.rank.options].find(option => option.value !== '' && Number(option.value) > rank);
    this.rank.add(new Option(rank < 0 ? 'torchrun' : `rank ${rank}`, rank), after ?? null);
  }

  isWanted({ text, ranks, isStderr }) {
    const isOfRank = !this.rank.value || ranks.has(Number(this.rank.value));
    const isOfStream = !this.stream.value || isStderr === (this.stream.value === 'stderr');
    return isOfRank && isOfStream && text.toLowerCase().includes(this.text.value.toLowerCase());
  }

  filter() {
    for (const line of this.lines) line.node.hidden = !this.isWanted(line);
    this.tell();
    this.pane.scrollTop = this.pane.scrollHeight;
  }

  tell() {
    const shown = this.lines.filter(line => !line.node.hidden).length;
    this.about.textContent = `${shown.toLocaleString('en')} of ${(this.count ?? 0).toLocaleString('en')} lines`;
    this.about.title = "all that a rank wrote: run.logs(rank)";
    this.jump.hidden = !this.lines.some(line => ERROR.test(line.text));
  }

  showFirstError() {
    const found = this.lines.find(line => ERROR.test(line.text) && !line.node.hidden);
    if (!found) return;
    for (const line of this.lines) line.node.classList.toggle('dm-found', line === found);
    this.pane.scrollTop = found.node.offsetTop - this.pane.offsetTop - 20;
  }

  isAtEnd() {
    return this.pane.scrollTop + this.pane.clientHeight > this.pane.scrollHeight - 8;
  }

  isBeingRead() {
    const selection = document.getSelection();
    return Boolean(selection && !selection.isCollapsed && this.pane.contains(selection.anchorNode));
  }

  trim(isAtEnd) {
    const limit = this.isBeingRead() || !isAtEnd ? KEPT_WHILE_READ : KEPT;
    for (const line of this.lines.splice(0, Math.max(0, this.lines.length - limit))) line.node.remove();
  }
}

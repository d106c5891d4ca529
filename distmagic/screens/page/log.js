// The output of all ranks: the last thousand lines, to be filtered and searched. It moves only for somebody who looks
// at its end; while a text is selected, or an earlier line is looked at, it stays where it is.

import { Lines, NEAR } from './lines.js';
import { element, patch } from './patch.js';

const KEPT = 1000;
const KEPT_WHILE_READ = 5000; // and those that were asked for
export const LINES_SAVED = 100; // lines, in a notebook that is saved while the run goes on
const ERROR = /^Traceback \(most recent call last\)|^\w*(Error|Exception)\b|\berror\b/i;

export class Log {
  // `ask` takes the number of a line, and returns a promise of lines before it.
  constructor(ask) {
    this.node = element('section', 'dm-log');
    this.node.setAttribute('aria-label', 'output of the ranks');
    this.node.hidden = true;
    this.lines = new Lines(ask, lines => this.addEarlier(lines));
    this.seen = 0; // lines of the run so far
    this.asked = 0; // earlier lines that were asked for, and are kept while somebody reads
    this.ranks = new Set();
    const bar = element('div', 'dm-log-bar');
    this.about = element('span', 'dm-faint');
    this.text = element('input');
    this.text.type = 'search';
    this.text.placeholder = 'filter';
    this.text.setAttribute('aria-label', 'show only lines with this text');
    this.rank = this.choice('rank', [['', 'all ranks']]);
    this.stream = this.choice('stream', [['', 'both streams'], ['stdout', 'stdout'], ['stderr', 'stderr']]);
    this.filters = [this.text, this.rank, this.stream];
    this.jump = element('button', '', 'First error');
    this.jump.onclick = () => this.showFirstError();
    for (const field of this.filters) field.oninput = () => this.filter();
    bar.append(this.about, this.text, this.rank, this.stream, this.jump);
    this.pane = element('div', 'dm-log-lines');
    this.pane.tabIndex = 0; // to be scrolled with keys
    this.pane.setAttribute('role', 'log');
    this.pane.setAttribute('aria-live', 'off');
    this.open = element('pre', 'dm-log-open');
    this.pane.append(this.lines.node, this.open);
    this.node.append(bar, this.pane);
  }

  choice(name, options) {
    const made = element('select');
    made.setAttribute('aria-label', `show only one ${name}`);
    for (const [value, label] of options) made.append(new Option(label, value));
    return made;
  }

  // Of this job the lines are; `variable` has its run.
  update({ job, variable }) {
    this.lines.rest = `${variable}.logs(rank), %distributed logs ${job} RANK`;
  }

  // Add the lines that are new. Lines are numbered from the beginning of the run; these are those from `first` on. With
  // `again` they come in place of all others: there are some among them that were not shown before.
  add({ first, lines, open, total, count, again }) {
    const isAtEnd = this.isAtEnd();
    if (again && total >= this.seen) {
      this.lines.clear();
      this.seen = 0;
    }
    const before = this.lines.all.length;
    this.lines.append(first, this.seen, lines.filter(([number]) => number >= this.seen));
    for (const [, rank] of lines) if (rank !== null) this.addRank(rank);
    for (const line of this.lines.all.slice(Math.max(0, before - NEAR))) this.show(line);
    this.seen = Math.max(this.seen, total);
    patch(this.open, open);
    this.count = count; // without lines that are not worth showing
    this.node.hidden = !this.lines.all.length && !open;
    this.trim(isAtEnd);
    this.tell();
    if (isAtEnd && !this.isBeingRead()) this.pane.scrollTop = this.pane.scrollHeight;
  }

  addEarlier(lines) {
    this.asked += lines.length;
    for (const line of lines) {
      for (const rank of line.ranks) this.addRank(rank);
      this.show(line);
    }
    this.tell();
  }

  addRank(rank) {
    if (this.ranks.has(rank)) return;
    this.ranks.add(rank);
    const after = [...this.rank.options].find(option => option.value !== '' && Number(option.value) > rank);
    this.rank.add(new Option(rank < 0 ? 'torchrun' : `rank ${rank}`, rank), after ?? null);
  }

  show(line) {
    line.node.hidden = !this.isWanted(line);
  }

  isWanted({ text, ranks, isStderr }) {
    const isOfRank = !this.rank.value || ranks.has(Number(this.rank.value));
    const isOfStream = !this.stream.value || isStderr === (this.stream.value === 'stderr');
    return isOfRank && isOfStream && text.toLowerCase().includes(this.text.value.toLowerCase());
  }

  filter() {
    for (const line of this.lines.all) this.show(line);
    this.tell();
    this.pane.scrollTop = this.pane.scrollHeight;
  }

  tell() {
    const shown = this.lines.all.filter(line => !line.node.hidden).length;
    this.about.textContent = `${shown.toLocaleString('en')} of ${(this.count ?? 0).toLocaleString('en')} lines`;
    this.about.title = `all that a rank wrote: ${this.lines.rest}`;
    this.jump.hidden = !this.lines.all.some(line => ERROR.test(line.text));
  }

  showFirstError() {
    const found = this.lines.all.find(line => ERROR.test(line.text) && !line.node.hidden);
    if (!found) return;
    for (const line of this.lines.all) line.node.classList.toggle('dm-found', line === found);
    this.pane.scrollTop = found.node.offsetTop - this.pane.offsetTop - 20;
  }

  isAtEnd() {
    return this.pane.scrollTop + this.pane.clientHeight > this.pane.scrollHeight - 8;
  }

  isBeingRead() {
    const selection = document.getSelection();
    return Boolean(selection && !selection.isCollapsed && this.pane.contains(selection.anchorNode));
  }

  // A filter may leave so few lines that the pane is at its end in any case: lines that were asked for stay with it.
  trim(isAtEnd) {
    const isSearched = this.asked && this.filters.some(field => field.value);
    const isRead = this.isBeingRead() || !isAtEnd || isSearched;
    if (!isRead) this.asked = 0;
    this.lines.trim(isRead ? KEPT_WHILE_READ + this.asked : KEPT);
  }

  // Say what is saved of the lines, and where all of them are.
  saved() {
    const some = this.count > LINES_SAVED ? `last ${LINES_SAVED} of ${this.count.toLocaleString('en')} lines` : 'output';
    return `${some} · all: ${this.lines.rest}`;
  }

  // Nothing can be asked for any more: the kernel has ended.
  close() {
    this.lines.close();
  }
}

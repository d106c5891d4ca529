// The output of all ranks: the last thousand lines; while they are filtered, all that the kernel has. It moves only for
// somebody who looks at its end; while a text is selected, or an earlier line is looked at, it stays where it is.

import { Lines, NEAR } from './lines.js';
import { element, patch } from './patch.js';

const KEPT = 1000;
const KEPT_WHILE_READ = 5000; // and those that were asked for
const MOST_KEPT = 20_000;
const PAUSE_MS = 1000; // between gaps that are filled by themselves
export const LINES_SAVED = 100; // lines, in a notebook that is saved while the run goes on
const ERROR = /^Traceback \(most recent call last\)|^\w*(Error|Exception)\b|\berror\b/i;

export class Log {
  // `ask` takes the number of a line, and returns a promise of lines before it.
  constructor(ask) {
    this.node = element('section', 'dm-log');
    this.node.setAttribute('aria-label', 'output of the ranks');
    this.node.hidden = true;
    this.lines = new Lines(ask, count => this.addEarlier(count));
    this.seen = 0; // lines of the run so far
    this.asked = 0; // earlier lines that were asked for, and are kept while somebody reads
    this.follows = true; // whether its end is looked at: what the user's last scroll has left, also in a tab that is hidden
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
    // A tab that comes back has another size than one that is hidden, and is scrolled by the browser before that is told.
    this.pane.onscroll = () => {
      if (this.pane.clientHeight && this.isDrawn) this.follows = this.isAtEnd();
    };
    new ResizeObserver(() => {
      this.isDrawn = this.pane.clientHeight > 0;
      this.follow();
    }).observe(this.pane);
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
    if (again && total >= this.seen) {
      this.lines.clear();
      this.seen = 0;
    }
    this.lines.add(first, total, this.seen, lines);
    this.seen = Math.max(this.seen, total);
    patch(this.open, open);
    this.count = count; // without lines that are not worth showing
    this.node.hidden = !this.lines.all.length && !open;
    this.trim();
    this.redraw();
    this.follow();
    this.complete();
  }

  addEarlier(count) {
    this.asked += count;
    this.redraw();
  }

  follow() {
    if (this.follows && !this.isBeingRead()) this.pane.scrollTop = this.pane.scrollHeight;
  }

  // Fill gaps: small ones between lines by themselves, and all that the kernel has lines for while these are searched.
  async complete() {
    if (this.isFilling) return;
    this.isFilling = true;
    for (let gap = this.gapToFill(); gap; gap = this.gapToFill()) {
      await this.lines.fill(gap);
      this.trim();
      if (!this.isSearched()) await new Promise(resolve => { setTimeout(resolve, PAUSE_MS); });
    }
    this.isFilling = false;
  }

  gapToFill() {
    const { ask, all, gaps } = this.lines;
    const isSearched = this.isSearched();
    const isWanted = gap => (isSearched ? all.length < MOST_KEPT : gap !== gaps[0] && gap.to - gap.from <= KEPT);
    return ask && gaps.findLast(gap => gap.from < gap.to && !gap.isLost && isWanted(gap));
  }

  isSearched() {
    return this.filters.some(field => field.value);
  }

  redraw() {
    for (const line of this.lines.all) {
      for (const rank of line.ranks) this.addRank(rank);
      line.node.hidden = !this.isWanted(line);
    }
    this.tell();
  }

  addRank(rank) {
    if (this.ranks.has(rank)) return;
    this.ranks.add(rank);
    const after = [...this.rank.options].find(option => option.value !== '' && Number(option.value) > rank);
    this.rank.add(new Option(rank < 0 ? 'torchrun' : `rank ${rank}`, rank), after ?? null);
  }

  // Show the lines of one rank alone; null: of all.
  choose(rank) {
    if (rank !== null) this.addRank(rank);
    this.rank.value = rank ?? '';
    this.filter();
  }

  isWanted({ text, ranks, isStderr }) {
    const isOfRank = !this.rank.value || ranks.has(Number(this.rank.value));
    const isOfStream = !this.stream.value || isStderr === (this.stream.value === 'stderr');
    return isOfRank && isOfStream && text.toLowerCase().includes(this.text.value.toLowerCase());
  }

  filter() {
    this.redraw();
    this.pane.scrollTop = this.pane.scrollHeight;
    this.complete();
  }

  tell() {
    const { absent, all } = this.lines;
    const inAll = lines => lines.reduce((sum, line) => sum + line.ranks.size, 0); // a line of several ranks is several lines
    const shown = inAll(all.filter(line => !line.node.hidden)).toLocaleString('en');
    const searched = `the ${inAll(all).toLocaleString('en')} lines that are here; ${absent.toLocaleString('en')} more are not`;
    const isPart = absent && this.isSearched();
    const count = this.count ?? 0;
    const every = `${count.toLocaleString('en')} line${count === 1 ? '' : 's'}`;
    this.about.textContent = `${shown} of ${isPart ? searched : every}`;
    this.about.title = `all that a rank wrote: ${this.lines.rest}`;
    this.jump.hidden = !this.lines.all.some(line => ERROR.test(line.text));
  }

  showFirstError() {
    const found = this.lines.all.find(line => ERROR.test(line.text) && !line.node.hidden);
    if (!found) return;
    for (const line of this.lines.all) line.node.classList.toggle('dm-found', line === found);
    this.follows = false;
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
  trim() {
    const isRead = this.isBeingRead() || !this.follows || this.isSearched();
    if (!isRead) this.asked = 0;
    this.lines.trim(isRead ? Math.min(KEPT_WHILE_READ + this.asked, MOST_KEPT) : KEPT);
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

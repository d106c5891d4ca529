// For each rank that waits for somebody to type: where it is, what it wrote last, and a line to type into.

import { element } from './patch.js';

const STAYS_MS = 2000; // a debugger waits again at once: the line is not to vanish under the fingers meanwhile

export class Prompts {
  // `send` takes the rank, the number of its prompt, and the text.
  constructor(send) {
    this.send = send;
    this.node = element('div', 'dm-prompts');
    this.rows = new Map(); // by rank
  }

  update(prompts) {
    for (const row of this.rows.values()) row.isWaiting = false;
    for (const one of prompts) {
      const row = this.rows.get(one.rank) ?? this.add(one.rank);
      Object.assign(row, { isWaiting: true, prompt: one.prompt });
      row.where.textContent = one.where;
      row.said.textContent = one.said;
      row.asks.textContent = one.asks;
      row.said.scrollTop = row.said.scrollHeight;
      if (row.isEntered) this.enter(one.rank, row);
    }
    for (const [rank, row] of this.rows) {
      if (!row.isWaiting) setTimeout(() => !row.isWaiting && this.remove(rank, row), STAYS_MS);
    }
  }

  add(rank) {
    const row = { node: element('div', 'dm-prompt'), where: element('div', 'dm-faint'), said: element('pre') };
    row.asks = element('code');
    row.input = element('input');
    row.input.maxLength = 1000;
    row.input.spellcheck = false;
    row.input.autocomplete = 'off';
    row.input.setAttribute('aria-label', `a line for rank ${rank}`);
    row.input.dataset.lmSuppressShortcuts = 'true';
    row.input.onkeydown = event => {
      event.stopPropagation(); // keys are no commands of the notebook here
      row.isEntered = false;
      if (event.key === 'Enter' && !event.isComposing) this.enter(rank, row);
    };
    const line = element('label', 'dm-prompt-line');
    line.append(row.asks, row.input);
    row.node.append(row.where, row.said, line);
    this.node.append(row.node);
    this.rows.set(rank, row);
    return row;
  }

  // One line a prompt: the next one is sent as soon as the rank waits for it.
  enter(rank, row) {
    row.isEntered = !row.isWaiting || row.prompt === row.answered;
    if (row.isEntered) return;
    row.answered = row.prompt;
    this.send({ rank, prompt: row.prompt, text: row.input.value });
    row.input.value = '';
  }

  // A run that is over asks nobody.
  close() {
    for (const [rank, row] of this.rows) this.remove(rank, row);
  }

  remove(rank, row) {
    if (this.rows.get(rank) === row) this.rows.delete(rank);
    row.node.remove();
  }
}

// Puts the live view into the output of its cell, and back into it whenever the front end has drawn the output anew.
// What is saved there is HTML that needs neither a kernel nor a widget; the live view takes its place while it is seen.

import { LINES_SAVED } from './log.js';

const AWAY_MS = 500;

export class Place {
  // `onAway` is called, at most twice a second, while the view is nowhere in the page.
  constructor(viewId, root, onAway) {
    this.onAway = onAway;
    this.className = `dm-view-${viewId}`;
    this.root = root;
    this.tops = new Map(); // how far each pane is scrolled: a pane that is moved begins at its top
    root.addEventListener('scroll', ({ target }) => this.tops.set(target, target.scrollTop), true);
    this.observer = new MutationObserver(() => this.put());
    this.observer.observe(document.body, { childList: true, subtree: true });
    this.put();
  }

  put() {
    if (this.root.isConnected) return;
    const spot = document.getElementsByClassName(this.className)[0];
    if (!spot) {
      this.timer ??= setTimeout(() => {
        this.timer = null;
        if (!this.root.isConnected) this.onAway();
      }, AWAY_MS);
      return;
    }
    spot.replaceChildren(this.root);
    for (const [pane, top] of this.tops) pane.scrollTop = top;
  }

  leave() {
    clearTimeout(this.timer);
    this.onAway = () => {};
    this.observer.disconnect();
  }
}

// Whether the document of a page has an output of a view; null where there is no document to look at any more.
export function isInDocument(model) {
  const context = model.widget_manager?.context;
  if (!context?.model || context.isDisposed || context.model.isDisposed) return null;
  const className = `dm-view-${model.get('view_id')}`;
  return [...context.model.cells].some(cell => cell.type === 'code' && JSON.stringify(cell.outputs.toJSON()).includes(className));
}

// Show a view as one that nobody feeds any more: when it was seen last, and nothing that passes since.
export function showAsLastSeen(root, seen) {
  root.classList.add('dm-unfed');
  const phase = root.querySelector('.dm-phase');
  if (!phase) return;
  phase.textContent = `last seen ${seen.toLocaleTimeString('en-GB')}`;
  for (const facts of root.querySelectorAll('.dm-head > span:not([class])')) {
    facts.textContent = facts.textContent.split(' · ').filter(fact => !/ left( in this bar)?$/.test(fact)).join(' · ');
  }
}

// Return the view as HTML that needs no script, as it is just now: of the output its end, whatever is filtered in the page.
export function asSaved(model, root, aboutOutput, words, seen) {
  const copy = root.cloneNode(true);
  copy.className = 'distmagic';
  showAsLastSeen(copy, seen);
  for (const rank of copy.querySelectorAll('.dm-rank')) {
    const label = document.createElement('b');
    label.className = rank.className.replace('dm-rank', '');
    label.textContent = rank.textContent;
    rank.replaceWith(label);
  }
  copy.querySelector('.dm-log-bar > span').textContent = aboutOutput;
  for (const node of copy.querySelectorAll('.dm-gap')) node.remove();
  const lines = [...copy.querySelectorAll('.dm-log-lines .dm-line')];
  for (const line of lines.splice(0, Math.max(0, lines.length - LINES_SAVED))) line.remove();
  for (const line of lines) line.hidden = false;
  for (const node of copy.querySelectorAll('button, input, select, label, .dm-prompts, .dm-actions, .dm-chooser, .dm-tip')) node.remove();
  const note = document.createElement('p');
  note.textContent = words;
  const around = document.createElement('div');
  around.className = `dm-view-${model.get('view_id')}`;
  around.append(copy, note);
  return around.outerHTML;
}

// Make an output for the view in the document of a page that has none: it was loaded anew, and the notebook was not saved
// since the cell began. All else in the cell stays: where the view is drawn inside a widget it is in no cell's outputs.
export function makeOutput(model) {
  const className = `dm-view-${model.get('view_id')}`;
  if (model.get('is_cleared') || isInDocument(model) !== false || document.getElementsByClassName(className).length) return;
  const cell = [...model.widget_manager.context.model.cells].find(one => one.id === model.get('cell_id'));
  if (cell?.type !== 'code') return;
  const { html, text } = model.get('final');
  const data = html ? { 'text/html': html, 'text/plain': text } : { 'text/html': `<div class="${className}"></div>` };
  cell.outputs.add({ output_type: 'display_data', data, metadata: {} });
}

// Write into the notebook's document what is to be saved of the view. A page that was loaded while the run went on does
// not know the output any more, so the kernel's own update of it does not arrive.
export function writeIntoDocument(model, { html, text }) {
  const className = `dm-view-${model.get('view_id')}`;
  for (const cell of model.widget_manager?.context?.model?.cells ?? []) {
    if (cell.type !== 'code') continue;
    for (let index = 0; index < cell.outputs.length; index += 1) {
      const output = cell.outputs.get(index).toJSON();
      const saved = [output.data?.['text/html'] ?? ''].flat().join('');
      if (!saved.includes(className) || saved === html) continue;
      cell.outputs.set(index, { ...output, data: { ...output.data, 'text/html': html, ...(text && { 'text/plain': text }) } });
    }
  }
}

// The live view of one run. The HTML of its parts comes from Python; here it is put into the page, and answers to clicks.

import { ask } from './channel.js';
import { Charts } from './charts.js';
import { Controls } from './controls.js';
import { Log } from './log.js';
import { element, patch } from './patch.js';
import { Prompts } from './prompts.js';
import { Place, asSaved, isInDocument, makeOutput, showAsLastSeen, writeIntoDocument } from './place.js';

const PARTS = ['head', 'table', 'ranks', 'pictures'];
const ENDED = ['restarting', 'autorestarting', 'dead', 'terminating'];
const GONE = 'The kernel has ended: this is the last that was known of the run.';
const SAVED = 'This was saved during the run; its outcome was not saved.';

function rankOf(row) {
  const rank = row?.querySelector('td b')?.textContent;
  return rank ? Number(rank) : null;
}

class View {
  constructor(model) {
    this.model = model;
    this.root = element('div', 'distmagic dm-live');
    this.parts = Object.fromEntries(PARTS.map(name => [name, element('div', `dm-part-${name}`)]));
    this.controls = new Controls(op => ask(model, op));
    this.note = element('div', 'dm-alert dm-warning');
    this.note.hidden = true;
    this.charts = new Charts(rank => this.showChosen(rank));
    this.prompts = new Prompts(typed => ask(model, 'type', { typed }));
    this.log = new Log(before => ask(model, 'lines', { before }));
    // Inside a widget a front end does not renew an output: what was shown before the view would stay there.
    const hidden = `.dm-before-${model.get('view_id')} { display: none; }`;
    const looks = element('style', '', model.get('looks') + hidden);
    const top = element('div', 'dm-top');
    top.append(this.parts.head, this.controls.node);
    const scroll = element('div', 'dm-scroll');
    scroll.tabIndex = 0;
    scroll.append(this.parts.table, this.parts.ranks);
    this.root.append(looks, top, this.note, scroll, this.charts.node, this.parts.pictures, this.prompts.node, this.log.node);
    this.seen = new Date();
    this.model.on('change:head', () => { this.seen = new Date(); });
    for (const name of PARTS) this.watch(name, html => patch(this.parts[name], html));
    for (const name of ['table', 'ranks']) this.watch(name, () => this.markChosen());
    this.watch('charts', data => this.charts.update(data));
    this.watch('prompts', prompts => this.prompts.update(prompts));
    scroll.onclick = ({ target }) => this.chooseRow(target.closest('tr'));
    this.watch('run', run => this.controls.update(run));
    this.watch('run', run => this.log.update(run));
    this.watch('run', run => run.is_over && this.prompts.close());
    this.watch('final', final => final.html && writeIntoDocument(model, final));
    this.kernel = model.widget_manager?.kernel;
    this.onStatus = (_, status) => ENDED.includes(status) && this.tellOfEnd();
    this.kernel?.statusChanged?.connect(this.onStatus);
    this.context = model.widget_manager?.context;
    this.save = (_, state) => state === 'started' && this.saveAsItIs(SAVED);
    this.context?.saveState?.connect(this.save);
    this.sayHello();
  }

  // What is saved in the middle of a run is the view of this moment.
  saveAsItIs(words) {
    if (this.place && !this.model.get('run').is_over) {
      writeIntoDocument(this.model, { html: asSaved(this.model, this.root, this.log.saved(), words, this.seen) });
    }
  }

  watch(name, act) {
    this.model.on(`change:${name}`, () => act(this.model.get(name)));
    act(this.model.get(name));
  }

  // Python begins to send when a page has said hello, and answers with the lines that came before.
  async sayHello() {
    const answer = await ask(this.model, 'hello').catch(() => null);
    if (answer?.log) this.log.add(answer.log);
    this.watch('log', log => log.lines && this.log.add(log));
  }

  // Be in the cell's output, wherever the front end draws it, as soon as there is something to be seen.
  live() {
    this.watch('head', html => {
      if (!html || this.place) return;
      this.place = new Place(this.model.get('view_id'), this.root, () => this.lookForOutput());
      makeOutput(this.model);
      this.wasInDocument = isInDocument(this.model);
    });
  }

  // An output that was in the document and is no more was cleared, or another execution of its cell has replaced it: no
  // page is to bring it back. Inside a widget it never is in one.
  lookForOutput() {
    const isThere = isInDocument(this.model);
    if (isThere === false && this.wasInDocument && !this.isCleared) {
      this.isCleared = true;
      ask(this.model, 'cleared').catch(() => null);
    }
    this.wasInDocument ||= isThere;
  }

  // A click on a rank's row shows its curves and its output alone, one more those of all.
  chooseRow(row) {
    const rank = rankOf(row);
    if (rank !== null) this.charts.choose(rank);
  }

  showChosen(rank) {
    this.log.choose(rank);
    this.markChosen();
  }

  markChosen() {
    const chosen = this.charts.look.rank;
    for (const row of this.root.querySelectorAll('.dm-scroll tr')) {
      row.toggleAttribute('data-chosen', chosen !== null && rankOf(row) === chosen);
    }
  }

  tellOfEnd() {
    this.log.close();
    this.prompts.close();
    if (this.model.get('run').is_over) return;
    this.controls.close();
    showAsLastSeen(this.root, this.seen);
    this.saveAsItIs(GONE);
    this.note.textContent = GONE;
    this.note.hidden = false;
  }

  close() {
    this.tellOfEnd();
    this.place?.leave();
    this.kernel?.statusChanged?.disconnect(this.onStatus);
    this.context?.saveState?.disconnect(this.save);
  }
}

const views = new Map(); // by ID: one run has one view in a page

function viewOf(model) {
  const id = model.get('view_id');
  if (!views.has(id)) views.set(id, new View(model));
  return views.get(id);
}

export default {
  initialize({ model }) {
    const view = viewOf(model);
    if (!model.get('shows_itself')) view.live();
    return () => {
      view.close();
      views.delete(model.get('view_id'));
    };
  },
  // For front ends that draw a widget's own view.
  render({ model, el }) {
    el.replaceChildren(viewOf(model).root);
  },
};

// The buttons of the head: Stop, Stacks, Detach, and a copy of the job's ID.

import { element } from './patch.js';

export class Controls {
  // `send` takes "stop", "stacks" or "detach", and returns a promise.
  constructor(send) {
    this.send = send;
    this.node = element('div', 'dm-actions');
    this.copy = this.button('Copy ID', 'Copy the name of the job', () => this.copyJob());
    this.stacks = this.button('Stacks', 'Show where every rank is', () => this.request(this.stacks, 'stacks'));
    this.detach = this.button('Detach', 'Let the job go on without this notebook', () => this.request(this.detach, 'detach'));
    this.stop = this.button('Stop', 'End every rank on every host', () => this.askWhetherToStop());
    this.question = element('span', 'dm-question');
    this.question.setAttribute('role', 'group');
    this.yes = element('button', 'dm-danger', 'Stop it');
    this.no = element('button', '', 'Let it run');
    this.yes.onclick = () => this.stopIt();
    this.no.onclick = () => this.showQuestion(false);
    this.words = element('span');
    this.question.append(this.words, this.yes, this.no);
    this.node.append(this.question);
    this.showQuestion(false);
  }

  button(label, title, act) {
    const made = element('button', '', label);
    made.title = title;
    made.onclick = act;
    this.node.append(made);
    return made;
  }

  update(run) {
    this.run = run;
    const goesOn = !run.is_over && !run.is_stopping;
    this.stop.hidden = !goesOn;
    this.stacks.hidden = !goesOn || !run.is_running;
    this.detach.hidden = !goesOn || !run.is_running || !run.can_detach;
    if (!goesOn) this.showQuestion(false);
  }

  // Nothing can be asked any more: the kernel has ended.
  close() {
    for (const button of [this.stop, this.stacks, this.detach, this.question]) button.hidden = true;
  }

  askWhetherToStop() {
    this.words.textContent = `Stop ${this.run.what}?`;
    this.showQuestion(true);
    this.no.focus();
  }

  showQuestion(isAsked) {
    this.question.hidden = !isAsked;
    if (this.run) this.stop.hidden = isAsked || this.run.is_over || this.run.is_stopping;
  }

  stopIt() {
    this.showQuestion(false);
    this.request(this.stop, 'stop');
  }

  // The button waits until the run has heard it; what comes of it is seen in the view.
  async request(button, op) {
    button.disabled = true;
    try {
      await this.send(op);
    } finally {
      button.disabled = false;
    }
  }

  async copyJob() {
    await copyText(this.run.job);
    this.copy.textContent = 'Copied';
    setTimeout(() => { this.copy.textContent = 'Copy ID'; }, 1500);
  }
}

async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = element('textarea'); // a page that came over plain HTTP has no clipboard
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand('copy');
  field.remove();
}

// All charts of a run: grouped by the first part of a metric's name, with a smoothing and a rank that all have in common.

import { Chart, colourOf } from './chart.js';
import { element } from './patch.js';

const FIRST = 6; // so many metrics are shown until the user chooses

export class Charts {
  // `tell` is called with the rank that is chosen, or with null.
  constructor(tell) {
    this.tell = tell;
    this.node = element('section', 'dm-charts');
    this.node.setAttribute('aria-label', 'curves of the metrics');
    this.node.hidden = true;
    this.look = { weight: 0, rank: null };
    this.charts = new Map(); // by name of the metric
    this.choice = new Map(); // what the user has said of a metric: to be shown or not
    this.data = [];
    const bar = element('div', 'dm-legend');
    this.ranks = element('span', 'dm-ranks');
    const label = element('label', 'dm-smooth', 'smoothing ');
    const slider = element('input');
    Object.assign(slider, { type: 'range', min: '0', max: '0.98', step: '0.02', value: '0' });
    slider.oninput = () => {
      this.look.weight = Number(slider.value);
      this.draw();
    };
    label.append(slider);
    this.chooser = element('details', 'dm-chooser');
    this.summary = element('summary');
    this.boxes = element('div');
    this.chooser.append(this.summary, this.boxes);
    bar.append(this.ranks, label);
    this.groups = element('div');
    this.node.append(this.groups, bar, this.chooser);
  }

  update(data) {
    this.data = data;
    this.node.hidden = !data.length;
    this.draw();
  }

  // Show the curves of one rank alone; of all when it is named once more.
  choose(rank) {
    this.look.rank = this.look.rank === rank ? null : rank;
    this.draw();
    this.tell(this.look.rank);
  }

  isShown({ name }, index) {
    return this.choice.get(name) ?? index < FIRST;
  }

  draw() {
    const shown = this.data.filter((metric, index) => this.isShown(metric, index));
    const groups = new Map();
    for (const metric of shown) {
      const prefix = metric.name.includes('/') ? metric.name.split('/')[0] : '';
      groups.set(prefix, [...(groups.get(prefix) ?? []), metric]);
    }
    this.groups.classList.toggle('dm-several', groups.size > 1); // aligned with each other
    const wanted = [...groups].flatMap(([prefix, metrics]) => this.groupOf(prefix, metrics));
    if (wanted.length !== this.groups.childNodes.length || wanted.some((node, i) => node !== this.groups.childNodes[i])) {
      this.groups.replaceChildren(...wanted);
    }
    this.drawLegend(shown);
    this.drawChooser(shown.length);
  }

  groupOf(prefix, metrics) {
    this.grids ??= new Map(); // by prefix: a title and a grid that stay the same nodes
    if (!this.grids.has(prefix)) {
      this.grids.set(prefix, [element('div', 'dm-group', prefix), element('div', 'dm-curves')]);
    }
    const [title, grid] = this.grids.get(prefix);
    const nodes = metrics.map(metric => this.drawn(metric).node);
    if (nodes.length !== grid.childNodes.length || nodes.some((node, i) => node !== grid.childNodes[i])) {
      grid.replaceChildren(...nodes);
    }
    return prefix ? [title, grid] : [grid];
  }

  drawn(metric) {
    if (!this.charts.has(metric.name)) this.charts.set(metric.name, new Chart());
    const chart = this.charts.get(metric.name);
    chart.update(metric, this.look);
    return chart;
  }

  drawLegend(shown) {
    const ranks = [...new Set(shown.flatMap(metric => metric.lines.map(line => line.rank)))].sort((a, b) => a - b);
    const key = `${ranks}|${this.look.rank}|${shown[0]?.ranks}`;
    if (key === this.legend) return;
    this.legend = key;
    this.ranks.replaceChildren(...ranks.map(rank => this.legendOf(rank, shown[0].ranks)));
  }

  legendOf(rank, count) {
    if (rank < 0) return element('b', 'dm-c0', `mean of ${count} ranks, band: lowest to highest`);
    const made = element('button', `dm-rank ${colourOf(rank)}`, `rank ${rank}`);
    made.setAttribute('aria-pressed', this.look.rank === rank);
    made.onclick = () => this.choose(rank);
    return made;
  }

  drawChooser(count) {
    this.chooser.hidden = this.data.length <= FIRST;
    this.summary.textContent = `${count} of ${this.data.length} metrics shown`;
    const names = this.data.map(metric => metric.name).join('\n');
    if (names === this.names) return;
    this.names = names;
    this.boxes.replaceChildren(...this.data.map((metric, index) => {
      const label = element('label', '', metric.name);
      const box = element('input');
      Object.assign(box, { type: 'checkbox', checked: this.isShown(metric, index) });
      box.onchange = () => {
        this.choice.set(metric.name, box.checked);
        this.draw();
      };
      label.prepend(box);
      return label;
    }));
  }
}

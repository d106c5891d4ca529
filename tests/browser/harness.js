// What a test asks of the page: JupyterLab's own state and commands. In every page, before its own scripts.
window.notebook = {
  panel: () => window.jupyterapp?.shell.currentWidget,
  code: index => notebook.panel().content.widgets.filter(cell => cell.model.type === 'code')[index],
  runs: {},

  hasNotebook: () => Boolean(notebook.panel()?.content?.widgets?.length && notebook.panel().context?.isReady),

  // The saved layout is restored, the notebook drawn, its session connected, its kernel idle.
  async isReady() {
    const panel = notebook.panel();
    await window.jupyterapp.restored;
    await panel.revealed;
    await panel.sessionContext.ready;
    await panel.sessionContext.session.kernel.info;
    await new Promise(resolve => {
      const look = () => panel.sessionContext.session.kernel.status === 'idle' && resolve();
      panel.sessionContext.statusChanged.connect(look);
      look();
    });
  },

  run(index) {
    const panel = notebook.panel();
    panel.content.activeCellIndex = panel.content.widgets.indexOf(notebook.code(index));
    panel.content.deselectAll();
    const run = notebook.runs[index] = { done: false, before: notebook.prompt(index) };
    window.jupyterapp.commands.execute('notebook:run-cell').then(
      () => { run.done = true; }, error => { run.error = String(error); });
  },
  prompt: index => notebook.code(index).inputArea.promptNode.textContent,
  hasStarted: index => notebook.isDone(index) || notebook.prompt(index) !== notebook.runs[index].before,
  isDone(index) {
    const run = notebook.runs[index];
    if (run?.error) throw new Error(run.error);
    return Boolean(run?.done);
  },

  outputText: index => notebook.code(index).outputArea.node.innerText,
  shows: (index, pattern) => new RegExp(pattern).test(notebook.outputText(index)),

  seen: {},

  // Note from now on, at each change, how far each bar of a cell's live table is: a look now and then could come too late.
  watchBars(index) {
    const { node } = notebook.code(index);
    const seen = notebook.seen[index] = [];
    new MutationObserver(() => {
      const bars = [...node.querySelectorAll('.dm-live table.dm-table progress')];
      const lengths = bars.map(bar => bar.position * bar.getBoundingClientRect().width);
      seen.push({ lengths, isRunning: !notebook.isDone(index) });
    }).observe(node, { attributes: true, characterData: true, childList: true, subtree: true });
  },
  // Whether so many bars were there while the cell was running, and each of them grew meanwhile.
  haveGrown(index, count) {
    const [first, ...later] = notebook.seen[index].filter(
      one => one.isRunning && one.lengths.length === count && Math.min(...one.lengths) > 0);
    if (later.some(({ lengths }) => lengths.every((length, bar) => length > first.lengths[bar]))) return true;
    if (notebook.isDone(index)) throw new Error(`the cell is over, and no ${count} bars were seen to grow`);
    return false;
  },

  interrupt: () => window.jupyterapp.commands.execute('notebook:interrupt-kernel'),

  async restartKernel() {
    await notebook.panel().sessionContext.session.kernel.restart();
    await notebook.isReady();
  },

  // A theme is drawn when its style sheet is loaded, a while after the command has ended.
  async useTheme(name) {
    await window.jupyterapp.commands.execute('apputils:change-theme', { theme: name });
    while (document.body.dataset.jpThemeName !== name) await new Promise(resolve => setTimeout(resolve, 20));
  },

  async save() {
    const { context } = notebook.panel();
    do { await context.save(); } while (context.model.dirty);
  },
};

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
    if (notebook.runs[index].error) throw new Error(notebook.runs[index].error);
    return notebook.runs[index].done;
  },

  outputText: index => notebook.code(index).outputArea.node.innerText,
  shows: (index, pattern) => new RegExp(pattern).test(notebook.outputText(index)),

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

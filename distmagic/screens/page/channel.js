// Asks the notebook's Python something while a cell runs: over the kernel's control channel, which a busy kernel reads.

const REQUEST = 'distmagic_request'; // screens/page_requests.py answers it

const newId = () =>
  crypto.randomUUID?.() ?? Array.from({ length: 4 }, () => Math.random().toString(16).slice(2)).join('-');

// Return the answer; null where a front end has no such channel. There the request waits until the cell has ended.
export async function ask(model, op, more = {}) {
  const content = { view: model.get('view_id'), op, ...more };
  const kernel = model.widget_manager?.kernel;
  if (!kernel?.sendControlMessage) {
    model.send(content);
    return null;
  }
  const header = {
    date: new Date().toISOString(), msg_id: newId(), msg_type: REQUEST, session: kernel.clientId,
    username: kernel.username ?? '', version: '5.3',
  };
  const message = { header, parent_header: {}, metadata: {}, channel: 'control', content, buffers: [] };
  const reply = await kernel.sendControlMessage(message, true, true).done;
  return reply.content;
}

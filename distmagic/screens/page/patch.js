// Changes a part of the page to what its new HTML says, and leaves alone what is the same: a selection, an unfolded
// detail, a scrolled pane stay as they are.

export function element(name, className = '', text = '') {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

export function patch(target, html) {
  const template = document.createElement('template');
  template.innerHTML = html;
  patchChildren(target, template.content);
}

function patchChildren(target, wanted) {
  const old = [...target.childNodes];
  const nodes = [...wanted.childNodes];
  nodes.forEach((node, index) => patchNode(target, old[index], node));
  for (const node of old.slice(nodes.length)) node.remove();
}

function patchNode(target, old, node) {
  if (!old) target.append(node.cloneNode(true));
  else if (old.nodeName !== node.nodeName) old.replaceWith(node.cloneNode(true));
  else if (old.nodeType === Node.ELEMENT_NODE) {
    patchAttributes(old, node);
    patchChildren(old, node);
  } else if (old.data !== node.data) old.data = node.data;
}

// What begins with data- is the page's own, and so is whether a detail is unfolded.
function patchAttributes(old, node) {
  for (const { name, value } of node.attributes) {
    if (name !== 'open' && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const { name } of [...old.attributes]) {
    if (name !== 'open' && !name.startsWith('data-') && !node.hasAttribute(name)) old.removeAttribute(name);
  }
}

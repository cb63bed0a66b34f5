"use strict";

// The elements of messages.

function addItem(kind) {
  byId("empty").hidden = true;
  const item = document.createElement("li");
  item.className = kind;
  const text = document.createElement("div");
  text.className = "text";
  item.append(text);
  byId("messages").append(item);
  follow(true);
  return item;
}

/** Stay at the end of the chat, unless the reader has scrolled away from it. */
function follow(always) {
  const list = byId("messages");
  const away = list.scrollHeight - list.scrollTop - list.clientHeight;
  if (always || away < 80) list.scrollTop = list.scrollHeight;
}

function addUserItem(message) {
  const item = addItem("user");
  item.firstChild.textContent = message.content;
  return item;
}

/** An answer, which shows what its message has so far with each call of `show`. */
class AnswerItem {
  constructor(message) {
    this.message = message;
    this.item = addItem("assistant");
    this.steps = document.createElement("div");
    this.steps.className = "steps";
    this.steps.setAttribute("aria-hidden", "true");
    this.item.append(this.steps);
    this.waiting = false;
    this.show();
  }

  /** Show it with the next frame: an answer may have many steps in one. */
  showSoon() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => this.show());
  }

  show() {
    this.waiting = false;
    const { pieces, steps } = this.message;
    const starts = [];
    let text = "";
    for (const [piece] of pieces) {
      starts.push(text.length);
      text += piece;
    }
    showMarkdown(this.item.firstChild, text, (start, end) => tokensAt(pieces, starts, start, end));
    for (const step of steps.slice(this.steps.children.length)) this.steps.append(barOf(...step));
    this.showLine("facts", this.message.facts);
    this.showLine("note", this.message.note);
    follow();
  }

  showLine(kind, text) {
    if (!text || this.item.querySelector(`.${kind}`)) return;
    const line = document.createElement("div");
    line.className = kind;
    line.textContent = text;
    this.item.append(line);
  }
}

/** A span for each token, or part of one, within characters [start, end) of an answer. */
function tokensAt(pieces, starts, start, end) {
  const spans = [];
  for (let i = lastAtMost(starts, start); i < pieces.length && starts[i] < end; i += 1) {
    const [piece, drafter] = pieces[i];
    const shown = piece.slice(Math.max(0, start - starts[i]), end - starts[i]);
    if (!shown) continue;
    const span = document.createElement("span");
    span.className = "token";
    span.textContent = shown;
    span.title = drafter ? `drafted by ${drafter}, accepted` : "by the model";
    if (drafter) {
      span.classList.add("drafted");
      span.style.setProperty("--hue", hueOf(drafter));
    }
    spans.push(span);
  }
  return spans;
}

/** The last of the ascending `values` that is at most `value`. */
function lastAtMost(values, value) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}

/** A bar for one step: as high as the number of its tokens, in the colour of its drafter. */
function barOf(count, drafter) {
  const bar = document.createElement("i");
  bar.style.setProperty("--tokens", Math.min(count, 8));
  bar.title = `${count} token${count > 1 ? "s" : ""}`;
  if (drafter) {
    bar.className = "drafted";
    bar.style.setProperty("--hue", hueOf(drafter));
  }
  return bar;
}

"use strict";

// The chat. An answer comes as a stream in which each token has its source.

const conversation = [];
let running = null;

function addMessage(kind) {
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

/** The events of a response, as objects. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (part !== "data: [DONE]") yield JSON.parse(part.slice("data: ".length));
    }
  }
}

/** Append tokens. A character may be made of the bytes of several: it appears with the last of them. */
function addTokens(text, sources, decoder) {
  for (const source of sources) {
    if (source.special) continue;
    const piece = decoder.decode(new Uint8Array(source.bytes), { stream: true });
    if (!piece) continue;
    const span = document.createElement("span");
    span.className = "token";
    span.textContent = piece;
    span.title = source.drafted_by ? `drafted by ${source.drafted_by}, accepted` : "by the model";
    if (source.drafted_by) {
      span.classList.add("drafted");
      span.style.setProperty("--hue", hueOf(source.drafted_by));
    }
    text.append(span);
  }
}

/** Append a bar for one step: as high as the number of its tokens, in the colour of its drafter. */
function addStep(steps, sources) {
  const bar = document.createElement("i");
  const drafter = sources.find((source) => source.drafted_by)?.drafted_by;
  bar.style.setProperty("--tokens", Math.min(sources.length, 8));
  bar.title = `${sources.length} token${sources.length > 1 ? "s" : ""}`;
  if (drafter) {
    bar.className = "drafted";
    bar.style.setProperty("--hue", hueOf(drafter));
  }
  steps.append(bar);
}

function facts(usage, metrics, seconds) {
  const speculation = metrics.speculative_decoding;
  const length = speculation.acceptance_length;
  const parts = [
    `${usage.completion_tokens} tokens`,
    `${(usage.completion_tokens / seconds).toFixed(1)} tokens/s`,
    length ? `acceptance length ${length.toFixed(2)}` : "",
    speculation.num_draft_tokens
      ? `${speculation.num_accepted_draft_tokens} of ${speculation.num_draft_tokens} drafts accepted`
      : "",
  ];
  return parts.filter(Boolean).join(" · ");
}

async function ask() {
  const body = {
    messages: conversation,
    stream: true,
    stream_options: { include_usage: true },
    return_token_sources: true,
    temperature: Number(byId("temperature").value),
    max_tokens: Number(byId("max-tokens").value),
  };
  if (!byId("speculate").checked) body.num_draft_tokens = 0;
  const started = performance.now();
  const item = addMessage("assistant");
  try {
    await answer(item, await post(body), started);
  } finally {
    // Of an answer that never began nothing is left.
    if (!item.querySelector(".token, .facts")) item.remove();
  }
}

async function post(body) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...authorization() },
    body: JSON.stringify(body),
    signal: running.signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  return response;
}

/** Show the stream of an answer in ``item`` as it comes. */
async function answer(item, response, started) {
  const text = item.firstChild;
  const steps = document.createElement("div");
  steps.className = "steps";
  steps.setAttribute("aria-hidden", "true");
  item.append(steps);
  const decoder = new TextDecoder();
  let content = "";
  try {
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) {
        const sources = choice.token_sources ?? [];
        content += choice.delta.content ?? "";
        addTokens(text, sources, decoder);
        if (sources.length) addStep(steps, sources);
      }
      if (chunk.usage) {
        if (!text.firstChild) text.append("(no text)");
        const line = document.createElement("div");
        line.className = "facts";
        line.textContent = facts(chunk.usage, chunk.metrics, (performance.now() - started) / 1000);
        item.append(line);
      }
      follow();
    }
  } finally {
    conversation.push({ role: "assistant", content });
  }
}

async function send() {
  const input = byId("input");
  const content = input.value.trim();
  if (!content || running) return;
  input.value = "";
  addMessage("user").firstChild.textContent = content;
  conversation.push({ role: "user", content });
  running = new AbortController();
  byId("send").hidden = true;
  byId("stop").hidden = false;
  try {
    await ask();
  } catch (error) {
    if (error.name !== "AbortError") addMessage("error").firstChild.textContent = error.message;
    // The next message takes the place of one that was not answered.
    if (conversation.at(-1)?.role === "user") conversation.pop();
  } finally {
    running = null;
    byId("send").hidden = false;
    byId("stop").hidden = true;
    input.focus();
  }
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  running?.abort();
  conversation.length = 0;
  byId("messages").replaceChildren(byId("empty"));
  byId("empty").hidden = false;
});
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => {
    byId("input").value = example.dataset.text ?? example.textContent;
    send();
  });
}

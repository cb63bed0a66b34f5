"use strict";

// The chat. An answer comes as a stream in which each token has its source.

let running = null;
/** The page is being left, which also ends connections. */
let leaving = false;

/** The server cannot be reached, or is gone before the end of an answer. */
class ServerGone extends Error {}

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

async function post(body) {
  let response;
  try {
    response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...authorization() },
      body: JSON.stringify(body),
      signal: running.signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerGone("The server does not answer. Your message is in the field: send it when the server is back.");
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  throw new Error(answer?.error?.message ?? `The server answers with the status ${response.status}.`);
}

/** Ask for an answer to the conversation, and add it as it comes. */
async function ask() {
  const most = Number(byId("max-tokens").value);
  const body = {
    messages: messagesOfConversation(),
    stream: true,
    stream_options: { include_usage: true },
    return_token_sources: true,
    temperature: Number(byId("temperature").value),
    max_tokens: most,
  };
  if (!byId("speculate").checked) body.num_draft_tokens = 0;
  const started = performance.now();
  const message = { role: "assistant", content: "", pieces: [], steps: [], facts: "", note: "" };
  const shown = new AnswerItem(message);
  try {
    const response = await post(body);
    conversation.push(message);
    await readAnswer(response, message, shown, started, most);
  } catch (error) {
    const begun = message.pieces.length > 0;
    if (!begun) {
      // Of an answer that never began nothing is left.
      shown.item.remove();
      if (conversation.at(-1) === message) conversation.pop();
      throw error;
    }
    if (leaving) message.note = "Not complete: the page was left.";
    else if (error.name === "AbortError") message.note = "Stopped: the answer is not complete.";
    else message.note = `Not complete: ${error.message}`;
  }
  shown.show();
}

/** Read the stream of an answer into `message`. */
async function readAnswer(response, message, shown, started, most) {
  const decoder = new TextDecoder();
  let reason = null;
  let complete = false;
  try {
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) {
        message.content += choice.delta.content ?? "";
        addTokens(message, choice.token_sources ?? [], decoder);
        reason = choice.finish_reason ?? reason;
      }
      if (chunk.usage) {
        complete = true;
        if (!message.pieces.length) message.pieces.push(["(no text)", null]);
        message.facts = facts(chunk.usage, chunk.metrics, (performance.now() - started) / 1000);
        if (reason === "length") message.note = cutNote(chunk.usage.completion_tokens, most);
      }
      shown.showSoon();
    }
  } catch (error) {
    // How a connection that breaks is reported.
    if (error instanceof TypeError) throw new ServerGone("the server is gone.");
    throw error;
  }
  if (!complete) throw new ServerGone("the server is gone.");
  const rest = decoder.decode();
  if (rest) message.pieces.push([rest, null]);
}

/** Add tokens. A character may be made of the bytes of several: it appears with the last of them. */
function addTokens(message, sources, decoder) {
  if (!sources.length) return;
  for (const source of sources) {
    if (source.special) continue;
    const piece = decoder.decode(new Uint8Array(source.bytes), { stream: true });
    if (piece) message.pieces.push([piece, source.drafted_by ?? null]);
  }
  message.steps.push([sources.length, sources.find((source) => source.drafted_by)?.drafted_by ?? null]);
}

function cutNote(tokens, most) {
  return tokens >= most
    ? `Cut after ${tokens} tokens. More fit with a larger “Most tokens”.`
    : "Cut: the conversation is as long as this server allows. Begin a new chat.";
}

async function send() {
  const input = byId("input");
  const content = input.value.trim();
  if (!content || running) return;
  input.value = "";
  document.querySelectorAll("#messages > .error").forEach((item) => item.remove());
  const message = { role: "user", content };
  const item = addUserItem(message);
  conversation.push(message);
  running = new AbortController();
  byId("send").hidden = true;
  byId("stop").hidden = false;
  try {
    await ask();
  } catch (error) {
    // A message that was not answered can be sent again.
    if (conversation.at(-1) === message) {
      conversation.pop();
      item.remove();
      input.value = [content, input.value].filter(Boolean).join("\n");
    }
    if (error.name !== "AbortError") addItem("error").firstChild.textContent = error.message;
    byId("empty").hidden = Boolean(byId("messages").querySelector("li:not(#empty)"));
  } finally {
    running = null;
    saveConversation();
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
  saveConversation();
  byId("messages").replaceChildren(byId("empty"));
  byId("empty").hidden = false;
});
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => {
    byId("input").value = example.dataset.text ?? example.textContent;
    send();
  });
}
addEventListener("beforeunload", () => {
  leaving = true;
});
addEventListener("pagehide", () => {
  let draft = byId("input").value;
  const last = conversation.at(-1);
  if (running && last?.pieces?.length) last.note ||= "Not complete: the page was left.";
  else if (running) {
    // A message without an answer is in the field again.
    if (last?.role === "assistant") conversation.pop();
    draft = conversation.pop()?.content ?? draft;
  }
  sessionStorage.setItem("draft", draft);
  saveConversation();
});
byId("input").value = sessionStorage.getItem("draft") ?? "";
for (const message of conversation) {
  if (message.role === "user") addUserItem(message);
  else new AnswerItem(message);
}

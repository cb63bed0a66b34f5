"use strict";

// The messages of the chat, which outlive a reload of the tab.

/**
 * A message has `role` and `content`. An answer also has `pieces`, its text as pairs of a token's text and its drafter;
 * `steps`, pairs of a number of tokens and a drafter; `facts`, a line about it; and `note`, why it ended early.
 */
const conversation = restored();

function restored() {
  try {
    return JSON.parse(sessionStorage.getItem("chat")) ?? [];
  } catch {
    // It is of another version of the page.
    return [];
  }
}

function saveConversation() {
  try {
    sessionStorage.setItem("chat", JSON.stringify(conversation));
  } catch {
    // The tab has no more space: the texts are what counts.
    const texts = conversation.map((message) => ({
      ...message,
      ...(message.pieces && { pieces: [[message.content, null]], steps: [] }),
    }));
    sessionStorage.setItem("chat", JSON.stringify(texts));
  }
}

/** The messages as the API has them. */
function messagesOfConversation() {
  return conversation.map(({ role, content }) => ({ role, content }));
}

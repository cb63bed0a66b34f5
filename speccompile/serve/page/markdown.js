"use strict";

// Markdown as elements. A text is never read as HTML: its characters become text nodes only, so an answer can neither
// add elements nor run code. A line is a pair of places: characters [start, end) of the text, without the marks of the
// blocks around it. So each text node knows which characters of the answer it shows.

/** A model that repeats a mark may not make elements without end. */
const MOST_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(?=\S)/;
const RULE = /^ {0,3}([-*_])([ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( {1,4}(?=\S)|[ \t]*$)/;
const TABLE_RULE = /^ *\|?( *:?-+:? *\|)+( *:?-+:? *)?$/;
/** Kinds of inline text, in the order in which they are tried at each place. */
const INLINE = [
  ["escape", /\\([!-/:-@[-`{-~])/dy],
  ["code", /(`+)([^`]|[^`][^]*?[^`])\1(?!`)/dy],
  ["strong", /\*\*(?=\S)([^]*?\S)\*\*(?!\*)/dy],
  ["strong", /(?<!\w)__(?=\S)([^]*?\S)__(?!\w)/dy],
  ["em", /\*(?=[^\s*])([^*]*[^\s*])\*(?!\*)/dy],
  ["em", /(?<!\w)_(?=[^\s_])([^_]*[^\s_])_(?!\w)/dy],
  ["del", /~~(?=\S)([^]*?\S)~~/dy],
  ["link", /!?\[([^\]\n]*)\]\((https?:\/\/[^\s()<>]+|mailto:[^\s()<>]+)\)/dy],
  ["link", /(?<!\w)(https?:\/\/[^\s<>()[\]]*[^\s<>()[\].,:;!?'"])/dy],
];

/**
 * Show `text` in `container`. Blocks that have not changed since the last call stay as they are.
 *
 * leaf(start, end) returns the nodes that show these characters.
 */
function showMarkdown(container, text, leaf) {
  const blocks = blocksOf(text, linesOf(text));
  blocks.forEach((block, index) => {
    const key = `${block.kind} ${block.start} ${block.end}`;
    const known = container.children[index];
    if (known?.dataset.block === key) return;
    const element = elementOf(block, text, leaf);
    element.dataset.block = key;
    if (known) known.replaceWith(element);
    else container.append(element);
  });
  while (container.children.length > blocks.length) container.lastChild.remove();
}

function linesOf(text) {
  const lines = [];
  for (let start = 0; start <= text.length; ) {
    const found = text.indexOf("\n", start);
    const end = found < 0 ? text.length : found;
    lines.push({ start, end });
    start = end + 1;
  }
  return lines;
}

/** The blocks that `lines` of `text` are made of, within `depth` others. */
function blocksOf(text, lines, depth = 0) {
  const at = (line) => text.slice(line.start, line.end);
  const isBlank = (line) => !at(line).trim();
  const blocks = [];
  for (let i = 0; i < lines.length; ) {
    if (isBlank(lines[i])) {
      i += 1;
      continue;
    }
    const [block, next] = blockAt(text, lines, i, at, isBlank, depth);
    blocks.push({ start: lines[i].start, end: lines[next - 1].end, ...block });
    i = next;
  }
  return blocks;
}

/** The block that begins with line `i`, and the line after it. */
function blockAt(text, lines, i, at, isBlank, depth) {
  const first = at(lines[i]);
  const fence = FENCE.exec(first);
  if (fence) return fencedCode(lines, i, at, fence);
  const heading = HEADING.exec(first);
  if (heading) {
    const { start, end } = lines[i];
    const closing = /[ \t]+#+[ \t]*$/.exec(first)?.[0].length ?? 0;
    const line = { start: start + heading[0].length, end: Math.max(start + heading[0].length, end - closing) };
    return [{ kind: `h${heading[1].length}`, lines: [line] }, i + 1];
  }
  if (RULE.test(first)) return [{ kind: "hr" }, i + 1];
  let next = i;
  if (QUOTE.test(first) && depth < MOST_DEPTH) {
    const inner = [];
    for (let mark; next < lines.length && (mark = QUOTE.exec(at(lines[next]))); next += 1) {
      inner.push({ start: lines[next].start + mark[0].length, end: lines[next].end });
    }
    return [{ kind: "blockquote", blocks: blocksOf(text, inner, depth + 1) }, next];
  }
  if (ITEM.test(first) && depth < MOST_DEPTH) return list(text, lines, i, at, isBlank, depth);
  if (first.includes("|") && i + 1 < lines.length && TABLE_RULE.test(at(lines[i + 1]))) {
    for (next = i + 2; next < lines.length && at(lines[next]).includes("|"); ) next += 1;
    return [{ kind: "table", rows: [lines[i], ...lines.slice(i + 2, next)].map((line) => cells(text, line)) }, next];
  }
  for (next = i + 1; next < lines.length && !isBlank(lines[next]) && !begins(at(lines[next])); ) next += 1;
  return [{ kind: "p", lines: lines.slice(i, next) }, next];
}

/** Whether a line ends the paragraph before it. */
function begins(line) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((kind) => kind.test(line));
}

/** Up to the line that closes it, or the end, since an answer that is being written has no such line yet. */
function fencedCode(lines, i, at, fence) {
  const closes = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}[ \t]*$`);
  let next = i + 1;
  while (next < lines.length && !closes.test(at(lines[next]))) next += 1;
  const block = { kind: "pre", language: fence[2].trim().split(/\s/)[0], lines: lines.slice(i + 1, next) };
  return [block, Math.min(next + 1, lines.length)];
}

function list(text, lines, i, at, isBlank, depth) {
  const isOrdered = (mark) => /\d/.test(mark[2]);
  const first = ITEM.exec(at(lines[i]));
  const items = [];
  let next = i;
  let width = 0;
  for (; next < lines.length; next += 1) {
    const line = lines[next];
    const shown = at(line);
    const indent = shown.length - shown.trimStart().length;
    const mark = indent < Math.max(width, 1) || indent < 2 ? ITEM.exec(shown) : null;
    if (mark && !RULE.test(shown)) {
      if (isOrdered(mark) !== isOrdered(first)) break;
      width = mark[0].length;
      items.push([{ start: line.start + width, end: line.end }]);
    } else if (isBlank(line)) {
      // A blank line is of the list if its next line is.
      const after = lines.slice(next + 1).find((other) => !isBlank(other));
      if (!after) break;
      const text = at(after);
      const belongs = text.length - text.trimStart().length >= 2 || ITEM.test(text);
      if (!belongs) break;
      items.at(-1).push({ start: line.end, end: line.end });
    } else if (indent >= 2 || !(isBlank(lines[next - 1]) || begins(shown))) {
      items.at(-1).push({ start: line.start + Math.min(indent, width), end: line.end });
    } else break;
  }
  const kind = isOrdered(first) ? "ol" : "ul";
  const blocks = items.map((item) => blocksOf(text, item, depth + 1));
  return [{ kind, number: parseInt(first[2], 10), items: blocks }, next];
}

/** The cells of a line of a table, as lines. */
function cells(text, line) {
  const found = [];
  let start = line.start;
  for (let i = line.start; i <= line.end; i += 1) {
    if (i < line.end && (text[i] !== "|" || text[i - 1] === "\\")) continue;
    found.push({ start, end: i });
    start = i + 1;
  }
  const isEmpty = (cell) => !text.slice(cell.start, cell.end).trim();
  if (found.length > 1 && isEmpty(found[0])) found.shift();
  if (found.length > 1 && isEmpty(found.at(-1))) found.pop();
  return found;
}

function elementOf(block, text, leaf) {
  const element = document.createElement(block.kind);
  const within = (tag, nodes) => {
    const made = document.createElement(tag);
    made.append(...nodes);
    return made;
  };
  if (block.blocks) element.append(...block.blocks.map((inner) => elementOf(inner, text, leaf)));
  if (block.items) {
    if (block.kind === "ol") element.start = block.number;
    for (const blocks of block.items) {
      // The text of a short item is no paragraph of its own.
      const inner = blocks.flatMap((item, index) =>
        index || item.kind !== "p" ? [elementOf(item, text, leaf)] : inline(item.lines, text, leaf),
      );
      element.append(within("li", inner));
    }
  }
  if (block.rows) {
    const rows = block.rows.map((row, index) =>
      within("tr", row.map((cell) => within(index ? "td" : "th", inline([cell], text, leaf)))),
    );
    element.append(within("tbody", rows));
  }
  if (block.kind === "pre") {
    if (block.language) element.dataset.language = block.language;
    const shown = block.lines.flatMap(({ start, end }, i) => leaf(start, i + 1 < block.lines.length ? end + 1 : end));
    element.append(within("code", shown));
  } else if (block.lines) element.append(...inline(block.lines, text, leaf));
  return element;
}

/** The nodes of the text of `lines`, which are one paragraph. */
function inline(lines, text, leaf) {
  const trimmed = lines.map(({ start, end }) => {
    const shown = text.slice(start, end);
    return { start: start + shown.length - shown.trimStart().length, end: start + shown.trimEnd().length };
  });
  // The paragraph without what is between its lines, and the place of each character in the text.
  const places = trimmed.flatMap(({ start, end }, i) => {
    const line = Array.from({ length: Math.max(0, end - start) }, (_, j) => start + j);
    return i + 1 < lines.length ? [...line, lines[i].end] : line;
  });
  const paragraph = places.map((place) => text[place]).join("");
  const show = (start, end) => {
    const nodes = [];
    for (let i = start; i < end; ) {
      let j = i + 1;
      while (j < end && places[j] === places[j - 1] + 1) j += 1;
      nodes.push(...leaf(places[i], places[j - 1] + 1));
      i = j;
    }
    return nodes;
  };
  return spans(paragraph, 0, paragraph.length, show);
}

/** The nodes of characters [start, end) of a paragraph, within `depth` other spans. */
function spans(paragraph, start, end, show, depth = 0) {
  if (depth >= MOST_DEPTH) return show(start, end);
  const nodes = [];
  let plain = start;
  const within = paragraph.slice(0, end);
  for (let i = start; i < end; ) {
    const [kind, found] = inlineAt(within, i);
    if (!found) {
      i += 1;
      continue;
    }
    nodes.push(...show(plain, i));
    if (kind === "escape") nodes.push(...show(i + 1, i + 2));
    else nodes.push(spanOf(kind, found, paragraph, show, depth));
    i += found[0].length;
    plain = i;
  }
  return [...nodes, ...show(plain, end)];
}

function inlineAt(text, place) {
  if (!"\\`*_~![h".includes(text[place])) return [];
  for (const [kind, pattern] of INLINE) {
    pattern.lastIndex = place;
    const found = pattern.exec(text);
    if (found) return [kind, found];
  }
  return [];
}

function spanOf(kind, found, paragraph, show, depth) {
  const element = document.createElement(kind === "link" ? "a" : kind);
  // Code has its marks before its text, and a link its address after it; of an address alone that is the text.
  const group = kind === "code" || (kind === "link" && !found[1]) ? 2 : 1;
  const [start, end] = found.indices[group];
  if (kind === "link") {
    // The patterns know no other kinds of addresses, so none runs code.
    element.href = found[2] ?? found[1];
    element.rel = "noopener noreferrer";
    element.target = "_blank";
  }
  const isPlain = kind === "code" || (kind === "link" && found[0] === found[1]);
  element.append(...(isPlain ? show(start, end) : spans(paragraph, start, end, show, depth + 1)));
  return element;
}

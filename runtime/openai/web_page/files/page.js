// The page of the OpenAI port: a chat, and a view of the server. Texts of the model enter the document as text nodes
// only. Sections: elements, the server's API, Markdown, options, the chat, the server, tabs and token.

const TOKEN = "meshserve.token", OPTIONS = "meshserve.options"; // in sessionStorage
const WINDOW_SECONDS = 10, MAX_READINGS = 120;
const WATCH_MS = 1000, IDLE_MS = 5000;

// ---- Elements ----

const byId = (id) => document.getElementById(id);

/** Returns a new element with properties (and attributes, by names with a dash) and children: elements or texts. */
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "scope") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function button(text, onclick) {
  return element("button", { type: "button", className: "quiet", textContent: text, onclick });
}

function copyButton(text, label) {
  if (!navigator.clipboard) return null; // pages without TLS of other machines have none
  const made = button("Copy", async () => {
    await navigator.clipboard.writeText(text());
    made.textContent = "Copied";
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  });
  made.setAttribute("aria-label", label);
  return made;
}

/** Says something to screen readers. */
function announce(text) {
  byId("announcement").textContent = text;
}

function number(value, digits = 0) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function milliseconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  return seconds < 1 ? `${number(1000 * seconds)} ms` : `${number(seconds, 1)} s`;
}

function duration(seconds) {
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  if (hours) return `${hours} h ${minutes % 60} min`;
  return minutes ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(seconds)} s`;
}

// ---- The server's API ----

class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Sends a request with the token. Raises ApiError. Paths are relative: a proxy may serve the page below a path. */
async function call(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  const response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  if (response.ok) return response;
  const text = await response.text();
  let message = text || response.statusText;
  try { message = JSON.parse(text).error.message; } catch { /* a proxy's answer */ }
  if (response.status === 401) askForToken(message);
  throw new ApiError(response.status, message);
}

/** Yields the JSON of each event of a stream. Raises ApiError if one says that the request has failed. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (!data || data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(0, event.error.message);
      yield event;
    }
  }
}

// ---- Markdown ----

const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
// Bounded, so that no text takes long.
const INLINE = new RegExp([
  "(?<ticks>`+)(?<code>.{1,2000}?)\\k<ticks>(?!`)",
  "(?<strongMark>\\*\\*|__)(?=\\S)(?<strong>.{1,2000}?\\S?)\\k<strongMark>",
  "(?<![\\w*])(?<mark>[*_])(?=[^\\s*_])(?<em>.{1,1000}?)(?<=[^\\s])\\k<mark>(?![\\w*])",
  "~~(?<gone>.{1,1000}?)~~",
  "!?\\[(?<text>[^\\]]{0,1000})\\]\\((?<url>[^\\s)]{1,2000})\\)",
  "(?<bare>https?://[^\\s<>\"')]{1,2000}[^\\s<>\"').,;:!?])",
].join("|"), "s");

/** Draws Markdown. Drawing a longer text again leaves the blocks alone that have not changed. */
function drawMarkdown(container, text) {
  const found = blocks(text), keys = container.blockKeys ?? [];
  let same = 0;
  while (same < found.length && found[same].key === keys[same]) same += 1;
  while (container.childElementCount > same) container.lastElementChild.remove();
  for (const block of found.slice(same)) container.append(drawn(block));
  container.blockKeys = found.map((block) => block.key);
}

/** Divides a text into blocks: lines of one kind. */
function blocks(text) {
  const found = [], lines = text.split("\n");
  const add = (kind, taken, more = {}) => found.push({ kind, lines: taken, key: `${kind}\n${taken.join("\n")}`, ...more });
  for (let at = 0; at < lines.length; at += 1) {
    const line = lines[at], begin = at, fence = FENCE.exec(line);
    const upTo = (ends) => {
      while (at + 1 < lines.length && !ends(lines[at + 1])) at += 1;
      return lines.slice(begin, at + 1);
    };
    if (!line.trim()) continue;
    if (fence) {
      const indent = line.length - line.trimStart().length;
      const taken = upTo((next) => next.trim().startsWith(fence[1]) && !next.trim().replaceAll(fence[1][0], ""));
      at += 1; // the closing fence
      add("code", taken.slice(1).map((each) => each.slice(Math.min(indent, each.search(/\S|$/)))), { language: fence[2] });
    } else if (HEADING.test(line)) add("heading", [line]);
    else if (RULE.test(line)) add("rule", [line]);
    else if (ITEM.test(line)) {
      add("list", upTo((next) => FENCE.test(next) || HEADING.test(next) || RULE.test(next)
        || (!ITEM.test(next) && !/^\s+\S/.test(next) && !(next.trim() === "" && ITEM.test(lines[at + 2] ?? "")))));
    } else if (/^\s*>/.test(line)) add("quote", upTo((next) => !/^\s*>/.test(next)));
    else if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) {
      add("table", upTo((next) => !next.includes("|")));
    } else {
      add("text", upTo((next) => !next.trim() || FENCE.test(next) || HEADING.test(next) || ITEM.test(next) || /^\s*>/.test(next)));
    }
  }
  return found;
}

function drawn(block) {
  const { kind, lines } = block;
  if (kind === "code") return drawnCode(block.language, lines.join("\n"));
  if (kind === "rule") return element("hr");
  if (kind === "list") return drawnList(lines);
  if (kind === "table") return drawnTable(lines);
  if (kind === "heading") {
    const [, marks, text] = HEADING.exec(lines[0]);
    return element(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(text)); // below the page's own
  }
  if (kind === "quote") {
    const quote = element("blockquote");
    drawMarkdown(quote, lines.map((line) => line.replace(/^\s*>\s?/, "")).join("\n").replace(/^(\s*>)+/gm, ""));
    return quote;
  }
  const parts = lines.flatMap((line, index) => [...(index ? [element("br")] : []), ...inline(line.trim())]);
  return element("p", {}, ...parts);
}

function drawnCode(language, text) {
  const header = element("header", {}, element("span", { textContent: language || "text" }));
  header.append(copyButton(() => text, "Copy the code") ?? "");
  const code = element("pre", { tabIndex: 0 }, element("code", { textContent: text }));
  return element("div", { className: "code-box" }, header, code);
}

function drawnList(lines) {
  const open = []; // lists that are open, from the outermost, with their indents
  let root = null, item = null;
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (!found) {
      if (line.trim()) item.append(element("br"), ...inline(line.trim()));
      continue;
    }
    const indent = found[1].length, isNumbered = /\d/.test(found[2]);
    while (open.length > 1 && indent < open.at(-1).indent) open.pop();
    if (!open.length || (indent >= open.at(-1).indent + 2 && open.length < 8)) {
      const list = element(isNumbered ? "ol" : "ul");
      if (isNumbered) list.start = parseInt(found[2], 10);
      (item ?? { append: () => { root = list; } }).append(list);
      open.push({ list, indent });
    }
    item = element("li", {}, ...inline(found[3]));
    open.at(-1).list.append(item);
  }
  return root;
}

function drawnTable(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, tag) => element("tr", {}, ...cells(line).map((cell) => element(tag, {}, ...inline(cell))));
  const body = element("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  return element("table", {}, element("thead", {}, row(lines[0], "th")), body);
}

/** Returns the nodes of a text with emphasis, code and links. */
function inline(text, depth = 0) {
  const nodes = [];
  let rest = text;
  while (rest) {
    const found = depth < 5 ? INLINE.exec(rest) : null;
    if (!found) break;
    if (found.index) nodes.push(rest.slice(0, found.index));
    const { code, strong, em, gone, url, bare } = found.groups;
    if (code !== undefined) nodes.push(element("code", { textContent: code }));
    else if (strong !== undefined) nodes.push(element("strong", {}, ...inline(strong, depth + 1)));
    else if (em !== undefined) nodes.push(element("em", {}, ...inline(em, depth + 1)));
    else if (gone !== undefined) nodes.push(element("del", {}, ...inline(gone, depth + 1)));
    else nodes.push(link(bare ?? url, bare ?? found.groups.text, found[0]));
    rest = rest.slice(found.index + found[0].length);
  }
  if (rest) nodes.push(rest);
  return nodes;
}

/** Returns a link, or the text as it stands if it leads to no web page. */
function link(url, text, written) {
  if (!/^https?:\/\//i.test(url)) return written;
  return element("a", { href: url, target: "_blank", rel: "noopener noreferrer", textContent: text || url });
}

// ---- Options ----

const optionControls = () => [...byId("options").querySelectorAll("[data-kind]")];

/** Returns the fields that the options set. Null if one is not valid, which is then shown and has the focus. */
function chosenFields() {
  const fields = {};
  let invalid = null;
  for (const control of optionControls()) {
    const { field, kind } = control.dataset, text = control.value.trim();
    const problem = control.validity.valid ? "" : control.validationMessage;
    try {
      if (problem) throw new Error(problem);
      if (!text || kind === "system") { /* the server's default */ }
      else if (kind === "number") fields[field] = Number(text);
      else if (kind === "lines") fields[field] = control.value.split("\n").filter((line) => line);
      else if (kind === "json") fields[field] = JSON.parse(text);
      else if (kind === "text") fields[field] = text;
      else if (kind === "others") {
        const others = JSON.parse(text);
        if (typeof others !== "object" || others === null || Array.isArray(others)) throw new Error("This is no JSON object.");
        Object.assign(fields, others);
      }
      showProblem(control, "");
    } catch (error) {
      showProblem(control, error.message);
      invalid ??= control;
    }
  }
  if (invalid) {
    showOptions(true);
    if (invalid.closest("details")) invalid.closest("details").open = true;
    invalid.focus();
    if (!byId(`${invalid.id}-error`)) invalid.reportValidity();
  }
  return invalid ? null : fields;
}

function showProblem(control, text) {
  control.setAttribute("aria-invalid", text ? "true" : "false");
  const shown = byId(`${control.id}-error`);
  if (shown) Object.assign(shown, { textContent: text, hidden: !text });
}

function showOptions(isShown) {
  byId("options").hidden = !isShown;
  byId("toggle-options").setAttribute("aria-expanded", String(isShown));
}

function saveOptions() {
  const values = Object.fromEntries(optionControls().map((control) => [control.id, control.value]));
  sessionStorage.setItem(OPTIONS, JSON.stringify(values));
}

function restoreOptions() {
  const values = JSON.parse(sessionStorage.getItem(OPTIONS) ?? "{}");
  for (const control of optionControls()) control.value = values[control.id] ?? control.value;
  for (const details of byId("options").querySelectorAll("details")) {
    details.open = [...details.querySelectorAll("[data-kind]")].some((control) => control.value);
  }
}

// ---- The chat ----

const messages = []; // as the server takes them, without the system message
let running = null; // the AbortController of the answer that is being written

/** An answer as it comes, and what is shown of it. */
class Answer {
  constructor() {
    this.content = "";
    this.reasoning = "";
    this.calls = []; // each {id, name, arguments}
    this.began = performance.now();
    this.firstToken = this.thought = this.latest = null; // times
    this.usage = this.reason = null;
    this.firstTokens = 0; // that came with the first chunk
    this.item = element("li", { className: "answer" }, element("h2", { className: "unseen", textContent: "Answer" }));
    this.waiting = element("div", { className: "waiting" });
    this.item.append(this.waiting);
    byId("messages").append(this.item);
  }

  take(chunk) {
    const choice = chunk.choices.find((each) => each.index === 0), delta = choice?.delta ?? {}, now = performance.now();
    const reasoning = delta.reasoning_content ?? "", content = delta.content ?? "", calls = delta.tool_calls ?? [];
    this.usage = chunk.usage ?? this.usage;
    this.reason = choice?.finish_reason ?? this.reason;
    if (reasoning || content || calls.length) {
      this.firstToken ??= now;
      this.latest = now;
      this.firstTokens ||= this.usage?.completion_tokens ?? 1;
    }
    if (!reasoning && (content || calls.length)) this.thought ??= now;
    this.reasoning += reasoning;
    this.content += content;
    for (const part of calls) {
      this.calls[part.index] ??= { id: part.id, name: part.function.name, arguments: "" };
      this.calls[part.index].arguments += part.function.arguments ?? "";
    }
    this.drawSoon();
  }

  drawSoon() {
    this.frame ??= requestAnimationFrame(() => { this.frame = null; this.draw(); });
  }

  draw() {
    const thread = byId("thread"), isAtEnd = thread.scrollHeight - thread.scrollTop - thread.clientHeight < 80;
    if (this.firstToken !== null) this.waiting.remove();
    this.drawReasoning();
    if (this.content.trim()) {
      this.markdown ??= this.added(element("div", { className: "markdown" }));
      drawMarkdown(this.markdown, this.content);
    }
    if (this.calls.length) this.drawCalls();
    this.drawFoot();
    if (isAtEnd) thread.scrollTop = thread.scrollHeight;
  }

  added(part) {
    this.item.insertBefore(part, this.foot ?? null);
    return part;
  }

  drawReasoning() {
    if (!this.reasoning.trim()) return;
    if (!this.details) {
      this.summary = element("summary");
      this.thoughts = element("p");
      this.details = this.added(element("details", { className: "reasoning" }, this.summary, this.thoughts));
    }
    this.thoughts.textContent = this.reasoning.trim();
    const isOver = this.thought !== null || !this.isRunning;
    this.details.toggleAttribute("data-running", !isOver);
    const seconds = ((this.thought ?? this.latest) - this.firstToken) / 1000;
    const numTokens = this.usage?.completion_tokens_details?.reasoning_tokens;
    const about = [numTokens ? `${number(numTokens)} tokens` : "", isOver ? milliseconds(seconds) : ""].filter(Boolean);
    this.summary.replaceChildren(element("strong", { textContent: isOver ? "Reasoning" : "Thinking…" }));
    if (about.length) this.summary.append(` · ${about.join(", ")}`);
  }

  drawCalls() {
    this.cards ??= this.added(element("form", { className: "results", onsubmit: (event) => this.sendResults(event) }));
    for (const [index, each] of this.calls.entries()) {
      const card = this.cards.children[index] ?? this.cards.appendChild(element(
        "section", { className: "call" },
        element("h3", {}, "Tool call ", element("code", { textContent: each.name })),
        element("pre", { tabIndex: 0, "aria-label": "Arguments" }),
      ));
      card.querySelector("pre").textContent = indented(each.arguments);
    }
  }

  drawFoot() {
    if (this.firstToken === null && this.isRunning) return;
    this.foot ??= this.item.appendChild(element("div", { className: "foot" }));
    const facts = this.facts().map((fact) => element("li", { textContent: fact }));
    const list = element("ul", { "aria-label": "About this answer" }, ...facts);
    if (this.foot.firstChild) this.foot.firstChild.replaceWith(list);
    else this.foot.append(list);
  }

  facts() {
    const usage = this.usage, facts = [];
    if (usage) {
      facts.push(`${number(usage.completion_tokens)} tokens`);
      const seconds = (this.latest - this.firstToken) / 1000, later = usage.completion_tokens - this.firstTokens;
      if (seconds > 0 && later > 0) facts.push(`${number(later / seconds, 1)} tokens/s`);
    }
    if (this.firstToken !== null) facts.push(`first token ${milliseconds((this.firstToken - this.began) / 1000)}`);
    if (this.isRunning) return facts;
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    if (usage?.prompt_tokens) facts.push(`prompt ${number(usage.prompt_tokens)}${cached ? `, ${number(cached)} cached` : ""}`);
    const reasons = { length: "cut at the limit", stopped: "stopped", tool_calls: "tool calls", stop: "complete" };
    if (this.reason) facts.push(reasons[this.reason] ?? this.reason);
    return facts;
  }

  /** Ends the answer: adds it to the conversation, and what can be done with it to the page. */
  end(error) {
    this.isRunning = false;
    this.waiting.remove();
    cancelAnimationFrame(this.frame);
    this.draw();
    if (error) this.added(element("p", { className: "failure", role: "alert", textContent: error }));
    this.message = { role: "assistant", content: this.content };
    if (this.reasoning) this.message.reasoning_content = this.reasoning;
    if (this.calls.length) {
      this.message.tool_calls = this.calls.map(({ id, ...rest }) => ({ id, type: "function", function: rest }));
    }
    if (this.firstToken !== null) messages.push(this.message);
    for (const old of document.querySelectorAll("[data-again]")) old.remove();
    const again = button("Try again", () => this.again());
    again.dataset.again = "";
    const copy = this.content ? copyButton(() => this.content, "Copy the answer") : null;
    this.foot.append(copy ?? "", again);
    if (this.calls.length && !error) this.askForResults();
    if (!error) announce(this.calls.length ? `The model calls ${this.calls[0].name}.` : this.content || "The answer is empty.");
    const thread = byId("thread");
    if (this.calls.length) thread.scrollTop = thread.scrollHeight;
  }

  again() {
    if (running) return;
    const place = messages.indexOf(this.message);
    if (place >= 0) messages.length = place;
    this.item.remove();
    answer();
  }

  askForResults() {
    for (const [index, card] of [...this.cards.children].entries()) {
      const id = `result-${this.calls[index].id}`;
      const field = element("textarea", { id, rows: 2, required: true });
      card.append(element("div", {}, element("label", { htmlFor: id, textContent: "Result, which the model gets" }), field));
    }
    this.cards.append(element("button", { type: "submit", className: "primary", textContent: "Send the result" }));
  }

  sendResults(event) {
    event.preventDefault();
    if (running || messages.at(-1) !== this.message) return;
    for (const [index, { id }] of this.calls.entries()) {
      const field = byId(`result-${id}`), content = field.value;
      messages.push({ role: "tool", tool_call_id: id, content });
      const shown = element("div", {}, element("p", { className: "label", textContent: "Result" }), element("pre", { textContent: content }));
      this.cards.children[index].lastChild.replaceWith(shown);
    }
    this.endResults();
    answer();
  }

  endResults() {
    this.cards.querySelector("button[type=submit]")?.remove();
  }
}

function indented(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; } // not complete yet
}

/** Has the model answer the conversation. */
async function answer() {
  const fields = chosenFields();
  if (!fields) return;
  const system = byId("system").value.trim(), shown = new Answer();
  const body = {
    ...fields, messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true, stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  setRunning(new AbortController());
  shown.isRunning = true;
  byId("thread").scrollTop = byId("thread").scrollHeight;
  announce("The model is answering.");
  let problem = "";
  try {
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
    const response = await call("v1/chat/completions", { ...options, signal: running.signal });
    for await (const event of events(response)) shown.take(event);
    if (!shown.reason) problem = "The connection ended before the answer did.";
  } catch (error) {
    if (error.name === "AbortError") shown.reason = "stopped";
    else problem = error instanceof ApiError ? error.message : `The server cannot be reached: ${error.message}.`;
  }
  setRunning(null);
  shown.end(problem);
}

function setRunning(controller) {
  running = controller;
  byId("messages").setAttribute("aria-busy", String(controller !== null));
  const hadFocus = document.activeElement === byId("stop");
  byId("send").hidden = controller !== null;
  byId("stop").hidden = controller === null;
  byId("clear").disabled = controller !== null;
  if (hadFocus) byId("message").focus();
}

function send(event) {
  event.preventDefault();
  const field = byId("message"), content = field.value.trim();
  if (!content || running || !chosenFields()) return;
  for (const open of document.querySelectorAll(".results button[type=submit], .results textarea")) open.remove();
  messages.push({ role: "user", content });
  byId("welcome").hidden = true;
  const heading = element("h2", { className: "unseen", textContent: "You" });
  byId("messages").append(element("li", { className: "user" }, heading, element("div", { className: "text", textContent: content })));
  field.value = "";
  grow(field);
  answer();
}

function clear() {
  messages.length = 0;
  byId("messages").replaceChildren();
  byId("welcome").hidden = false;
  byId("message").focus();
}

/** Gives a field the height of its text. */
function grow(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

function startChat() {
  const field = byId("message");
  byId("composer").addEventListener("submit", send);
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", clear);
  field.addEventListener("input", () => grow(field));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  byId("toggle-options").addEventListener("click", () => showOptions(byId("options").hidden));
  byId("options").addEventListener("submit", (event) => event.preventDefault());
  byId("options").addEventListener("input", saveOptions);
  byId("options").addEventListener("reset", () => setTimeout(() => { saveOptions(); chosenFields(); }));
  restoreOptions();
  showOptions(window.matchMedia("(min-width: 56rem)").matches);
  field.focus();
}

// ---- The server ----

const readings = [];
let timer = null, isPaused = false;

const TIMES = [
  ["first token", "meshserve_time_to_first_token_seconds"],
  ["between tokens", "meshserve_inter_token_seconds"],
  ["whole request", "meshserve_request_seconds"],
  ["queue", "meshserve_queue_seconds"],
  ["step", "meshserve_step_seconds"],
  ["step, host part", "meshserve_step_host_seconds"],
];

/** The increase of a counter between two readings; null if it is unknown, or the server has been restarted. */
function increase(before, after, name) {
  const change = after.values[name] - before.values[name];
  return change >= 0 ? change : null;
}

function rate(before, after, name) {
  const seconds = after.seconds - before.seconds, change = increase(before, after, name);
  return change === null || seconds <= 0 ? null : change / seconds;
}

function share(before, after, name, whole) {
  const part = increase(before, after, name), total = increase(before, after, whole);
  return part !== null && total ? part / total : null;
}

/** The mean and quantiles of a histogram's new observations, linear within a bucket, as Prometheus estimates them. */
function times(before, after, name) {
  const old = before.histograms[name], now = after.histograms[name];
  const total = now && old ? now.count - old.count : 0;
  if (total <= 0) return [null, null, null, null];
  const counts = now.buckets.map(([bound, count], index) => [bound, count - old.buckets[index][1]]);
  const quantile = (fraction) => {
    let low = 0, below = 0;
    for (const [bound, count] of counts) {
      if (count >= fraction * total) return bound === null ? low : low + (bound - low) * (fraction * total - below) / (count - below);
      [low, below] = [bound, count];
    }
    return low;
  };
  return [(now.sum - old.sum) / total, quantile(0.5), quantile(0.9), quantile(0.99)];
}

async function watch() {
  clearTimeout(timer);
  if (document.hidden) return; // begins again when the page is seen
  const isShown = !byId("view-server").hidden;
  if (!(isPaused && isShown)) {
    try {
      const reading = await (await call("status.json")).json();
      if (readings.length && reading.seconds < readings.at(-1).seconds) readings.length = 0; // a new server
      if (!readings.length || reading.seconds > readings.at(-1).seconds) readings.push(reading);
      if (readings.length > MAX_READINGS) readings.shift();
      showState(reading);
      if (isShown) drawServer(reading);
    } catch (error) {
      showUnknown(error);
    }
  }
  clearTimeout(timer); // another call may have set it meanwhile
  timer = setTimeout(watch, isShown ? WATCH_MS : IDLE_MS);
}

function showState(reading) {
  const { state, progress, model } = reading;
  const text = `${state[0]}${state.slice(1).toLowerCase()}${progress ? `: ${progress}` : ""}`;
  setState(text, { READY: "ready", FAILED: "failed" }[state] ?? "");
  if (!model) return;
  byId("model").textContent = model.name;
  byId("welcome-model").textContent = model.name;
  const isChat = model.task === "generate" && model.supports_chat;
  setNotice(isChat ? "" : "This model does not chat; the server’s state is shown under Server.");
  for (const control of optionControls()) {
    const usual = model.default_sampling[control.dataset.field];
    if (control.type === "number") control.placeholder = usual === undefined || usual === null ? "default" : String(usual);
  }
}

function showUnknown(error) {
  if (error.status === 403) setState("no permission to see the state");
  else if (error.status === 401) setState("a token is needed");
  else setState("no answer", "failed");
  byId("server-about").textContent = error.message;
}

function setState(text, kind = "") {
  const state = byId("state");
  if (state.textContent !== text) state.textContent = text; // or it would be read out again
  state.className = `state ${kind}`;
}

function setNotice(text) {
  const notice = byId("notice");
  if (notice.textContent !== text) Object.assign(notice, { textContent: text, hidden: !text });
}

function drawServer(after) {
  const isRecent = (reading) => reading.seconds >= after.seconds - WINDOW_SECONDS;
  const before = readings.find(isRecent) === after ? readings.at(-2) ?? after : readings.find(isRecent);
  const { model, load, values } = after;
  byId("server-name").textContent = model?.name ?? "Server";
  byId("server-about").textContent = model ? [
    `${model.size} parameters`, model.quantization || model.dtype, `${model.num_devices} × ${model.device_kind}`,
    `TP size ${model.tp_size}`, `context ${number(model.max_context_tokens)}`, `meshserve ${model.server_version}`,
    `up ${duration(values.meshserve_uptime_seconds)}`,
  ].join(" · ") : after.progress;
  const percent = (value) => (value === null ? "–" : `${number(100 * value)} %`);
  const ratePer = (name) => number(rate(before, after, name), 0);
  const used = load?.num_pages ? 1 - load.num_free_pages / load.num_pages : null;
  const ended = Object.entries(after.outcomes).map(([name, count]) => `${name} ${number(count)}`);
  const drafts = share(before, after, "meshserve_accepted_draft_tokens_total", "meshserve_draft_tokens_total");
  const numEnded = (reading) => Object.values(reading.outcomes).reduce((sum, count) => sum + count, 0);
  const course = (name) => history((old, now) => rate(old, now, name));
  const hits = (old, now) => share(old, now, "meshserve_cached_tokens_total", "meshserve_admitted_tokens_total");
  const slots = share(before, after, "meshserve_batch_occupancy_ratio_sum", "meshserve_batch_occupancy_ratio_count");
  const figures = [
    ["Running requests", number(load?.num_running), "", history((_, now) => now.load?.num_running ?? null)],
    ["Waiting requests", number(load?.num_waiting), "", history((_, now) => now.load?.num_waiting ?? null)],
    ["Output tokens/s", ratePer("meshserve_output_tokens_total"), "", course("meshserve_output_tokens_total")],
    ["Prompt tokens/s", ratePer("meshserve_prompt_tokens_total"), "", course("meshserve_prompt_tokens_total")],
    ["KV cache", percent(used), load ? `of ${number(load.num_pages)} pages` : "", bar(used)],
    ["Prefix hits", percent(hits(before, after)), "of prompt tokens", history(hits)],
    ["Steps/s", ratePer("meshserve_steps_total"), `slots in use ${percent(slots)}`, course("meshserve_steps_total")],
    ["Requests ended", number(numEnded(after)), ended.join(", "), history((old, now) => (numEnded(now) - numEnded(old)) / (now.seconds - old.seconds))],
  ];
  if (values.meshserve_preemptions_total) figures.push(["Preemptions", number(values.meshserve_preemptions_total), "since the start", null]);
  if (values.meshserve_draft_tokens_total) figures.push(["Drafts accepted", percent(drafts), "", null]);
  if (values.meshserve_adapters) {
    figures.push(["Adapters", number(values.meshserve_adapters), `${number(values.meshserve_device_adapters)} on the devices`, null]);
  }
  byId("figures").replaceChildren(...figures.map(([title, value, detail, picture]) => element(
    "div", { className: "figure" }, element("dt", { textContent: title }),
    element("dd", {}, value, ...(detail ? [" ", element("small", { textContent: detail })] : [])), picture && element("dd", {}, picture),
  )));
  drawTables(before, after);
}

function drawTables(before, after) {
  byId("times").tBodies[0].replaceChildren(...TIMES.map(([title, name]) => element(
    "tr", {}, element("th", { scope: "row", textContent: title }),
    ...times(before, after, name).map((value) => element("td", { textContent: number(value === null ? null : 1000 * value, 1) })),
  )));
  byId("no-requests").hidden = after.requests.length > 0;
  byId("requests").tBodies[0].replaceChildren(...after.requests.slice(0, 25).map((each) => {
    const seconds = each.total_seconds - (each.first_token_seconds ?? each.total_seconds);
    const who = each.tenant ? `${each.tenant}/${each.request_id}` : each.request_id;
    const method = each.method.replace("/v1/", "") + (each.adapter ? ` with ${each.adapter}` : "");
    const texts = [
      `${duration(each.seconds_ago)} ago`, method, who, each.outcome, number(each.num_prompt_tokens),
      number(each.num_output_tokens), milliseconds(each.first_token_seconds), milliseconds(each.total_seconds),
      number(seconds > 0 && each.num_output_tokens > 1 ? (each.num_output_tokens - 1) / seconds : null, 1),
    ];
    return element("tr", {}, ...texts.map((text, index) => element("td", { textContent: text, title: index === 2 ? who : "" })));
  }));
}

/** Returns a curve of a figure of neighbouring readings. */
function history(figure) {
  const values = readings.slice(1).map((now, index) => figure(readings[index], now) ?? 0);
  const most = Math.max(...values, 1), first = readings[1]?.seconds, length = readings.at(-1).seconds - first;
  const points = values.map((value, index) => (
    `${(100 * (readings[index + 1].seconds - first)) / length},${29 - (27 * value) / most}`
  )).join(" ");
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const label = values.length ? `lately at most ${number(Math.max(...values))}` : "nothing yet";
  for (const [name, value] of [["viewBox", "0 0 100 30"], ["preserveAspectRatio", "none"], ["role", "img"], ["aria-label", label]]) {
    svg.setAttribute(name, value);
  }
  for (const [tag, all] of values.length < 2 ? [] : [["polygon", `0,30 ${points} 100,30`], ["polyline", points]]) {
    const shape = document.createElementNS("http://www.w3.org/2000/svg", tag);
    shape.setAttribute("points", all);
    svg.append(shape);
  }
  return svg;
}

function bar(value) {
  return element("progress", { max: 1, value: value ?? 0, "aria-label": "KV cache in use" });
}

function startServer() {
  byId("pause").addEventListener("click", () => {
    isPaused = !isPaused;
    byId("pause").setAttribute("aria-pressed", String(isPaused));
    byId("pause").textContent = isPaused ? "Paused" : "Pause";
    watch();
  });
  document.addEventListener("visibilitychange", watch);
}

// ---- Tabs and token ----

function select(tab) {
  for (const each of document.querySelectorAll("[role=tab]")) {
    const isSelected = each === tab;
    each.setAttribute("aria-selected", String(isSelected));
    each.tabIndex = isSelected ? 0 : -1;
    byId(each.getAttribute("aria-controls")).hidden = !isSelected;
  }
  window.history.replaceState(null, "", tab.id === "tab-server" ? "#server" : location.pathname);
  if (tab.id === "tab-server" && readings.length) drawServer(readings.at(-1));
  watch();
}

function startTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  for (const [index, tab] of tabs.entries()) {
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(index + step + tabs.length) % tabs.length];
      select(next);
      next.focus();
    });
  }
  select(location.hash === "#server" ? byId("tab-server") : byId("tab-chat"));
}

function showToken(isShown) {
  byId("token-form").hidden = !isShown;
  byId("toggle-token").setAttribute("aria-expanded", String(isShown));
}

/** Asks for a token, because the server has refused a call. */
function askForToken(reason) {
  setNotice(sessionStorage.getItem(TOKEN) ? reason : "This server needs an access token.");
  if (byId("token-form").hidden) {
    showToken(true);
    byId("token").focus();
  }
}

function startToken() {
  const use = (token) => {
    if (token) sessionStorage.setItem(TOKEN, token);
    else sessionStorage.removeItem(TOKEN);
    byId("token").value = "";
    setNotice("");
    showToken(false);
    byId("message").focus();
    watch();
  };
  byId("toggle-token").addEventListener("click", () => {
    showToken(byId("token-form").hidden);
    if (!byId("token-form").hidden) byId("token").focus();
  });
  byId("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    use(byId("token").value.trim());
  });
  byId("forget-token").addEventListener("click", () => use(""));
}

startToken();
startChat();
startServer();
startTabs();

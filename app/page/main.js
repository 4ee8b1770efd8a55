// Puts the page together: the key, the models, the chat, the timeline of what was asked last, the live figures.

import { Chat } from "./chat.js";
import { watch } from "./server.js";
import { drawTimeline } from "./timeline.js";

const RETRY_MS = 2000;
let retry = null;
let lastRequest = null;

const element = (id) => document.getElementById(id);

function headers() {
  const key = element("key").value;
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function listModels() {
  clearTimeout(retry);
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (response.ok) showModels((await response.json()).data);
    else if (response.status === 401) refuseKey();
    else throw new Error(`status ${response.status}`);
  } catch {
    // What is listed stays: the server or the connection may come back.
    clearTimeout(retry);
    retry = setTimeout(listModels, RETRY_MS);
  }
}

function showModels(cards) {
  const select = element("model");
  // A cross-encoder does not chat.
  const shown = cards.filter(({ task }) => task === "generate");
  const options = shown.map(({ id, parent }) => new Option(parent ? `${id} (adapter of ${parent})` : id, id));
  const told = (list) => JSON.stringify(list.map(({ text, value }) => [text, value]));
  // An open list does not move under the pointer.
  if (told(options) === told([...select.options])) return;
  const chosen = select.value;
  select.replaceChildren(...options);
  if (shown.some(({ id }) => id === chosen)) select.value = chosen;
}

function refuseKey() {
  element("key").placeholder = "required";
  // Without a value, it cannot be sent.
  element("model").replaceChildren(new Option(element("key").value ? "the API key is wrong" : "an API key is required", ""));
}

async function showTimeline(requestId) {
  lastRequest = requestId;
  try {
    const response = await fetch(`requests/${encodeURIComponent(requestId)}`, { headers: headers() });
    const timeline = response.ok ? await response.json() : null;
    if (timeline && requestId === lastRequest) drawTimeline(element("timeline"), timeline);
  } catch {
    // The chat goes on without it.
  }
}

const chat = new Chat({ log: element("log"), headers, onEnd: showTimeline });

function parameters() {
  const number = (id) => (element(id).value === "" ? undefined : Number(element(id).value));
  return {
    model: element("model").value,
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
    stop: element("stop").value || undefined,
  };
}

async function send(event) {
  event?.preventDefault();
  const text = element("message").value.trim();
  if (!text || chat.isBusy) return;
  element("message").value = "";
  element("send").disabled = true;
  element("cancel").disabled = false;
  try {
    await chat.ask(text, element("system").value, parameters());
  } finally {
    element("send").disabled = false;
    element("cancel").disabled = true;
    element("message").focus();
  }
}

element("ask").addEventListener("submit", send);
element("cancel").addEventListener("click", () => chat.cancel());
element("clear").addEventListener("click", () => chat.clear());
element("key").addEventListener("change", listModels);
// Adapters come and go while the page is open.
element("model").addEventListener("focus", listModels);
window.addEventListener("focus", listModels);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") chat.cancel();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send(event);
});

// A key stays in this tab and nowhere else.
element("key").value = sessionStorage.getItem("key") ?? "";
element("key").addEventListener("change", () => sessionStorage.setItem("key", element("key").value));

listModels();
watch(element("live"), element("server"));
element("message").focus();

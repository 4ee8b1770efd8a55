// Puts the page together: the key, the models, the chat, the timeline of what was asked last, the live figures.

import { Chat } from "./chat.js";
import { watch } from "./server.js";
import { drawTimeline } from "./timeline.js";

const element = (id) => document.getElementById(id);

function headers() {
  const key = element("key").value;
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function listModels() {
  const select = element("model");
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) {
    element("key").placeholder = "required";
    select.replaceChildren();
    return;
  }
  // A cross-encoder does not chat.
  const data = (await response.json()).data.filter(({ task }) => task === "generate");
  const chosen = select.value;
  select.replaceChildren(...data.map(({ id, parent }) => new Option(parent ? `${id} (adapter of ${parent})` : id, id)));
  if (data.some(({ id }) => id === chosen)) select.value = chosen;
}

async function showTimeline(requestId) {
  const response = await fetch(`requests/${encodeURIComponent(requestId)}`, { headers: headers() });
  if (response.ok) drawTimeline(element("timeline"), await response.json());
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

// A conversation: streams each answer, can be cancelled, and says which request it was.

const NEAR_END_PX = 40;

export class Chat {
  #turns = [];
  #abort = null;

  constructor({ log, headers, onEnd }) {
    this.log = log;
    this.headers = headers;
    this.onEnd = onEnd;
  }

  get isBusy() {
    return this.#abort !== null;
  }

  cancel() {
    this.#abort?.abort();
  }

  clear() {
    this.cancel();
    this.#turns = [];
    this.log.replaceChildren();
  }

  async ask(text, system, parameters) {
    // "New chat" begins others, to which nothing of this answer belongs.
    const turns = this.#turns;
    turns.push({ role: "user", content: text });
    this.#show("user", text);
    const answer = this.#show("assistant", "");
    this.#abort = new AbortController();
    let requestId = null;
    let content = "";
    try {
      const response = await fetch("v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json", ...this.headers() },
        body: JSON.stringify({
          ...parameters,
          messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
          stream: true,
          stream_options: { include_usage: true },
        }),
        signal: this.#abort.signal,
      });
      requestId = response.headers.get("x-request-id");
      if (!response.ok) throw new Error(await reason(response));
      let isWhole = false;
      for await (const data of events(response.body)) {
        isWhole = data === "[DONE]";
        if (isWhole) break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        const delta = chunk.choices[0]?.delta ?? {};
        if (delta.reasoning_content) this.#append(answer, delta.reasoning_content, "thoughts");
        const piece = delta.content ?? delta.refusal ?? "";
        content += piece;
        if (piece) this.#append(answer, piece);
      }
      if (!isWhole) throw new Error("The connection ended before the answer did.");
    } catch (error) {
      if (error.name === "AbortError") this.#append(answer, " (cancelled)", "thoughts");
      else {
        answer.classList.add("error");
        this.#append(answer, answer.hasChildNodes() ? `\n${error.message}` : error.message);
      }
    } finally {
      this.#abort = null;
    }
    // An answer that has failed would be a turn without content.
    if (content) turns.push({ role: "assistant", content });
    else turns.pop();
    if (requestId) this.onEnd(requestId);
  }

  #show(role, text) {
    const turn = document.createElement("div");
    turn.className = `turn ${role}`;
    turn.textContent = text;
    this.log.append(turn);
    turn.scrollIntoView({ block: "end" });
    return turn;
  }

  #append(turn, text, kind) {
    const piece = kind ? Object.assign(document.createElement("span"), { className: kind }) : null;
    if (piece) piece.textContent = text;
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    turn.append(piece ?? text);
    // Whoever has scrolled up reads there.
    if (scrollHeight - scrollTop - clientHeight < NEAR_END_PX) this.log.scrollTop = this.log.scrollHeight;
  }
}

// Why a request has failed: the server has a message, a proxy before it only a status.
async function reason(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `The server cannot be reached: a proxy answered with status ${response.status}.`;
}

// The data lines of a stream of server-sent events.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

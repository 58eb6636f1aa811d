// The server's OpenAI API: a chat completion as a stream, and errors in words for people.

/** A request that failed. `status` is 0 if there was no answer; `retry` is in seconds. */
export class ServerError extends Error {
  constructor(message, status = 0, retry = null) {
    super(message);
    this.status = status;
    this.retry = retry;
  }
}

const GONE = "The server cannot be reached. Is it still running?";
const BROKEN = "The connection broke before the end of the answer.";

async function asked(path, key, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(GONE);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let told = response.statusText || `status ${response.status}`;
  try {
    told = (await response.json()).error.message;
  } catch {} // no error object: a proxy's own answer
  const retry = Number(response.headers.get("Retry-After")) || null;
  const kinds = {
    400: "The server refused the request",
    401: "The server wants one of its API keys",
    429: "The server is busy",
    503: "The server is not ready",
  };
  if (response.status === 401) told = "enter it in the settings.";
  const kind = kinds[response.status] ?? `The server answered ${response.status}`;
  return new ServerError(`${kind}: ${told}`, response.status, retry);
}

/** What the server says of its models, see `/v1/models`. */
export async function servedModels(key) {
  return (await (await asked("v1/models", key)).json()).data;
}

const LAST = 3000; // milliseconds that a stopped answer has for its end

/** Stops an answer, so that its end with the trace still comes if the server is there to send it. */
export class Stopper {
  #controller = new AbortController();
  #cancel = null;
  stopped = false;

  get signal() {
    return this.#controller.signal;
  }

  /** The answer has begun: from now on the server can be asked to end it. */
  begun(id, key) {
    this.#cancel ??= () => asked(`v1/chat/completions/${id}/cancel`, key, { method: "POST" });
  }

  async stop() {
    if (this.stopped) return this.#controller.abort();
    this.stopped = true;
    if (!this.#cancel) return this.#controller.abort();
    setTimeout(() => this.#controller.abort(), LAST);
    try {
      await this.#cancel();
    } catch {
      this.#controller.abort(); // it has ended already
    }
  }
}

/**
 * The next message of a conversation, as it is generated.
 *
 * @param {Object} body of `/v1/chat/completions`, without `stream` and `tokenleap`.
 * @param {string} key the API key, or "".
 * @param {Stopper} stopper ends the answer.
 * @param {boolean} trace whether to ask for its trace.
 * @yields {{tokens: Object[], finish: string | null, metrics: Object?, trace: Object?}}
 */
export async function* answer(body, key, stopper, trace) {
  const response = await asked("v1/chat/completions", key, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      ...body,
      stream: true,
      tokenleap: { tokens: true, metrics: true, trace },
    }),
    signal: stopper.signal,
  });
  let ended = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      ended = true;
      continue;
    }
    const value = JSON.parse(data);
    if (value.error) throw new ServerError(value.error.message, 500);
    stopper.begun(value.id, key);
    for (const choice of value.choices)
      if (choice.tokenleap)
        yield {
          tokens: choice.tokenleap.tokens ?? [],
          finish: choice.finish_reason,
          metrics: choice.tokenleap.metrics,
          trace: choice.tokenleap.trace,
        };
  }
  if (!ended) throw new ServerError(BROKEN);
}

/** The data of server-sent events. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(BROKEN);
  }
}

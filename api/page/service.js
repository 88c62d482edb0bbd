// The service behind the page: requests with the key, errors with their reason, a generation as a stream.

const KEY = "vllm-tap-key";
// The page is at / of a gateway and at /captures/ of vLLM's own port, either of them perhaps below a path of a proxy.
const ROOT = import.meta.url.replace(/(captures\/)?page\/service\.js$/, "");

export class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export async function ask(path, { headers = {}, ...options } = {}) {
  const secret = key.get();
  const answer = await fetch(`${ROOT}${path}`, {
    cache: "no-store",
    ...options,
    headers: { ...(secret && { Authorization: `Bearer ${secret}` }), ...headers },
  }).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the service does not answer", "away");
  });
  if (answer.ok) return answer;
  const error = (await answer.json().catch(() => ({}))).error ?? {};
  throw new Refused(answer.status, error.message ?? `status ${answer.status}`, error.code);
}

export const json = async (path, options) => (await ask(path, options)).json();

export function query(params) {
  const pairs = Object.entries(params).flatMap(([name, value]) => [value].flat().map((each) => [name, each]));
  const kept = pairs.filter(([, value]) => value !== undefined && value !== null && value !== "");
  return kept.length ? `?${new URLSearchParams(kept)}` : "";
}

export const captureUrl = (ref, rest = "") => `v1/captures/${encodeURIComponent(ref)}${rest}`;

/** The data of each server-sent event of an answer, until it ends. */
export async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
      if (data.length) yield data.join("\n");
    }
  }
}

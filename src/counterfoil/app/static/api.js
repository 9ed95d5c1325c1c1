// The JSON API; an answer that is a problem becomes an error with its detail.

export class ApiError extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

async function call(path, options) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The service does not answer. Is it still running?");
  }
  const body = await answer.json().catch(() => ({})); // a 204 has none
  if (!answer.ok) throw new ApiError(answer.status, body.detail || answer.statusText);
  return body;
}

const withQuery = (path, query) => {
  const known = Object.entries(query).filter(([, value]) => value != null);
  return known.length ? `${path}?${new URLSearchParams(known)}` : path;
};

export const get = (path, query = {}, signal) => call(withQuery(path, query), { signal });

export const post = (path, body, signal) =>
  call(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });

let facts;
export const about = () => (facts ??= get("/api/about").catch((error) => {
  facts = undefined;
  throw error;
}));

export async function upload(file) {
  const { limits } = await about();
  if (file.size > limits.upload_bytes) {
    const most = Math.round(limits.upload_bytes / 2 ** 20);
    throw new ApiError(413, `This file is too large: at most ${most} MiB are read.`);
  }
  const form = new FormData();
  form.append("file", file);
  return call("/api/images", { method: "POST", body: form });
}

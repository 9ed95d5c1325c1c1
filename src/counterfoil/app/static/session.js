// The token of a service that other machines can reach: from the address or typed, for a cookie.

import { post } from "./api.js";
import { failure, h } from "./dom.js";

// The part of an address after # stays in the browser: no log and no proxy sees the token.
export async function openSession() {
  const [, token] = location.hash.match(/^#token=(.+)$/) ?? [];
  if (!token) return;
  history.replaceState(null, "", `${location.pathname}#/`);
  await post("/api/session", { token: decodeURIComponent(token) });
}

export function tokenForm() {
  const field = h("input", { type: "password", id: "token", autocomplete: "off", required: true });
  const send = async (event) => {
    event.preventDefault();
    try {
      await post("/api/session", { token: field.value.trim() });
      location.reload();
    } catch (error) {
      problem.replaceChildren(failure(error));
    }
  };
  const problem = h("div", { "aria-live": "polite" });
  return h("form", { class: "token", onsubmit: send },
    h("h1", {}, "This service needs its token"),
    h("p", {}, "It was printed or chosen when the service was started."),
    h("p", { class: "entry" }, h("label", { for: "token" }, "Token"), field,
      h("button", { type: "submit", class: "go" }, "Open")),
    problem);
}

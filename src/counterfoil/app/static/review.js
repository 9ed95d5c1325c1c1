// Decisions on findings: keep, fix or discard each, by keys or buttons; undo, progress, export.

import { post } from "./api.js";
import { failure, h, oneLine, say } from "./dom.js";

const DONE = { keep: "Kept", fix: "Fixed", discard: "Discarded" };
const HELP = [
  ["k", "keep"], ["e", "edit"], ["s", "take the suggestion"], ["d", "discard"], ["u", "undo"],
  ["j ↓", "next"], ["↑", "previous"],
];
const LETTERS = 4000;
const number = (value) => value.toLocaleString("en");

function stored(value) {
  try {
    if (value !== undefined) localStorage.setItem("reviewer", value);
    return localStorage.getItem("reviewer") ?? "";
  } catch {
    return value ?? ""; // private windows keep nothing
  }
}

// `loadMore` fetches further findings; it resolves to whether there were any.
export function review(loadMore) {
  const entries = new Map();
  const undone = [];
  const name = h("input", {
    type: "text", id: "reviewer", maxlength: 100, placeholder: "anonymous", autocomplete: "name", value: stored(),
    onchange: () => stored(name.value.trim()),
  });
  const meter = h("progress", { "aria-label": "Decided findings" });
  const counted = h("p", { class: "counted" });
  const remarks = h("p", { class: "hint" });
  const exported = h("div", { class: "exported", "aria-live": "polite" });

  function showCounts(counts) {
    meter.max = Math.max(1, counts.findings);
    meter.value = counts.decided;
    counted.replaceChildren(
      h("b", {}, `${number(counts.decided)} of ${number(counts.findings)} decided, ${number(counts.open)} left`),
      ` · ${number(counts.kept)} kept, ${number(counts.fixed)} fixed, ${number(counts.discarded)} discarded`);
    remarks.textContent = [
      counts.conflicts && `${number(counts.conflicts)} open findings are conflicts between reviewers.`,
      counts.unknown && `${number(counts.unknown)} decisions are on captions that this audit does not list; they are not applied.`,
      counts.damaged && `${number(counts.damaged)} damaged lines of the decisions file were skipped.`,
    ].filter(Boolean).join(" ");
  }

  async function send(entry, action, correction, reviewer) {
    if (entry.busy) return false;
    entry.busy = true;
    try {
      const body = { key: entry.found.key, action, reviewer };
      const answer = await post("/api/audit/decisions", correction == null ? body : { ...body, correction });
      Object.assign(entry.found, { decision: answer.decision, rivals: answer.rivals });
      paint(entry);
      showCounts(answer.review);
      say(`${answer.decision ? DONE[answer.decision.action] : "Open again"}; ${answer.review.open} left`);
      return true;
    } catch (error) {
      entry.trouble.replaceChildren(failure(error));
      return false;
    } finally {
      entry.busy = false;
    }
  }

  const reviewerName = () => name.value.trim() || "anonymous";

  async function decide(entry, action, correction) {
    const reviewer = reviewerName();
    if (await send(entry, action, correction, reviewer)) {
      undone.push({ entry, reviewer });
      await next(entry);
    }
  }

  // A fix that only changes white space keeps the caption.
  const fix = (entry, text) =>
    oneLine(text) === oneLine(entry.found.text) ? decide(entry, "keep") : decide(entry, "fix", oneLine(text));

  // Takes back the decision on the current finding or, if that is open, the last one made here.
  async function undo(entry = isDecided(current()) ? current() : undone.at(-1)?.entry) {
    if (!entry) return say("Nothing to undo");
    if (entry.busy) return;
    const at = undone.findLastIndex((one) => one.entry === entry);
    const [own] = at < 0 ? [] : undone.splice(at, 1); // made here, maybe under another name
    if (await send(entry, "undo", null, own?.reviewer ?? reviewerName())) entry.item.focus();
  }

  const items = () => [...entries.values()].map((entry) => entry.item).filter((item) => item.isConnected);
  const isDecided = (entry) => Boolean(entry?.found.decision) && !entry.found.rivals.length;
  const current = () => entries.get(document.activeElement?.closest("[data-key]")?.dataset.key);

  function step(by) {
    const all = items();
    const at = all.indexOf(current()?.item);
    all[at < 0 ? 0 : Math.max(0, Math.min(all.length - 1, at + by))]?.focus();
  }

  // On to the next open finding; the list grows if there is none.
  async function next(entry) {
    const isOpen = (one) => !isDecided(one);
    const behind = () => [...entries.values()].slice([...entries.values()].indexOf(entry) + 1).find(isOpen);
    let to = behind();
    if (!to && await loadMore()) to = behind();
    (to ?? [...entries.values()].find(isOpen) ?? entry).item.focus();
  }

  function edit(entry) {
    const field = h("input", {
      type: "text", class: "mending-text", maxlength: LETTERS, "aria-label": "Corrected caption",
      value: oneLine(entry.found.decision?.correction ?? entry.found.text),
      onkeydown: (event) => {
        if (event.key !== "Escape") return;
        event.stopPropagation();
        paint(entry);
        entry.item.focus();
      },
    });
    const save = (event) => {
      event.preventDefault();
      if (oneLine(field.value)) fix(entry, field.value);
    };
    entry.bar.replaceChildren(h("form", { class: "editing", onsubmit: save }, field,
      h("button", { type: "submit", class: "go" }, "Save"),
      h("button", { type: "button", class: "quiet", onclick: () => (paint(entry), entry.item.focus()) }, "Cancel")));
    field.focus();
    field.select();
  }

  function suggest(entry) {
    const text = entry.found.correction?.text;
    text ? fix(entry, text) : say("There is no suggestion for this caption");
  }

  function paint(entry) {
    const { found, item, bar } = entry;
    const { decision, rivals } = found;
    item.classList.toggle("decided", isDecided(entry));
    const button = (key, text, act, wanted) => h("button", {
      type: "button", class: "quiet", title: `key ${key}`, "data-act": text.toLowerCase(),
      "aria-pressed": wanted ? "true" : "false", onclick: act,
    }, text);
    const is = (action) => decision?.action === action && !rivals.length;
    bar.replaceChildren(
      h("div", { class: "choices" },
        button("k", "Keep", () => decide(entry, "keep"), is("keep")),
        button("e", "Edit", () => edit(entry), is("fix")),
        found.correction ? button("s", "Suggestion", () => suggest(entry), false) : "",
        button("d", "Discard", () => decide(entry, "discard"), is("discard"))),
      decision ? h("p", { class: "outcome" }, outcome(decision, rivals),
        isDecided(entry) && [" ", h("button", {
          type: "button", class: "quiet", title: "key u", "data-act": "undo", onclick: () => undo(entry),
        }, "Undo")]) : "");
    entry.trouble.replaceChildren();
  }

  function outcome(decision, rivals) {
    const told = (one) => [
      `${DONE[one.action]} by ${one.reviewer}`, one.correction ? [": ", h("ins", {}, one.correction)] : "",
    ];
    return rivals.length
      ? ["Conflict: ", [decision, ...rivals].flatMap((one, at) => [at ? " · " : "", ...told(one)]).flat()].flat()
      : told(decision).flat();
  }

  // Adds the buttons of a finding to its item; false if the list has it already.
  function attach(found, item) {
    if (entries.has(found.key)) return false;
    // A decided finding unfolds with the focus: a pressed button would move away before its click.
    const stay = (event) => event.target.closest("button") && event.preventDefault();
    const bar = h("div", { class: "decide", onmousedown: stay });
    const entry = { found, item, bar, trouble: h("div", { "aria-live": "polite" }), busy: false };
    item.dataset.key = found.key;
    item.tabIndex = 0;
    item.append(h("div", { class: "deciding" }, entry.bar, entry.trouble));
    entries.set(found.key, entry);
    paint(entry);
    return true;
  }

  async function save(event) {
    const button = event.currentTarget;
    button.disabled = true;
    exported.replaceChildren();
    try {
      exported.replaceChildren(...summary(await post("/api/audit/export", {})));
    } catch (error) {
      exported.replaceChildren(failure(error));
    } finally {
      button.disabled = false;
    }
  }

  function summary(done) {
    const file = (each) => h("a", { class: "tag", href: `/api/audit/corrected?${new URLSearchParams({ file: each })}`, download: each }, each);
    const lost = done.emptied.length && `Images without any caption now: ${done.emptied.slice(0, 10).join(", ")}${done.emptied.length > 10 ? " …" : ""}.`;
    const missing = done.missing && `${number(done.missing)} decisions are on captions that the data do not have any more.`;
    return [
      h("p", {}, `Fixed: ${number(done.fixed)}, discarded: ${number(done.discarded)}, open and unchanged: ${number(done.open)}. Written to ${done.folder}:`),
      h("p", { class: "filters" }, done.files.map(file)),
      ...[lost, missing, ...done.notes].filter(Boolean).map((note) => h("p", { class: "hint" }, note)),
    ];
  }

  const KEYS = {
    j: () => step(1), ArrowDown: () => step(1), ArrowUp: () => step(-1), u: () => undo(),
    k: (entry) => decide(entry, "keep"), d: (entry) => decide(entry, "discard"), e: edit, s: suggest,
  };
  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, textarea, select")) return;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    const act = Object.hasOwn(KEYS, key) && KEYS[key];
    if (!act) return;
    event.preventDefault();
    if (event.repeat && !["j", "ArrowDown", "ArrowUp"].includes(key)) return;
    if (["j", "ArrowDown", "ArrowUp", "u"].includes(key)) act();
    else current() ? act(current()) : step(0);
  }
  // Obeys the keys from now on; returns what stops that.
  function listen() {
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }

  const panel = h("section", { class: "reviewing", "aria-label": "Review" },
    h("div", { class: "standing-row" }, meter, counted,
      h("label", { class: "by" }, "Reviewer ", name),
      h("button", { type: "button", class: "go", id: "export", onclick: save }, "Export corrected data")),
    h("p", { class: "keys" }, HELP.map(([key, text]) => h("span", {}, h("kbd", {}, key), ` ${text}`))),
    remarks, exported);
  return { panel, attach, showCounts, listen };
}

// The page of titan-rl collect. Whatever the server sends is shown by textContent, never as HTML.
"use strict";

const CHOICES = {
  pairs: [["first", "First is better", "1"], ["second", "Second is better", "2"], ["tie", "Equally good", "0"], ["both_bad", "Both are bad", "b"]],
  ratings: [["good", "Good", "1"], ["bad", "Bad", "2"], ["unsure", "Unsure", "0"]],
};
const TITLES = { pairs: ["First answer", "Second answer"], ratings: ["Answer"] };
const RETRY_MILLISECONDS = 2000;
const ANSWER_MILLISECONDS = 15000; // then a connection is taken to be dead
const part = (id) => document.getElementById(id);
const page = { who: "", mode: "pairs", item: null, last: null, original: "", shownEdit: "", begun: 0, isSending: false };

function element(name, text = "") {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}

function say(text, isBad = false) {
  part("status").textContent = text;
  part("status").className = isBad ? "bad" : "";
}

async function ask(path, options = {}) {
  const reply = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MILLISECONDS), ...options });
  const type = reply.headers.get("content-type") || "";
  const body = type.includes("application/json") ? await reply.json() : { error: await reply.text() };
  if (!reply.ok) throw Object.assign(new Error(body.error || reply.statusText), { isRefusal: reply.status < 500 && reply.status !== 408 });
  return body;
}

function show(state) {
  page.who = state.who;
  page.mode = state.mode;
  part("enter").hidden = true;
  part("person").textContent = state.who;
  part("progress").textContent = `${state.done} judged, ${state.left} open to you`;
  draw(state.item);
}

// edit: the better answer that the labeller wrote before; empty: none.
function draw(item, edit = "") {
  page.item = item;
  part("work").hidden = item === null;
  part("done").hidden = item !== null;
  if (item === null) return part("again").replaceChildren(backButton());
  part("prompt").textContent = item.prompt;
  part("answers").replaceChildren(...item.answers.map(answerBox));
  part("edit-box").hidden = item.editable === null;
  part("edit").value = item.editable ?? "";
  page.original = part("edit").value; // with the line ends of a text box
  if (edit) part("edit").value = edit;
  page.shownEdit = part("edit").value;
  part("choices").replaceChildren(...CHOICES[page.mode].map(choiceButton), backButton());
  window.scrollTo(0, 0);
  page.begun = performance.now();
}

function answerBox(text, place) {
  const box = element("div");
  box.className = "answer";
  box.append(element("h2", TITLES[page.mode][place]), element("pre", text));
  return box;
}

function choiceButton([choice, title, key]) {
  const button = element("button", title);
  button.type = "button";
  button.dataset.choice = choice;
  button.append(element("kbd", key));
  button.addEventListener("click", () => judge(choice));
  return button;
}

function backButton() {
  const button = element("button", "Back");
  button.type = "button";
  button.disabled = page.last === null;
  button.append(element("kbd", "Backspace"));
  button.addEventListener("click", back);
  return button;
}

function back() {
  if (page.isSending || page.last === null) return;
  if (page.item !== null && part("edit").value !== page.shownEdit) return say("judge this one first: its text was changed", true);
  const { item, edit } = page.last;
  page.last = null;
  draw(item, edit);
  say("judge it again: the last judgement counts");
}

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function judge(choice) {
  if (page.isSending || page.item === null) return;
  page.isSending = true;
  part("edit").disabled = true; // what is typed now would be lost
  const item = page.item;
  const edit = part("edit").value === page.original ? "" : part("edit").value;
  const seconds = Math.min((performance.now() - page.begun) / 1000, 86400);
  const judgement = { id: newId(), item: item.id, who: page.who, choice, edit, seconds };
  try {
    const state = await sendUntilSaved(judgement);
    page.last = { item, edit };
    show(state);
    say("saved");
  } catch (error) {
    say(`not saved: ${error.message}`, true);
  } finally {
    part("edit").disabled = false;
    page.isSending = false;
  }
}

// The same judgement is sent again until the server says that it is on disk, or refuses it; it counts once.
async function sendUntilSaved(judgement) {
  for (;;) {
    try {
      say("saving");
      return await ask("judgements", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(judgement) });
    } catch (error) {
      if (error.isRefusal) throw error;
      say(`not saved yet, trying again: ${error.message}`, true);
      await new Promise((resolve) => setTimeout(resolve, RETRY_MILLISECONDS));
    }
  }
}

async function begin(who) {
  try {
    const state = await ask(`next?${new URLSearchParams({ who })}`);
    const isOwn = state.who === sessionStorage.getItem("who");
    if (state.is_known && !isOwn && !confirm(`${state.who} is a name in use (${state.done} judged). Go on as ${state.who}?`)) return;
    show(state);
    say("");
    sessionStorage.setItem("who", page.who);
  } catch (error) {
    say(error.message, true);
  }
}

function onKey(event) {
  const isTyping = event.target instanceof HTMLInputElement || event.target instanceof HTMLTextAreaElement;
  if (event.key === "Escape") event.target.blur();
  if (isTyping || event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Backspace") return back();
  if (page.item === null) return;
  if (event.key === "e" && page.item.editable !== null) {
    event.preventDefault();
    return part("edit").focus();
  }
  const chosen = CHOICES[page.mode].find(([, , key]) => key === event.key);
  if (chosen) judge(chosen[0]);
}

part("enter").addEventListener("submit", (event) => {
  event.preventDefault();
  begin(part("name").value);
});
document.addEventListener("keydown", onKey);
part("name").value = sessionStorage.getItem("who") || "";
part("name").focus();

// The page of titan-rl collect. Whatever the server sends is shown by textContent, never as HTML.
"use strict";

const CHOICES = {
  pairs: [["first", "First is better", "1"], ["second", "Second is better", "2"], ["tie", "Equally good", "0"], ["both_bad", "Both are bad", "b"]],
  ratings: [["good", "Good", "1"], ["bad", "Bad", "2"], ["unsure", "Unsure", "0"]],
};
const TITLES = { pairs: ["First answer", "Second answer"], ratings: ["Answer"] };
const RETRY_MILLISECONDS = 2000;
const part = (id) => document.getElementById(id);
const page = { who: "", mode: "pairs", item: null, last: null, unedited: "", begun: 0, isSending: false };

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
  const reply = await fetch(path, { cache: "no-store", ...options });
  const type = reply.headers.get("content-type") || "";
  const body = type.includes("application/json") ? await reply.json() : { error: await reply.text() };
  if (!reply.ok) throw Object.assign(new Error(body.error || reply.statusText), { isRefusal: reply.status < 500 });
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

function draw(item) {
  page.item = item;
  part("work").hidden = item === null;
  part("done").hidden = item !== null;
  if (item === null) return;
  part("prompt").textContent = item.prompt;
  part("answers").replaceChildren(...item.answers.map(answerBox));
  part("edit-box").hidden = page.mode !== "ratings";
  part("edit").value = page.mode === "ratings" ? item.answers[0] : "";
  page.unedited = part("edit").value; // with the line ends of a text box
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
  const last = page.last;
  page.last = null;
  draw(last);
  say("judge it again: the last judgement counts");
}

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function judge(choice) {
  if (page.isSending || page.item === null) return;
  page.isSending = true;
  const item = page.item;
  const edit = part("edit").value === page.unedited ? "" : part("edit").value;
  const seconds = Math.min((performance.now() - page.begun) / 1000, 86400);
  const judgement = { id: newId(), item: item.id, who: page.who, choice, edit, seconds };
  try {
    const state = await sendUntilSaved(judgement);
    page.last = item;
    show(state);
    say("saved");
  } catch (error) {
    say(`not saved: ${error.message}`, true);
  } finally {
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
    show(await ask(`next?${new URLSearchParams({ who })}`));
    say("");
    sessionStorage.setItem("who", page.who);
  } catch (error) {
    say(error.message, true);
  }
}

function onKey(event) {
  const isTyping = event.target instanceof HTMLInputElement || event.target instanceof HTMLTextAreaElement;
  if (event.key === "Escape") event.target.blur();
  if (isTyping || event.repeat || event.ctrlKey || event.metaKey || event.altKey || page.item === null) return;
  if (event.key === "Backspace") return back();
  if (event.key === "e" && page.mode === "ratings") {
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

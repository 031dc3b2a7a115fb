// The messages of the shown conversation.

import { state, touch } from "./conversations.js";
import { announce, byId } from "./dom.js";
import { generate, isRunning, progress, runningIn, stop } from "./generation.js";
import { AnswerView, UserView } from "./messages.js";

const list = byId("messages");
const scroller = byId("transcript");
const NEAR = 80; // pixels from the end within which new text scrolls along

let views = [];
let follow = true;

/** Show the current conversation; `fix` leads to what an error needs. */
export function showTranscript(fix) {
  const { messages } = state.current;
  views = messages.map((message) => viewOf(message, fix));
  list.replaceChildren(...views.map((view) => view.element));
  views.forEach((view) => view.update());
  byId("welcome").hidden = messages.length > 0;
  follow = true;
  scrollToEnd();
}

function viewOf(message, fix) {
  const conversation = state.current;
  const at = () => conversation.messages.indexOf(message);
  if (message.role === "user") {
    return new UserView(message, {
      edit: (text) => {
        halt();
        conversation.messages.length = at();
        send({ ...message, text }, fix);
      },
    });
  }
  return new AnswerView(message, {
    fix,
    regenerate: () => {
      halt();
      conversation.messages.length = at() + 1;
      answer(message, fix);
    },
    choose: (index) => {
      message.current = index;
      touch(conversation);
      views[at()].update();
    },
  });
}

/** Send a message of the user, and generate the answer. */
export function send(message, fix) {
  const reply = { role: "assistant", versions: [], current: 0 };
  state.current.messages.push(message, reply);
  answer(reply, fix);
}

function answer(message, fix) {
  const conversation = state.current;
  const ended = generate(conversation, message);
  showTranscript(fix);
  announce("Generating");
  ended.then(() => {
    const version = message.versions[message.current];
    announce(version.error ? "" : version.finish === "stopped" ? "Stopped" : "The answer is complete");
  });
}

/** Stop what is generated in the shown conversation. */
export function halt() {
  const version = runningIn(state.current);
  if (version) stop(version);
  return version !== null;
}

progress.addEventListener("progress", ({ version }) => {
  const view = views.find(({ message }) => message.versions?.[message.current] === version);
  if (!view) return;
  view.update();
  if (follow) scrollToEnd();
  if (!isRunning(version)) updateToBottom();
});

function scrollToEnd() {
  scroller.scrollTop = scroller.scrollHeight;
  updateToBottom();
}

function updateToBottom() {
  const left = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
  byId("to-bottom").hidden = left < NEAR;
}

let top = 0;
scroller.addEventListener(
  "scroll",
  () => {
    const left = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
    if (left < NEAR) follow = true;
    else if (scroller.scrollTop < top) follow = false; // the user has scrolled up
    top = scroller.scrollTop;
    updateToBottom();
  },
  { passive: true },
);

byId("to-bottom").addEventListener("click", () => {
  follow = true;
  scrollToEnd();
});

// Where the user writes a message and adds images.

import { announce, byId, h, iconButton } from "./dom.js";
import { read, write } from "./settings.js";

const DRAFT = "tgi.draft";
const MOST_IMAGES = 16;
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/tiff"];

const form = byId("composer");
const prompt = byId("prompt");
const box = byId("drop-area");
let images = []; // as data: URLs
let sees = false;

/** Let the user write; `onsend` gets a message of the user, `onstop` nothing. */
export function startComposer({ onsend, onstop }) {
  prompt.value = read(DRAFT) ?? "";
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit(onsend);
  });
  prompt.addEventListener("keydown", (event) => {
    // A touch keyboard's Enter breaks the line: there is a button to send.
    const enter = event.key === "Enter" && !event.shiftKey && !event.isComposing;
    if (!enter || matchMedia("(pointer: coarse)").matches) return;
    event.preventDefault();
    submit(onsend);
  });
  prompt.addEventListener("input", () => {
    write(DRAFT, prompt.value);
    refresh();
  });
  byId("stop").addEventListener("click", onstop);
  byId("attach").addEventListener("click", () => byId("image-file").click());
  byId("image-file").addEventListener("change", ({ target }) => {
    addImages(target.files);
    target.value = "";
  });
  prompt.addEventListener("paste", (event) => {
    const files = imagesOf(event.clipboardData.files);
    if (!sees || !files.length) return;
    event.preventDefault();
    addImages(files);
  });
  for (const kind of ["dragover", "dragleave", "drop"]) {
    addEventListener(kind, (event) => drag(kind, event));
  }
  refresh();
}

/** Whether the model takes images. */
export function takeImages(value) {
  sees = value;
  byId("attach").hidden = !value;
}

/** Show Stop instead of Send while the shown conversation is answered. */
export function setRunning(running) {
  byId("send").hidden = running;
  byId("stop").hidden = !running;
}

/** Put a text into the box, to be sent or changed. */
export function draft(text) {
  prompt.value = text;
  write(DRAFT, text);
  refresh();
  prompt.focus();
}

function submit(onsend) {
  const text = prompt.value.trim();
  if ((!text && !images.length) || byId("send").hidden) return;
  const message = { role: "user", text, images };
  images = [];
  draft("");
  showImages();
  onsend(message);
}

function refresh() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`; // up to the maximum of the style sheet
  byId("send").disabled = !prompt.value.trim() && !images.length;
}

const imagesOf = (files) => [...files].filter(({ type }) => TYPES.includes(type));

function drag(kind, event) {
  if (![...(event.dataTransfer?.types ?? [])].includes("Files")) return;
  event.preventDefault(); // else the browser would leave the page and open the file
  box.classList.toggle("dropping", sees && kind === "dragover");
  if (kind === "drop" && sees) addImages(event.dataTransfer.files);
}

async function addImages(files) {
  const found = await Promise.all(imagesOf(files).map(dataUrl));
  const room = MOST_IMAGES - images.length;
  if (found.length > room) announce(`At most ${MOST_IMAGES} images`);
  images.push(...found.slice(0, room));
  showImages();
  prompt.focus();
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function showImages() {
  byId("thumbnails").replaceChildren(
    ...images.map((src, i) =>
      h(
        "div",
        { class: "thumbnail" },
        h("img", { src, alt: `Image ${i + 1}` }),
        iconButton("close", `Remove image ${i + 1}`, () => {
          images.splice(i, 1);
          showImages();
          prompt.focus();
        }),
      ),
    ),
  );
  refresh();
}

// The settings' tab.

import { byId, download, h } from "./dom.js";
import { DEFAULTS, parsedSchema, SAMPLING, settings, update } from "./settings.js";

const EXAMPLE = {
  type: "object",
  properties: {
    name: { type: "string" },
    year: { type: "integer" },
    tags: { type: "array", items: { type: "string" }, maxItems: 3 },
  },
  required: ["name", "year", "tags"],
};

const EFFORTS = { "": "Model's default", none: "None", low: "Low", medium: "Medium", high: "High" };

/** The id of a setting's control. */
export const idOf = (name) => `set-${name}`;

/** Fill the tab; `onkey` is called when the API key has changed. */
export function startSettings(onkey) {
  byId("settings").replaceChildren(...fields(onkey));
  showSchema();
}

function fields(onkey) {
  return [
    group("Instructions", textArea("system", "System prompt", 4, "None")),
    group(
      "Sampling",
      h("p", { class: "fine" }, "Empty fields are the server's defaults."),
      h("div", { class: "grid" }, ...SAMPLING.map(samplingField)),
      textArea("stop", "Stop strings, one per line", 2, "None"),
      field("Reasoning effort", effortField(), "effort"),
    ),
    schemaGroup(),
    group(
      "Token view",
      toggle("logprobs", "Ask for the tokens' probabilities"),
      field("Alternatives of each token", numberField("alternatives", 0, 20), "alternatives"),
    ),
    group(
      "Access",
      field(
        "API key",
        h("input", {
          id: idOf("apiKey"),
          type: "password",
          value: settings.apiKey,
          autocomplete: "off",
          placeholder: "None",
          spellcheck: false,
          onchange: ({ target }) => {
            update({ apiKey: target.value.trim() });
            onkey();
          },
        }),
        "apiKey",
      ),
      h("p", { class: "fine" }, "Kept in this browser, and sent to this server alone."),
    ),
    h(
      "button",
      {
        class: "button",
        type: "button",
        onclick: () => {
          const { apiKey, model, panel } = settings;
          update({ ...DEFAULTS, sampling: {}, apiKey, model, panel });
          startSettings(onkey);
        },
      },
      "Reset settings",
    ),
  ];
}

function group(title, ...children) {
  return h("fieldset", {}, h("legend", {}, title), ...children);
}

function field(label, control, name, hint = "") {
  return h(
    "div",
    { class: "field" },
    h("label", { for: idOf(name) }, label, hint ? h("span", { class: "fine" }, ` ${hint}`) : null),
    control,
  );
}

function textArea(name, label, rows, placeholder) {
  const area = h("textarea", {
    id: idOf(name),
    rows,
    placeholder,
    value: settings[name],
    oninput: ({ target }) => update({ [name]: target.value }),
  });
  return field(label, area, name);
}

function samplingField({ name, label, hint, ...limits }) {
  const input = h("input", {
    id: idOf(name),
    type: "number",
    inputMode: "decimal",
    placeholder: "Default",
    ...limits,
    value: settings.sampling[name] ?? "",
    oninput: () => {
      if (!input.validity.valid) return;
      const { [name]: _, ...others } = settings.sampling;
      update({ sampling: input.value === "" ? others : { ...others, [name]: input.valueAsNumber } });
    },
  });
  if (limits.step < 1) input.step = "any"; // the step of the arrows would refuse values between
  return field(label, input, name, hint);
}

function numberField(name, min, max) {
  const input = h("input", {
    id: idOf(name),
    type: "number",
    min,
    max,
    step: 1,
    value: settings[name],
    oninput: () => input.validity.valid && input.value && update({ [name]: input.valueAsNumber }),
  });
  return input;
}

function effortField() {
  return h(
    "select",
    { id: idOf("effort"), onchange: ({ target }) => update({ effort: target.value }) },
    ...Object.entries(EFFORTS).map(([value, label]) =>
      h("option", { value, selected: value === settings.effort }, label),
    ),
  );
}

function toggle(name, label, then = () => {}) {
  const input = h("input", {
    id: idOf(name),
    type: "checkbox",
    role: "switch",
    checked: settings[name],
    onchange: () => {
      update({ [name]: input.checked });
      then();
    },
  });
  return h("label", { class: "toggle" }, input, h("span", {}, label));
}

function schemaGroup() {
  const file = h("input", {
    id: idOf("schema-file"),
    type: "file",
    accept: "application/json,.json",
    hidden: true,
    onchange: async () => setSchema(await file.files[0].text()),
  });
  const button = (label, onclick) => h("button", { class: "button", type: "button", onclick }, label);
  return group(
    "JSON schema",
    toggle("useSchema", "Answers follow this schema", showSchema),
    h("textarea", {
      id: idOf("schema"),
      class: "code-area",
      rows: 7,
      spellcheck: false,
      placeholder: '{ "type": "object", … }',
      "aria-label": "JSON schema",
      "aria-describedby": idOf("schema-state"),
      value: settings.schema,
      oninput: ({ target }) => {
        update({ schema: target.value, useSchema: Boolean(target.value.trim()) });
        showSchema();
      },
    }),
    h("p", { id: idOf("schema-state"), class: "fine", role: "status" }),
    h(
      "div",
      { class: "row wrap" },
      button("Load file", () => file.click()),
      button("Example", () => setSchema(JSON.stringify(EXAMPLE))),
      button("Save", () => download("schema.json", settings.schema)),
      file,
    ),
  );
}

/** Take a schema over, and lay it out if it is valid JSON. */
function setSchema(text) {
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // Shown as it is, with the error below it.
  }
  update({ schema: text, useSchema: true });
  byId(idOf("schema")).value = text;
  showSchema();
}

function showSchema() {
  byId(idOf("useSchema")).checked = settings.useSchema;
  const line = byId(idOf("schema-state"));
  let problem = "";
  try {
    parsedSchema();
  } catch (error) {
    problem = error.message;
  }
  line.classList.toggle("bad", Boolean(problem));
  line.textContent = problem || (settings.useSchema && settings.schema.trim() ? "Valid JSON" : "");
}

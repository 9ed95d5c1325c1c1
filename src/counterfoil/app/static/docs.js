// The API, drawn from its OpenAPI document.

import { get } from "./api.js";
import { chooseTheme, failure, h } from "./dom.js";

const main = document.getElementById("main");

chooseTheme();
get("/openapi.json").then(draw, (error) => main.append(failure(error)));

function draw(api) {
  const operations = Object.entries(api.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, one]) => ({ path, method, ...one })));
  const tags = [...new Set(operations.flatMap((one) => one.tags ?? []))];
  main.append(
    h("h1", {}, `The API, version ${api.info.version}`),
    h("p", {}, api.info.description, " The OpenAPI document itself: ", h("a", { href: "/openapi.json" }, "/openapi.json"), "."),
    ...tags.map((tag) => h("section", {}, h("h2", {}, tag), operations.filter((one) => one.tags?.includes(tag)).map((one) => operation(api, one)))));
}

function operation(api, { path, method, description, parameters = [], requestBody, responses }) {
  const body = requestBody && Object.values(requestBody.content)[0].schema;
  const good = Object.entries(responses).find(([status]) => status.startsWith("2"));
  const answer = good && Object.values(good[1].content ?? {})[0]?.schema;
  const errors = Object.entries(responses).filter(([status]) => !status.startsWith("2"));
  return h("details", { class: "operation" },
    h("summary", {}, h("b", { class: method }, method.toUpperCase()), h("code", {}, path), h("span", {}, description)),
    parameters.length > 0 && [h("h3", {}, "Query"), h("dl", {}, parameters.map((one) => field(api, one.name, one.schema, one.required)))],
    body && [h("h3", {}, `Body, ${Object.keys(requestBody.content)[0]}`), fields(api, body)],
    answer && Object.keys(answer).length > 0 && [h("h3", {}, "Answer"), fields(api, answer)],
    h("p", { class: "facts" }, "Problems: ", errors.map(([status, one]) => `${status} ${one.description}`).join(", ")));
}

const resolve = (api, schema) => (schema?.$ref ? api.components.schemas[schema.$ref.split("/").at(-1)] : schema);

function fields(api, schema) {
  const resolved = resolve(api, schema);
  const required = new Set(resolved.required ?? []);
  return h("div", {}, resolved.description && h("p", {}, resolved.description),
    h("dl", {}, Object.entries(resolved.properties ?? {}).map(([name, one]) => field(api, name, one, required.has(name)))));
}

function field(api, name, schema, required) {
  return [h("dt", {}, h("code", {}, name), required && h("small", {}, " required")), h("dd", {}, kind(api, schema), schema.description ? `: ${schema.description}` : "")];
}

function kind(api, schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return schema.anyOf.map((one) => kind(api, one)).join(" or ");
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  if (schema.type === "array") return schema.items ? `list of ${kind(api, schema.items)}` : "list";
  const limits = [["at least", schema.minimum ?? schema.minLength], ["at most", schema.maximum ?? schema.maxLength]]
    .filter(([, value]) => value != null).map(([word, value]) => `${word} ${value}`);
  return [schema.type ?? "anything", ...limits].join(", ") + (schema.default != null ? ` (default ${JSON.stringify(schema.default)})` : "");
}

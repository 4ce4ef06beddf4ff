// OpenAI's JavaScript client against the gateway: prints what it got as JSON.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(pathToFileURL(`${process.env.CLIENTS_NODE}/package.json`));
const OpenAI = require("openai").default;
const given = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI({ baseURL: given.base_url, apiKey: "none", maxRetries: 0 });
const messages = [
  { role: "user", content: given.text },
  { role: "user", content: given.question },
];
const ask = (options) => client.chat.completions.create({ model: "memagent", ...options });

const short = await ask({ messages: [{ role: "user", content: "Hello?" }] });
const long = await ask({ messages });
let streamed = "";
let progress = 0;
for await (const chunk of await ask({ messages, stream: true, reading: { seed: 7 } })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  progress += chunk.choices[0]?.delta?.reasoning_content ? 1 : 0;
}
const response = await client.responses.create({ model: "memagent", input: messages });
const file = await client.files.create({
  file: new File([given.text], "novel.txt"),
  purpose: "user_data",
});
const content = [
  { type: "file", file: { file_id: file.id } },
  { type: "text", text: given.question },
];
const asked = await ask({ messages: [{ role: "user", content }] });
let error = "none";
try {
  await client.chat.completions.create({ model: "nosuch", messages });
} catch (raised) {
  error = raised.constructor.name;
}
const cut = new AbortController();
setTimeout(() => cut.abort(), 50);
let aborted = "no";
try {
  await client.chat.completions.create(
    { model: "memagent", messages, reading: { seed: 8 } },
    { signal: cut.signal },
  );
} catch (raised) {
  aborted = raised.constructor.name;
}
console.log(
  JSON.stringify({
    short: short.choices[0].message.content,
    long: long.choices[0].message.content,
    streamed,
    progress,
    response: response.output_text,
    file: asked.choices[0].message.content,
    tokens: long.usage.total_tokens,
    error,
    aborted,
  }),
);

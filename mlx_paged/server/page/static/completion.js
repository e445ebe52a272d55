// One request to the API, streamed.

import { Refusal } from "./refusal.js";
import { textLines } from "./text_lines.js";

/**
 * Asks for a chat with a system prompt, if there is one, or for a text to be continued.
 * Yields {id, index, text, finishReason} as they come; `id` is the request's.
 * Throws a Refusal with a sentence, or what fetch throws.
 */
export async function* streamCompletion({ kind, system, prompt, headers, signal, ...parameters }) {
  const isChat = kind === "chat";
  const asked = isChat ? { messages: messages(system, prompt) } : { prompt };
  const response = await fetch(isChat ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers },
    body: JSON.stringify({ ...asked, ...parameters, stream: true }),
    signal,
  });
  if (!response.ok) throw await Refusal.of(response);
  for await (const line of textLines(response)) {
    if (!line.startsWith("data:")) continue;
    const data = line.slice(5).trim();
    if (data === "[DONE]") return;
    yield* pieces(JSON.parse(data));
  }
  throw new Refusal(0, "The answer broke off.");
}

function messages(system, prompt) {
  const user = { role: "user", content: prompt };
  return system.trim() ? [{ role: "system", content: system }, user] : [user];
}

function* pieces(chunk) {
  if (chunk.error) throw new Refusal(500, chunk.error.message ?? "The server met an error.");
  for (const choice of chunk.choices ?? []) {
    yield {
      id: chunk.id,
      index: choice.index,
      text: choice.text ?? choice.delta?.content ?? "",
      finishReason: choice.finish_reason ?? null,
    };
  }
}

// A response's body as lines of text, as they come.

export async function* textLines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const parts = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = value.split("\n");
      for (let i = 0; i < lines.length - 1; i += 1) {
        yield parts.join("") + lines[i].replace(/\r$/, "");
        parts.length = 0;
      }
      parts.push(lines.at(-1));
    }
    if (parts.join("")) yield parts.join("");
  } finally {
    reader.cancel().catch(() => {});
  }
}

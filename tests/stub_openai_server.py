"""A server of OpenAI's API that answers with given words, for clients' tests."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORDS = ["word0 ", "word1 ", "word2"]


class StubServer:
    """Use it in a `with` block. Attributes may be changed between requests.

    Attributes:
        words: of every answer, one an event.
        seconds: before each event.
        failure: (status, body) to answer with instead.
        cut_after: words after which the connection is closed without a word; None for never.
        bodies, headers: of the requests to a completions endpoint.
        num_left: clients that had gone before their answer ended.
    """

    def __init__(self, models=("stub",), words=WORDS, seconds=0.0):
        self.models, self.words, self.seconds = models, words, seconds
        self.failure = self.cut_after = None
        self.bodies, self.headers, self.num_left = [], [], 0
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # clients that leave
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()

    def _handler(stub):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                data = [
                    {"id": m, "object": "model", "created": 0, "owned_by": ""} for m in stub.models
                ]
                self.reply(200, {"object": "list", "data": data})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.bodies.append(body)
                stub.headers.append(self.headers)
                if stub.failure:
                    return self.reply(*stub.failure)
                if body.get("stream"):
                    return self.stream(body)
                time.sleep(stub.seconds * len(stub.words))
                self.reply(
                    200,
                    {
                        "id": "x",
                        "choices": [choice(body, "".join(stub.words), "stop")],
                        "usage": usage(),
                    },
                )

            def stream(self, body):
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                try:
                    for i, word in enumerate(stub.words):
                        time.sleep(stub.seconds)
                        if i == stub.cut_after:
                            self.close_connection = True
                            return
                        last = i + 1 == len(stub.words)
                        self.event(
                            {"choices": [choice(body, word, "stop" if last else None, "delta")]}
                        )
                    if (body.get("stream_options") or {}).get("include_usage"):
                        self.event({"choices": [], "usage": usage()})
                    self.chunk(b"data: [DONE]\n\n")
                    self.chunk(b"")
                except OSError:
                    stub.num_left += 1

            def event(self, fields):
                event = {"id": "x", "object": "chunk", "created": 0, "model": "stub", **fields}
                self.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

            def chunk(self, data):
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

            def reply(self, status, body):
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments):
                pass

        def choice(body, text, reason, kind="message"):
            said = {kind: {"content": text}} if "messages" in body else {"text": text}
            return {"index": 0, **said, "finish_reason": reason}

        def usage():
            details = {"cached_tokens": 16}
            return {
                "prompt_tokens": 20,
                "completion_tokens": len(stub.words),
                "total_tokens": 20 + len(stub.words),
                "prompt_tokens_details": details,
            }

        return Handler

"""A real HTTP server on loopback that speaks OpenAI's chat API, and can be told to misbehave."""

import json
import re
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "secret"


class ChatServer(ThreadingHTTPServer):
    """Ranks candidates by falling ordinal.

    asked: requests by query. first_statuses: answered to the first requests of each query, in turn, before an answer.
    text: the answer's text instead, if not None. delay_s: the wait before each answer.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: Counter[str] = Counter()
        self.starts: list[float] = []
        self.first_statuses: list[int] = []
        self.text: str | None = None
        self.delay_s = 0.0
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: ChatServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt = body["messages"][-1]["content"]
        query = prompt.partition("\n")[0]
        with server.lock:
            server.asked[query] += 1
            server.starts.append(time.monotonic())
            count = server.asked[query]
        if self.headers["authorization"] != f"Bearer {KEY}":
            self.answer(401, {"error": {"message": "wrong key"}})
        elif count <= len(server.first_statuses):
            self.answer(server.first_statuses[count - 1], {"error": {"message": prompt}})
        else:
            time.sleep(server.delay_s)
            self.answer(200, self.completion(prompt))

    def completion(self, prompt: str) -> dict[str, object]:
        ordinals = re.findall(r"^\[(\d+)\]", prompt, flags=re.M)
        text = " > ".join(f"[{n}]" for n in reversed(ordinals)) if self.server.text is None else self.server.text
        return {
            "id": "c",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [
                {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}},
            ],
            "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
        }

    def answer(self, status: int, values: dict[str, object]) -> None:
        data = json.dumps(values).encode()
        self.send_response(status)
        if status == 429:
            self.send_header("retry-after", "1")
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass

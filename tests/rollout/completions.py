"""A server of completions, as good or as bad as a test wants it."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """`answer(body) -> (status, object or bytes)`; keeps what it was asked."""

    def __init__(self, answer) -> None:
        asked = self.asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked.append({**body, "path": self.path, "key": self.headers["Authorization"]})
                status, said = answer(body)
                content = said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


def choice(text: str, finish: str = "stop", **more) -> dict:
    return {"choices": [{"text": text, "finish_reason": finish, **more}]}


def adds(vocabulary):
    """A server that does its sums; sampled, it is wrong about every prompt with a 7 in it."""

    def answer(body):
        text = vocabulary.tokenizer.decode(body["prompt"])
        a, b = map(int, re.findall(r"\d+", text)[:2])
        wrong = body["temperature"] > 0 and "7" in text
        return 200, choice(str(a + b + wrong))

    return answer

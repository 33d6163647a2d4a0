# SPDX-License-Identifier: Apache-2.0
"""A server that answers from a table, for the parts of the command line that speak HTTP."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ScriptedServer:
    """Answers each path with (status, body) from `pages`; a list body is sent as a stream of SSE lines.

    A function in such a list is called before the next line is sent: it can wait for something to happen.
    """

    def __init__(self):
        self.pages = {}
        self.requests = []
        self.headers = []
        self.promised_length = None
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                scripted.requests.append((self.path, body))
                scripted.headers.append(dict(self.headers))
                status, page = scripted.pages.get(self.path, (404, "no such page"))
                page = page(body) if callable(page) else page
                self.send_response(status)
                if scripted.promised_length:
                    self.send_header("Content-Length", str(scripted.promised_length))
                self.end_headers()
                if isinstance(page, list):
                    for message in page:
                        if callable(message):
                            message()
                            continue
                        text = message if isinstance(message, str) else json.dumps(message)
                        self.wfile.write(f"data: {text}\n\n".encode())
                else:
                    self.wfile.write(page.encode() if isinstance(page, str) else json.dumps(page).encode())

            do_GET = do_POST = answer

            def log_message(self, *arguments):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()


def sglang_stream(counts, *, prompt_tokens, cached=0, verify=None, text="The cat sat on the mat. " * 8, **meta):
    """Messages of /generate: completion_tokens after each, and the speculation counters in the last."""
    messages = [
        {
            "text": text[: 3 * count],
            "output_ids": list(range(count)),
            "meta_info": {"completion_tokens": count, "prompt_tokens": prompt_tokens, "cached_tokens": cached},
        }
        for count in counts
    ]
    messages[-1]["text"] = text
    if verify is not None:
        messages[-1]["meta_info"] |= {"spec_verify_ct": verify, **meta}
    return [*messages, "[DONE]"]

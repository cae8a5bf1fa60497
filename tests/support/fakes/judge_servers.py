"""OpenAI-style servers in a thread of this process, in the place of a judge's."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def server(reply):
    """An OpenAI-style one: ``reply(request)`` is what it says, or the status that it answers with, alone or before what
    it gives as Retry-After."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(body | {"path": self.path, "key": self.headers.get("Authorization", "")})
            said = reply(body)
            said, retry_after = said if isinstance(said, tuple) else (said, None)
            status, content = (said, {}) if isinstance(said, int) else (200, _message(said))
            requests[-1]["accepts"] = self.headers.get("Accept-Encoding")
            data = said if isinstance(said, bytes) else json.dumps(content).encode()
            self.send_response(status)
            if isinstance(said, bytes):
                self.send_header("Content-Encoding", "gzip, gzip")
            if retry_after is not None:
                self.send_header("Retry-After", retry_after)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/v1", requests
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


def _message(said):
    return said if isinstance(said, dict) else {"choices": [{"message": {"role": "assistant", "content": said}}]}

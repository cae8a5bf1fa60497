"""A tool's server and a judge in one, for tests to start and to kill: ``python outside_servers.py PORT SECONDS``.

``/tool`` gives 7, ``/v1/chat/completions`` the best mark, each after so many seconds.
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, SECONDS = int(sys.argv[1]), float(sys.argv[2])
REPLIES = {"/tool": 7, "/v1/chat/completions": {"choices": [{"message": {"content": "Mark: 10"}}]}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(SECONDS)
        data = json.dumps(REPLIES[self.path]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 256


Server(("127.0.0.1", PORT), Handler).serve_forever()

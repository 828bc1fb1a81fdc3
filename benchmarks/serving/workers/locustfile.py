"""Users of a chat, for locust.

Run it with:

    locust -f locustfile.py --headless --users 8 --spawn-rate 2 --run-time 1m --host http://HOST:PORT

MOECAST_API_KEY holds the server's key, if it has one.
"""

import os

from locust import HttpUser, between, task

HEADERS = {"Authorization": f"Bearer {os.environ.get('MOECAST_API_KEY', 'none')}"}


class Reader(HttpUser):
    wait_time = between(0.1, 0.5)

    @task(2)
    def completes(self) -> None:
        body = {"prompt": "The heart pumps blood", "max_tokens": 8}
        self.client.post("/v1/completions", json=body, headers=HEADERS)

    @task(1)
    def chats(self) -> None:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        self.client.post("/v1/chat/completions", json=body, headers=HEADERS)

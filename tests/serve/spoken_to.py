"""Scripted models behind the server's app, and OpenAI's own client that speaks to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import openai
from fastapi.testclient import TestClient
from scripted import Speaker

from pentameter.machine.address import LOOPBACK
from pentameter.serve.app import create_app
from pentameter.serve.endpoints.requests import Limits
from pentameter.serve.guard import Access
from pentameter.serve.worker import Worker

URL = "http://127.0.0.1:8000"


@contextmanager
def serving(*speakers: Speaker) -> Iterator[TestClient]:
    """A client of the app that serves the models, while it runs."""
    worker = Worker(most_waiting=8)
    for each in speakers:
        worker.add(each.served)
    limits = Limits(max_tokens=200, texts=4, seconds=60, body_bytes=10_000)
    with TestClient(create_app(worker, limits, Access(LOOPBACK)), base_url=URL) as client:
        yield client


def openai_client(client: TestClient) -> openai.OpenAI:
    """OpenAI's own client, whose requests go to that app."""
    return openai.OpenAI(base_url=f"{URL}/v1", api_key="none", http_client=client, max_retries=0)

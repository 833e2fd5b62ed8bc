"""`pentameter serve`: models over HTTP, with OpenAI's interface."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import tyro

from pentameter.cli.options.arguments import check_least, device_for_verb, load_for_verb, parse
from pentameter.config.choices import LoadedPrecision
from pentameter.errors import ConfigError, missing_package, remark
from pentameter.machine.address import LOOPBACK, api_key_of, bind, check_origin
from pentameter.machine.load.beside_others import BesideOthers


@dataclass(frozen=True)
class ServeArguments:
    """Serve models over HTTP, with OpenAI's interface: /v1/completions, /v1/chat/completions,
    /v1/responses, /v1/models, /health. A text follows from its request alone, whoever is served
    beside it."""

    models: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Run folders (their best checkpoint, else their last), checkpoint folders, or Hugging Face
    folders. Requests name a model by its folder's name."""
    host: str = "127.0.0.1"
    """Address to listen on. Any other than this machine's own lets others ask: give --api-key."""
    port: int = 8000
    """0 takes any that is free."""
    api_key: Annotated[str | None, tyro.conf.arg(metavar="KEY")] = None
    """The key that requests must carry (Authorization: Bearer KEY). In the environment, as
    PENTAMETER_API_KEY, other users of this machine do not see it."""
    cors_origin: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ORIGIN")] = ()
    """Sites whose pages may ask from a browser, such as https://chat.example; * is any."""
    slots: int = 16
    """Texts that each model writes at once; its cache takes memory for them all."""
    queue: int = 256
    """Texts that may wait for a slot; beyond them requests are refused with 503."""
    max_tokens: int = 4096
    """Most new tokens of a text."""
    max_seconds: float = 600.0
    """Longest time that a request may take, waiting included."""
    max_bytes: int = 1_048_576
    """Largest body of a request."""
    grace_seconds: float = 30.0
    """On SIGINT or SIGTERM requests that run have this long to end."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the models run; auto takes the fastest present."""
    precision: LoadedPrecision = "weights"
    """In what matrix products are computed; in bf16 and fp16, weights, keys and values have 16
    bits, too. `weights` is what the weights were saved in, or fp32 if a model was published in 16
    bits."""


def run(arguments: list[str]) -> int:
    """Serve the models that `arguments` (the command line after the verb) name until SIGINT or
    SIGTERM, and return the exit code: 0, or 1 if a second SIGINT cut requests off."""
    asked = parse(ServeArguments, arguments, verb="serve")
    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        raise missing_package("serve", " and ".join(missing), "serve")
    check_least(asked, slots=1, queue=0, max_tokens=1, max_seconds=0, max_bytes=1, grace_seconds=0)
    if not asked.models:
        raise ConfigError("serve needs a MODEL: a run folder or a Hugging Face folder")
    names = [path.resolve().name for path in asked.models]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"two models are called {name!r}, by which requests name them: rename a folder"
            )
    from pentameter.serve.endpoints.requests import Limits
    from pentameter.serve.server import serve
    from pentameter.serve.worker import Worker, served_model

    api_key = api_key_of(asked.api_key)
    for origin in asked.cors_origin:
        check_origin(origin)
    limits = Limits(asked.max_tokens, asked.max_seconds, asked.max_bytes)
    device = device_for_verb(asked.device)
    # The port is refused before models are loaded.
    with bind(asked.host, asked.port) as bound, BesideOthers():
        if asked.host not in LOOPBACK and api_key is None:
            remark(f"--host {asked.host} lets other machines ask; --api-key KEY has them give one")
        if "*" in asked.cors_origin and api_key is None:
            remark("--cors-origin '*' lets any page ask that is open in a browser; give --api-key")
        worker = Worker(most_waiting=asked.queue)
        for name, path in zip(names, asked.models, strict=True):
            loaded = worker.call(partial(load_for_verb, path, device, asked.precision))
            served = worker.call(partial(served_model, name, loaded, asked.slots))
            print(f"{name}: {served.described()}", flush=True)
            remark(*served.remarks())
            worker.add(served)
        return serve(
            worker,
            bound,
            limits,
            api_key=api_key,
            origins=asked.cors_origin,
            grace_seconds=asked.grace_seconds,
        )

"""A hook that tells somebody when a run ends or fails: by mail, Slack, or any URL.

    python examples/notify.py --to URL [--section.key VALUE …]

Trains the `grammar` preset (no download, at most a minute) and tells `--to`, which may be given
several times, how that ended:

- `https://hooks.slack.com/…` (or any chat that takes `{"text": …}`): a message;
- any other `http://` or `https://` address: a POST of one JSON object;
- `mailto:somebody@example.org`: a mail through SMTP_HOST ("localhost" if that is not set).
"""

import argparse
import json
import os
import smtplib
import urllib.request
from email.message import EmailMessage
from urllib.parse import urlsplit

import pentameter as pm

TIMEOUT_SECONDS = 20


class Notify:
    """Tells each address, once, how the run ended. Somebody who cannot be reached ends no run."""

    def __init__(self, *addresses):
        self.addresses = addresses

    def on_end(self, trainer, end):
        """Tell that the run is complete, or was stopped: by a hook, patience or a signal."""
        self._tell(trainer, end.kind, f"ended after step {end.step}: {end.reason}")

    def on_error(self, trainer, error):
        """Tell why it failed."""
        self._tell(trainer, "error", f"failed at step {trainer.state.step}: {error}")

    def _tell(self, trainer, kind, text):
        if not trainer.world.is_main:  # hooks are called in every process
            return
        run = {
            "run": str(trainer.run_dir),
            "name": trainer.config.name,
            "kind": kind,
            "step": trainer.state.step,
            "text": f"{trainer.config.name} {text}",
        }
        for address in self.addresses:
            try:
                send(address, run)
            except Exception as problem:  # a run does not fail because nobody hears of it
                host = urlsplit(address).hostname or "mail"  # the rest may be a secret
                trainer.console.say(f"warning: {host} was not told: {problem}")


def send(address, run):
    """Send one notification. Raises OSError, ValueError or HTTPException if it does not arrive."""
    if address.startswith("mailto:"):
        mail = EmailMessage()
        mail["Subject"], mail["To"] = run["text"].splitlines()[0][:120], address[len("mailto:") :]
        mail["From"] = os.environ.get("SMTP_FROM", "pentameter@localhost")
        mail.set_content(json.dumps(run, indent=2))
        host, _, port = os.environ.get("SMTP_HOST", "localhost").partition(":")
        with smtplib.SMTP(host, int(port or 25), timeout=TIMEOUT_SECONDS) as server:
            server.send_message(mail)
        return
    if not address.startswith(("http://", "https://")):
        raise ValueError("an address begins with https://, http:// or mailto:")
    body = {"text": run["text"]} if "hooks.slack.com" in address else run
    request = urllib.request.Request(
        address, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS).close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--to", action="append", default=[])
    asked, overrides = parser.parse_known_args()
    end = pm.Trainer(pm.load_config("grammar", overrides), hooks=[Notify(*asked.to)]).fit()
    print(f"ended after step {end.step}: {end.reason}")
